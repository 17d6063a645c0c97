"""A run of rollouts on two nodes of which one is lost in its midst, or whose link becomes slow: watched to its end and judged.

Nodes are namespaces (tests/support/nodes.py). Leaves out faults of single processes (watch.py). Run by
tests/runs/test_lost_nodes.py.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megasync.config.files import METRICS_FILE, newest_checkpoint
from megasync.rollouts.progress import load_progress
from megasync.rollouts.records import load_record, paths_of
from tests.support.nodes import Node

COMMAND = Path(__file__).resolve().parents[2] / "launch" / "torchrun_nodes.sh"
KINDS = ("replica-node", "trainer-node", "slow-link")
STALENESS = (0, 4)
NUM_STEPS = 30
SLOW_RATE = "4mbit"  # 1 % of 400 Mbit/s
LIMIT_SECONDS = 900.0


@dataclass(frozen=True)
class LostCase:
    """The second node is lost `offset` seconds after `step` steps. On `replica-node` it has no trainer rank."""

    kind: str
    staleness: int
    point: int
    step: int
    offset: float

    @property
    def name(self) -> str:
        return f"{self.kind}-staleness{self.staleness}-{self.point}"


def lost_cases(num_points: int, seed: int = 0) -> list[LostCase]:
    """`num_points` random moments of each kind and staleness."""
    draw = random.Random(seed)
    return [
        LostCase(kind, staleness, point, draw.randrange(4, NUM_STEPS - 6), round(draw.random(), 2))
        for kind in KINDS
        for staleness in STALENESS
        for point in range(num_points)
    ]


@dataclass
class Seen:
    """Exit codes of the launchers; what a lost node's first one left with is not among them. `lost_seconds`: from the fault to
    the next step.
    """

    codes: list[int] = field(default_factory=list)
    lost_seconds: float = 0.0
    said: str = ""
    problems: list[str] = field(default_factory=list)


def overrides(case: LostCase) -> list[str]:
    rollout = [f"max_staleness={case.staleness}", "record=all", "replicas=2", "min_replicas=1", "answer_timeout_seconds=20"]
    own = [f"rollout.{each}" for each in rollout]
    return [
        *own,
        f"run.name={case.name}",
        f"run.steps={NUM_STEPS}",
        "checkpoint.every_steps=2",
        "run.hung_rank_timeout_seconds=20",
    ]


def run_lost(case: LostCase, pair: Sequence[Node], config: Path) -> Seen:
    """The run with its fault; a trainer's node comes back at once."""
    folder, seen = config.parent / "runs" / case.name, Seen()
    first, second = pair
    ranks = ["--nproc", "0"] if case.kind == "replica-node" else []
    running = [_start(first, case, config, first.address), _start(second, case, config, first.address, *ranks)]
    output = config.parent / f"{case.name}.txt"
    try:
        _wait_for_steps(folder, case.step, running[0])
        time.sleep(case.offset)
        before, begin = _num_lines(folder), time.monotonic()
        if case.kind == "slow-link":
            _slow(second)
        else:
            second.kill()
            running[1].communicate(timeout=60)
            second.revive()
        if case.kind == "trainer-node":
            running[1] = _start(second, case, config, first.address)
        _wait_for_steps(folder, before + 1, running[0])
        seen.lost_seconds = time.monotonic() - begin
        left = [running[0]] if case.kind == "replica-node" else running
        texts = [process.communicate(timeout=LIMIT_SECONDS)[0] for process in left]
        seen.codes, seen.said = [process.returncode for process in left], "\n".join(texts)
    finally:
        for process in running:
            process.kill()
        _slow(second, ends=True)
    output.write_text(seen.said)
    seen.problems = [] if set(seen.codes) == {0} else [f"exit codes {seen.codes}"]
    seen.problems += problems(folder, case.staleness) + [f"left behind: {each}" for node in pair for each in _left(node)]
    return seen


def problems(folder: Path, staleness: int, batch_size: int = 8) -> list[str]:
    """Of a run that has ended: prompts that were lost or trained twice, tokens that are too old, steps that are missing."""
    found = []
    paths = paths_of(folder)
    if list(paths) != list(range(1, NUM_STEPS + 1)) or _num_lines(folder) != NUM_STEPS:
        found.append(f"steps with a record: {list(paths)}, in metrics.jsonl: {_num_lines(folder)}")
    trained: Counter[int] = Counter()
    for step, path in paths.items():
        record = load_record(path)
        trained.update(group.key for group in record.groups)
        versions: Any = np.concatenate([done.weight_versions for group in record.groups for done in group.members.values()])
        if len(record.groups) != batch_size or not step - 1 - staleness <= versions.min() <= versions.max() <= step - 1:
            found.append(f"step {step}: {len(record.groups)} prompts of versions {versions.min()} to {versions.max()}")
    found += [f"prompt {key} was trained {count} times" for key, count in trained.items() if count > 1]
    checkpoint = newest_checkpoint(folder)
    progress = load_progress(checkpoint) if checkpoint is not None else None
    there = {*trained, *(group.key for group in progress.groups)} if progress is not None else set(trained)
    begun = progress.num_begun if progress is not None else NUM_STEPS * batch_size
    return found + [f"prompt {key} was lost" for key in range(begun) if key not in there]


def _start(node: Node, case: LostCase, config: Path, head: str, *arguments: str) -> subprocess.Popen[str]:
    command = [str(COMMAND), str(config), *overrides(case), "--nodes", "2", "--head", head, "--max-restarts", "3", *arguments]
    own = os.environ | {"MEGASYNC_PYTHON": sys.executable}
    return node.start(command, own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _num_lines(folder: Path) -> int:
    path = folder / METRICS_FILE
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def _wait_for_steps(folder: Path, steps: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while _num_lines(folder) < min(steps, NUM_STEPS):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"no step {steps} after {LIMIT_SECONDS:g} s"
        time.sleep(0.05)


def _slow(node: Node, *, ends: bool = False) -> None:
    """Both ways of its link, from now on."""
    limit = ["tbf", "rate", SLOW_RATE, "burst", "32kb", "latency", "400ms"]
    for side in (["dev", node.link], ["-n", node.name, "dev", "eth0"]):
        place = ["-n", node.name] if side[0] == "-n" else []
        command = ["tc", *place, "qdisc", "del" if ends else "replace", "dev", side[-1], "root", *([] if ends else limit)]
        subprocess.run(command, check=not ends, capture_output=True)


def _left(node: Node) -> list[str]:
    deadline = time.monotonic() + 30
    while node.processes() and time.monotonic() < deadline:
        time.sleep(0.2)
    return node.processes()
