"""Whole tiny runs of random features beside each other, killed with kill -9 and resumed, for as long as one likes.

    python -m tests.fuzz_features --minutes 30 --seed 0          # each run prints its seed and its features
    python -m tests.fuzz_features --features jsd,lora,episodes   # these alone, without a kill

A run either is refused before anything starts, by the name of a key, or ends with finite metrics, each prompt trained once.
Leaves out what the features compute.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

import psutil
import yaml

from megasync.rollouts.records import load_record, paths_of
from tests.fuzz_runs import LIMIT_SECONDS, disturb, inode_of
from tests.runs.train_cases import TORCHRUN, Run, leaves_nothing, metrics, processes_with, write_config
from tests.support.features import Keys, features, prepared
from tests.support.judge_server import judge_server

NUM_STEPS, BATCH = 6, 8
REFUSED = 2
KEY = re.compile(r"^(config\S* )?[\w.]+\.[\w.:]+( = .*)?:", re.MULTILINE)
KILLS = ("nothing", "rank", "rank", "replica", "launcher")


def drawn(source: random.Random, groups: list[dict[str, Keys]]) -> list[str]:
    """Names, of a few of the groups."""
    return [source.choice(sorted(group)) for group in source.sample(groups, source.randint(2, 6))]


def write_run(folder: Path, keys: Keys) -> Path:
    sections: dict[str, Keys] = {"run": {"steps": NUM_STEPS, "log_samples": 1000}, "rollout": {"record": "all"}}
    path = write_config(folder, checkpoint={"every_steps": 2}, **sections)
    values = yaml.safe_load(path.read_text())
    for key, value in keys.items():
        section, name, *below = key.split(".")
        place = values.setdefault(section, {})
        for part in below:
            place, name = place.setdefault(name, {}), part
        place[name] = value
    path.write_text(yaml.safe_dump(values))
    return path


def process(config: Path, source: random.Random | None, ranks: int) -> tuple[int, str, str]:
    """Exit code, output and what was done to it; `source`: of a kill."""
    said, former = config.parent / "said", inode_of(config.parent / "runs" / "run")
    with leaves_nothing(config) as own, said.open("wb") as output:
        launched = subprocess.Popen([*TORCHRUN, str(config), "--nproc", str(ranks)], env=own, stdout=output, stderr=output)
        run = Run(launched, config.parent / "runs" / "run", own["MEGASYNC_TEST_MARKER"], said)
        kind = disturb(source, run, former, KILLS) if source is not None else "nothing"
        try:
            code = launched.wait(LIMIT_SECONDS)
        finally:
            for each in processes_with(run.marker) if launched.poll() is None else ():
                with suppress(psutil.Error):
                    each.kill()
    return code, said.read_text(), kind


def check(run: Path, keys: Keys) -> None:
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1)), lines
    bad = {name: value for line in lines for name, value in line.items() if not math.isfinite(value)}
    assert not bad, bad
    records = [load_record(path) for path in paths_of(run).values()]
    trained = [group.key for record in records for group in record.groups]
    assert [record.step for record in records] == list(range(1, NUM_STEPS + 1)) and len(trained) == len(set(trained)), trained
    assert len(trained) == BATCH * NUM_STEPS or "rollout.filter" in keys or "algorithm.filter_groups" in keys, len(trained)
    shown = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    places = [(line.get("source", ""), line["line"]) for line in shown if line["set"] == "train"]
    assert len(places) == len(set(places)), "an example was trained twice in its first pass"


def one_run(names: list[str], folder: Path, source: random.Random | None, url: str) -> str:
    groups = features(folder, url)
    keys: Keys = {}
    for name in names:
        keys |= next(group[name] for group in groups if name in group)
    config, reported = write_run(folder, keys), list[str]()
    for attempt in range(4):
        code, said, kind = process(config, source if attempt < 3 else None, 1 + (source is not None and source.random() < 0.3))
        reported.append(f"{kind}: {code}")
        if code == 0:
            check(folder / "runs" / "run", keys)
            return f"runs ({', '.join(reported)})"
        if code == REFUSED and not attempt:
            assert KEY.search(said) and not (folder / "runs" / "run" / "metrics.jsonl").exists(), said[-3000:]
            return f"refused: {next(line for line in said.splitlines() if KEY.search(line))[:200]}"
        assert not kind.startswith(("nothing", "replica")), f"{reported}: {said[-6000:]}"
    raise AssertionError(reported)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz_features", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--runs", type=int, default=sys.maxsize)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--features", default="", help="names with commas between them")
    given = parser.parse_args()
    os.environ.setdefault("PYTEST_XDIST_WORKER", "gw0")  # others run beside it (train_cases.py)
    end, failed = time.monotonic() + 60 * given.minutes, list[int]()
    for seed in range(given.seed, given.seed + (1 if given.features else given.runs)):
        if time.monotonic() > end:
            break
        source, folder = random.Random(seed), Path(tempfile.mkdtemp(prefix="features-"))
        prepared(folder)
        with judge_server(folder / "asked.jsonl", unparsed=0.05) as (url, _):
            names = given.features.split(",") if given.features else drawn(source, features(folder, url))
            print(f"seed {seed}: {', '.join(names)}", flush=True)
            begin = time.monotonic()
            try:
                found = one_run(names, folder, None if given.features else source, url)
            except (AssertionError, subprocess.TimeoutExpired):
                failed.append(seed)
                print(f"    WRONG after {time.monotonic() - begin:.0f} s, in {folder}: {traceback.format_exc()}", flush=True)
                continue
            print(f"    {found}, after {time.monotonic() - begin:.0f} s", flush=True)
        shutil.rmtree(folder)
    print(f"failed: {failed or 'none'}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
