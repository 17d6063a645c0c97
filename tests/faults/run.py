"""One case: a run of its own, watched to its end and judged. Leaves out how (watch.py, judge.py)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from megasync.tools.assets.command import write_assets
from megasync.config.load import load_config, save_config
from megasync.config.schema import Config
from megasync.config.files import CHECKPOINTS
from tests.faults.cases import Case
from tests.faults.judge import Expected, Verdict, judge
from tests.faults.watch import Settings, Watched, run_case

CONFIG = Path(__file__).with_name("config.yaml")


def prepare(folder: Path, overrides: Sequence[str] = ()) -> Config:
    """The config, with model and data written into `folder`."""
    assets = write_assets(folder / "assets", 0)
    own = [f"run.dir={folder / 'runs'}", f"model.path={assets.model}", f"data.train={assets.train}"]
    return load_config(CONFIG, [*own, *overrides])


def prepare_episodes(folder: Path, overrides: Sequence[str] = ()) -> Config:
    """The same with samples that are episodes, and limits for a busy machine."""
    episodes = ["episode=tests.faults.episodes:episode", "episode_max_turns=2", "episode_timeout_seconds=8", "max_new_tokens=16"]
    limits = ["answer_timeout_seconds=15", "start_timeout_seconds=600"]
    own = [f"rollout.{key}" for key in (*episodes, *limits)]
    return prepare(folder, [*own, "run.steps=12", "sync.timeout_seconds=60", "run.hung_rank_timeout_seconds=60", *overrides])


def run_one(
    case: Case, config: Config, folder: Path, usual: Watched | None, *, num_ranks: int = 2, limit_seconds: float = 180.0
) -> tuple[Watched, Verdict]:
    """Its checkpoints are removed afterwards. `usual`: the undisturbed run, by whose times ranks are signalled."""
    config = config.model_copy(update={"run": config.run.model_copy(update={"name": case.name})})
    path = folder / case.name / "config.yaml"
    save_config(config, path)
    seen = run_case(case, path.parent, Settings(path, config.run.folder, num_ranks, limit_seconds), usual)
    expected = Expected(config.run.steps, config.data.batch_size, config.rollout.max_staleness, config.rollout.replicas)
    verdict = judge(case, path.parent, config.run.folder, Path(config.model.path), expected)
    shutil.rmtree(config.run.folder / CHECKPOINTS, ignore_errors=True)
    return seen, verdict


def problems(case: Case, seen: Watched, verdict: Verdict) -> list[str]:
    """What is not right; a run whose rank was signalled may need several starts, any other has one."""
    wrong = ["a start had to be ended"] if None in seen.exit_codes else []
    if seen.exit_codes[-1] != 0 or (case.kind != "rank" and seen.exit_codes != [0]):
        wrong.append(f"exit codes {seen.exit_codes}")
    return wrong + verdict.problems + [f"left behind: {each}" for each in seen.left]
