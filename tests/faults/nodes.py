"""A run of rollouts on two nodes of which one is lost in its midst, or whose link becomes slow: watched to its end and judged.

Nodes are namespaces (tests/support/nodes.py). Leaves out faults of single processes (watch.py). Run by
tests/runs/test_lost_nodes.py, and for a table of many moments by lost_table.py.
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
KINDS = ("replica-node", "trainer-node", "head-node", "cut-5s", "cut", "slow-link")
STALENESS = (0, 4)
FIRST_STEP, LAST_STEP = 4, 14  # after which a node is lost
STEPS_AFTER = {"slow-link": 3}  # 40 s each; of the other kinds:
USUAL_STEPS_AFTER = 6
SLOW_RATE = "4mbit"  # 1 % of 400 Mbit/s
CUT_SECONDS = 5.0
LIMIT_SECONDS = 600.0


@dataclass(frozen=True)
class LostCase:
    """A node is lost `offset` seconds after `step` steps: the first, with the head, on `head-node`, else the second, which on
    `replica-node` has no trainer rank.
    """

    kind: str
    staleness: int
    point: int
    step: int
    offset: float

    @property
    def name(self) -> str:
        return f"{self.kind}-staleness{self.staleness}-{self.point}"

    @property
    def num_steps(self) -> int:
        return self.step + 1 + STEPS_AFTER.get(self.kind, USUAL_STEPS_AFTER)


def lost_cases(num_points: int, seed: int = 0) -> list[LostCase]:
    """`num_points` random moments of each kind and staleness, the first moment of all before the second."""
    found = []
    for point in range(num_points):
        for kind in KINDS:
            for staleness in STALENESS:
                draw = random.Random(f"{seed} {kind} {staleness} {point}")
                step, offset = draw.randrange(FIRST_STEP, LAST_STEP), round(draw.random(), 2)
                found.append(LostCase(kind, staleness, point, step, offset))
    return found


@dataclass
class Seen:
    """Exit codes of the launchers that ended last, and before of those that were lost or had to end; `lost_seconds`: from the
    fault to the next step.
    """

    codes: list[int] = field(default_factory=list)
    first_codes: list[int] = field(default_factory=list)
    lost_seconds: float = 0.0
    said: str = ""
    problems: list[str] = field(default_factory=list)


def overrides(case: LostCase) -> list[str]:
    rollout = [f"max_staleness={case.staleness}", "record=all", "replicas=2", "min_replicas=1", "answer_timeout_seconds=20"]
    own = [f"rollout.{each}" for each in rollout]
    return [
        *own,
        f"run.name={case.name}",
        f"run.steps={case.num_steps}",
        "checkpoint.every_steps=2",
        "run.hung_rank_timeout_seconds=20",
    ]


class LostRun:
    """A case's run on two nodes. A node that was lost comes back at once, one that was cut off once its launcher has ended."""

    def __init__(self, case: LostCase, pair: Sequence[Node], config: Path) -> None:
        self.case, self.pair, self.config = case, pair, config
        self.folder, self.seen = config.parent / "runs" / case.name, Seen()
        self.running: list[subprocess.Popen[str]] = []
        self.texts: list[str] = []

    def run(self) -> Seen:
        seen = self.seen
        try:
            self.running = [self._start(number) for number in (0, 1)]
            self._wait_for_steps(self.case.step)
            time.sleep(self.case.offset)
            before, begin = num_lines(self.folder), time.monotonic()
            self._break()
            self._wait_for_steps(before + 1)
            seen.lost_seconds = time.monotonic() - begin
            left = self.running[:1] if self.case.kind == "replica-node" else self.running
            seen.codes = [self._end(process) for process in left]
        finally:
            for process in self.running:
                process.kill()
            _slow(self.pair[1], ends=True)
            self.pair[1].mend()
        seen.said = "\n".join(self.texts)
        (self.config.parent / f"{self.case.name}.txt").write_text(seen.said)
        seen.problems = [] if set(seen.codes) == {0} else [f"exit codes {seen.codes}"]
        seen.problems += problems(self.folder, self.case)
        seen.problems += [f"left behind: {each}" for node in self.pair for each in _left(node)]
        return seen

    def _break(self) -> None:
        kind, (first, second) = self.case.kind, self.pair
        if kind == "slow-link":
            _slow(second)
        elif kind == "cut-5s":
            second.cut()
            time.sleep(CUT_SECONDS)
            second.mend()
        elif kind == "cut":
            second.cut()
            self.seen.first_codes = [self._end(self.running[1])]
            second.mend()
            self.running[1] = self._start(1)
        elif kind == "head-node":
            first.kill()
            self._end(self.running[0])
            self.seen.first_codes = [self._end(self.running[1])]
            first.revive()
            self.running = [self._start(number) for number in (0, 1)]
        else:
            second.kill()
            self._end(self.running[1])
            second.revive()
            if kind == "trainer-node":
                self.running[1] = self._start(1)

    def _start(self, number: int) -> subprocess.Popen[str]:
        ranks = ["--nproc", "0"] if self.case.kind == "replica-node" and number == 1 else []
        arguments = ["--nodes", "2", "--head", self.pair[0].address, "--max-restarts", "3", *ranks]
        command = [str(COMMAND), str(self.config), *overrides(self.case), *arguments]
        own = os.environ | {"MEGASYNC_PYTHON": sys.executable}
        return self.pair[number].start(command, own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def _end(self, process: subprocess.Popen[str]) -> int:
        """Wait for it; its exit code."""
        self.texts.append(process.communicate(timeout=LIMIT_SECONDS)[0])
        return process.returncode

    def _wait_for_steps(self, steps: int) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while num_lines(self.folder) < min(steps, self.case.num_steps):
            for process in self.running[:1]:
                assert process.poll() is None, "\n".join([*self.texts, process.communicate()[0]])
            assert time.monotonic() < deadline, f"no step {steps} after {LIMIT_SECONDS:g} s"
            time.sleep(0.05)


def problems(folder: Path, case: LostCase, batch_size: int = 8) -> list[str]:
    """Of a run that has ended: prompts that were lost or trained twice, tokens that are too old, steps that are missing."""
    found = []
    paths, num_steps = paths_of(folder), case.num_steps
    if list(paths) != list(range(1, num_steps + 1)) or num_lines(folder) != num_steps:
        found.append(f"steps with a record: {list(paths)}, in metrics.jsonl: {num_lines(folder)}")
    trained: Counter[int] = Counter()
    for step, path in paths.items():
        record = load_record(path)
        trained.update(group.key for group in record.groups)
        versions: Any = np.concatenate([done.weight_versions for group in record.groups for done in group.members.values()])
        if len(record.groups) != batch_size or not step - 1 - case.staleness <= versions.min() <= versions.max() <= step - 1:
            found.append(f"step {step}: {len(record.groups)} prompts of versions {versions.min()} to {versions.max()}")
    found += [f"prompt {key} was trained {count} times" for key, count in trained.items() if count > 1]
    checkpoint = newest_checkpoint(folder)
    progress = load_progress(checkpoint) if checkpoint is not None else None
    there = {*trained, *(group.key for group in progress.groups)} if progress is not None else set(trained)
    begun = progress.num_begun if progress is not None else num_steps * batch_size
    return found + [f"prompt {key} was lost" for key in range(begun) if key not in there]


def num_lines(folder: Path) -> int:
    path = folder / METRICS_FILE
    return path.read_bytes().count(b"\n") if path.is_file() else 0


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
