"""One case after another, each a run of its own, then the table. What is known so far is written after each.

Leaves out how a run is watched (watch.py) and judged (judge.py).

    python -m megasync.bench faults --config configs/bench_faults.yaml [bench_faults.cases=[pausing,rank0]] [--json FILE]
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megasync.assets import write_assets
from megasync.bench.config import BenchRoot
from megasync.bench.faults.cases import Case, all_cases, chosen_cases
from megasync.bench.faults.judge import Expected, Verdict, judge
from megasync.bench.faults.watch import Settings, Watched, run_case
from megasync.bench.machine import describe_machine
from megasync.bench.tables import print_table
from megasync.config.check import check_config
from megasync.config.errors import ConfigError, explain, refuse_if
from megasync.config.load import save_config
from megasync.config.schema import Config
from megasync.files import CHECKPOINTS, write_atomically

NUM_REPLICAS = 2  # the one that is hit, and one that goes on
TITLES = ("case", "exit codes", "s", "s lost", "starts", "gap", "left", "right")
Results = dict[str, dict[str, Any]]


def prepare(config: BenchRoot) -> BenchRoot:
    """The config with model and data, which are written into the run's folder, and a checkpoint after each step.

    Raises:
        ConfigError: these cases cannot be run; nothing was started.
    """
    rollout, faults = config.rollout, config.bench_faults
    message = f"rollout.replicas = {rollout.replicas}: the replica that is hit needs one that goes on"
    refuse_if(rollout.replicas < NUM_REPLICAS, message, remedy=f"write rollout.replicas={NUM_REPLICAS}")
    message = f"algorithm.name = {config.algorithm.name}: has no replicas to be hit"
    refuse_if(config.algorithm.name != "grpo", message, choices="grpo", remedy="write algorithm.name=grpo")
    chosen_cases(_all_cases(config), faults.cases)
    sections: dict[str, Any] = {"checkpoint": {"every_steps": 1, "keep": config.run.steps + 1, "resume": "auto"}}
    if not config.model.path:
        folder = config.run.folder / "assets"
        try:
            assets = write_assets(folder, config.run.seed)
        except OSError as error:
            remedy = "write run.dir=FOLDER for a folder of yours"
            raise ConfigError(explain(f"{folder}: cannot be written: {error.strerror}", remedy=remedy)) from error
        sections |= {"model": {"path": str(assets.model)}, "data": {"train": str(assets.train)}}
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    config = config.model_copy(update=changed)
    check_config(_run_config(config, "check"), faults.num_ranks)
    return config


def run(config: BenchRoot, json_path: Path | None) -> int:
    """By a prepared config. Exit code 1: something was not right in a case."""
    found: Results = {}
    results = {"bench": "faults", **describe_machine(), "config": config.model_dump(), "cases": found}
    usual: Watched | None = None
    for case in chosen_cases(_all_cases(config), config.bench_faults.cases):
        seen, verdict = run_one(case, config, usual)
        usual = usual or seen
        found[case.name] = summarise(case, seen, verdict, usual)
        for file in filter(None, (config.run.folder / "bench_faults.json", json_path)):
            write_atomically(file, json.dumps(results, indent=1) + "\n")
        print(f"{case.name}: {found[case.name]['seconds']:.0f} s, {told(found[case.name])}", flush=True)
    show(found)
    return int(any(each["problems"] for each in found.values()))


def run_one(case: Case, config: BenchRoot, usual: Watched | None) -> tuple[Watched, Verdict]:
    """A run of its own, to its end; of what it leaves in the run's folder the checkpoints are taken away."""
    faults, run_config = config.bench_faults, _run_config(config, case.name)
    place = config.run.folder / "cases" / case.name
    for former in (run_config.run.folder, place):
        shutil.rmtree(former, ignore_errors=True)
    path = place / "config.yaml"
    save_config(run_config, path)
    seen = run_case(case, place, Settings(path, run_config.run.folder, faults.num_ranks, faults.limit_seconds), usual)
    expected = Expected(config.run.steps, config.data.batch_size, config.rollout.max_staleness, config.rollout.replicas)
    verdict = judge(case, place, run_config.run.folder, Path(config.model.path), expected)
    shutil.rmtree(run_config.run.folder / CHECKPOINTS, ignore_errors=True)
    return seen, verdict


def _all_cases(config: BenchRoot) -> list[Case]:
    faults = config.bench_faults
    return all_cases(faults.rank_points, config.run.steps, faults.num_ranks, config.run.seed)


def _run_config(config: BenchRoot, name: str) -> Config:
    """Of one case: without the bench's keys, in a folder of its own."""
    sections = {section: getattr(config, section) for section in Config.model_fields}
    sections["run"] = config.run.model_copy(update={"dir": str(config.run.folder / "runs"), "name": name})
    return Config(**sections)


def summarise(case: Case, seen: Watched, verdict: Verdict, usual: Watched) -> dict[str, Any]:
    """What is written down of a case; `problems` is empty where all is right."""
    is_late = None in seen.exit_codes
    problems = ["a start of it had to be ended"] if is_late else []
    wanted = 0 if case.kind != "rank" else None
    if seen.exit_codes[-1] != 0 or (wanted is not None and seen.exit_codes != [0]):
        problems.append(f"exit codes {seen.exit_codes}")
    problems += verdict.problems + [f"left: {each}" for each in seen.left]
    fields = {**asdict(case), **asdict(seen), **asdict(verdict), "problems": problems}
    return {**fields, "lost_seconds": seen.seconds - usual.seconds}


def told(found: dict[str, Any]) -> str:
    problems: list[str] = found["problems"]
    return "; ".join(problems[:3] + ([f"{len(problems) - 3} more"] if len(problems) > 3 else [])) or "right"


def show(found: Results) -> None:
    """The table."""
    rows: list[Sequence[str]] = [
        [
            name,
            " ".join("hung" if code is None else str(code) for code in each["exit_codes"]),
            f"{each['seconds']:.1f}",
            f"{each['lost_seconds']:.1f}",
            " ".join(str(count) for count in each["num_starts"].values()),
            f"{each['gap']:.1e}",
            str(len(each["left"])),
            told(each),
        ]
        for name, each in found.items()
    ]
    print_table("faults: right means every prompt trained once, versions up, tokens of whole weights, nothing left", TITLES, rows)
