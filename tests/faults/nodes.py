"""A run of rollouts on two nodes of which one is lost in its midst, or whose link becomes slow: watched to its end and judged.

Nodes are namespaces (tests/support/nodes.py). Leaves out faults of single processes (watch.py). Run by
tests/runs/test_lost_nodes.py, and for a table of many moments by lost_table.py.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
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
STEPS_AFTER = 6  # the last loss
SLOW_STEPS = 2  # 40 s each
SLOW_RATE = "4mbit"  # 1 % of 400 Mbit/s
CUT_SECONDS = 5.0
LEFT_SECONDS = 30.0  # for what outlives a launcher, such as who removes its folder
LIMIT_SECONDS = 300.0  # for a loss to be over, or the run


@dataclass(frozen=True)
class LostCase:
    """A node is lost `offset` seconds after `step` steps, in a run of several losses after so many more than at the loss before:
    the first node, with the head, on `head-node`, else the second, which on `replica-node` has no trainer rank.
    """

    kind: str
    staleness: int
    point: int
    step: int
    offset: float

    @property
    def name(self) -> str:
        return f"{self.kind}-staleness{self.staleness}-{self.point}"


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
    """Exit codes of the launchers that had to end because of the loss; `lost_seconds`: from the fault to the next step."""

    first_codes: list[int] = field(default_factory=list)
    lost_seconds: float = 0.0


class LostRun:
    """A run on two nodes with one loss after another, all of one kind. A node that was lost comes back at once, one that was cut
    off once its launcher has ended, and a slow link is mended after SLOW_STEPS.
    """

    def __init__(self, cases: Sequence[LostCase], pair: Sequence[Node], config: Path) -> None:
        """A node that has replicas alone does not come back, so that there is one such loss a run."""
        self.kind, self.staleness = cases[0].kind, cases[0].staleness
        assert {(case.kind, case.staleness) for case in cases} == {(self.kind, self.staleness)}
        assert self.kind != "replica-node" or len(cases) == 1
        self.cases, self.pair, self.config = list(cases), pair, config
        self.moments = list(accumulate(case.step for case in cases))
        self.num_steps = self.moments[-1] + 1 + STEPS_AFTER
        self.folder = config.parent / "runs" / cases[0].name
        self.seen = [Seen() for _ in cases]
        self.codes: list[int] = []  # of the launchers that ended last
        self.problems: list[str] = []
        self.running: list[subprocess.Popen[str]] = []
        self._should_end: set[tuple[int, str]] = set()  # number of the node and process
        self._said: list[str] = []
        self._begun = time.monotonic()

    @property
    def said(self) -> str:
        """What all launchers have said so far and what was done to them, each line with the second of the run."""
        return "\n".join(self._said)

    def _say(self, who: str, text: str) -> None:
        self._said.append(f"{time.monotonic() - self._begun:7.1f} {who}: {text}")

    def run(self) -> None:
        """To its end; `problems` has what was wrong, an exception too."""
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 # a line of the table, as any other end
            self.problems.append(f"{type(error).__name__}: {str(error)[-3000:]}")
        finally:
            for process in self.running:
                process.kill()
            _slow(self.pair[1], ends=True)
            self.pair[1].mend()

    def _run(self) -> None:
        self.running = [self._start(number) for number in (0, 1)]
        for case, moment, seen in zip(self.cases, self.moments, self.seen, strict=True):
            self._wait_for_steps(moment)
            time.sleep(case.offset)
            before, begin = num_lines(self.folder), time.monotonic()
            self._say("fault", f"{self.kind} after {before} steps")
            self._break(seen)
            self._wait_for_steps(before + 1)
            seen.lost_seconds = time.monotonic() - begin
            self._say("fault", f"{seen.lost_seconds:.1f} s to the next step")
            self._expect_ended()
            if self.kind == "slow-link":
                self._wait_for_steps(before + SLOW_STEPS)
                _slow(self.pair[1], ends=True)
        self.codes = [self._end(process) for process in (self.running[:1] if self.kind == "replica-node" else self.running)]
        if set(self.codes) != {0}:
            self.problems.append(f"exit codes {self.codes}")
        self.problems += problems(self.folder, self.num_steps, self.staleness)
        self._should_end = self._all_processes()
        self._expect_ended()
        files = [(number + 1, path.name) for number, node in enumerate(self.pair) for path in node.temporary.iterdir()]
        self.problems += [f"left behind on node {number}: TMPDIR/{name}" for number, name in sorted(files)]

    def _break(self, seen: Seen) -> None:
        kind, (first, second) = self.kind, self.pair
        if kind == "slow-link":
            _slow(second)
        elif kind == "cut-5s":
            second.cut()
            time.sleep(CUT_SECONDS)
            second.mend()
        elif kind == "cut":
            second.cut()
            self._end_by_itself(1, seen)
            second.mend()
            self.running[1] = self._start(1)
        elif kind == "head-node":
            first.kill()
            self._end(self.running[0])
            self._end_by_itself(1, seen)
            first.revive()
            self.running = [self._start(number) for number in (0, 1)]
        else:
            second.kill()
            self._end(self.running[1])
            second.revive()
            if kind == "trainer-node":
                self.running[1] = self._start(1)

    def _end_by_itself(self, number: int, seen: Seen) -> None:
        """A launcher that has lost the head: exit code 1, and nothing left on its node."""
        seen.first_codes = [self._end(self.running[number])]
        if seen.first_codes != [1]:
            self.problems.append(f"exit code {seen.first_codes[0]} of the launcher that lost the head")
        self._should_end = {(number, process) for process in self.pair[number].processes()}

    def _expect_ended(self) -> None:
        """What was there when a launcher had ended, by now or within seconds."""
        deadline = time.monotonic() + LEFT_SECONDS
        while (left := self._should_end & self._all_processes()) and time.monotonic() < deadline:
            time.sleep(0.5)
        self.problems += [f"left behind on node {number + 1}: {each}" for number, each in sorted(left)]
        self._should_end = set()

    def _all_processes(self) -> set[tuple[int, str]]:
        return {(number, process) for number, node in enumerate(self.pair) for process in node.processes()}

    def _start(self, number: int) -> subprocess.Popen[str]:
        ranks = ["--nproc", "0"] if self.kind == "replica-node" and number == 1 else []
        restarts = ["--max-restarts", str(len(self.cases) + 2)]
        arguments = ["--nodes", "2", "--head", self.pair[0].address, *restarts, *ranks]
        command = [str(COMMAND), str(self.config), *self._overrides(), *arguments]
        own = os.environ | {"MEGASYNC_PYTHON": sys.executable}
        self._say(f"node{number + 1}", "started")
        process = self.pair[number].start(command, own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace")
        threading.Thread(target=self._read, args=(number, process), daemon=True).start()
        return process

    def _read(self, number: int, process: subprocess.Popen[str]) -> None:
        with suppress(ValueError):  # closed with the run
            for line in process.stdout or ():
                self._say(f"node{number + 1}", line.rstrip())

    def _overrides(self) -> list[str]:
        rollout = [f"max_staleness={self.staleness}", "record=all", "replicas=2", "min_replicas=1", "answer_timeout_seconds=20"]
        own = [f"rollout.{each}" for each in rollout]
        run = [f"run.name={self.folder.name}", f"run.steps={self.num_steps}", "run.hung_rank_timeout_seconds=10"]
        return [*own, *run, "checkpoint.every_steps=2"]

    def _end(self, process: subprocess.Popen[str]) -> int:
        """Wait for it; its exit code."""
        code = process.wait(timeout=LIMIT_SECONDS)
        self._say(f"node{self.running.index(process) + 1}", f"ended with exit code {code}")
        return code

    def _wait_for_steps(self, steps: int) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while num_lines(self.folder) < min(steps, self.num_steps):
            code = self.running[0].poll()
            assert code is None, f"the head's launcher ended with exit code {code} before step {steps}"
            assert time.monotonic() < deadline, f"no step {steps} after {LIMIT_SECONDS:g} s"
            time.sleep(0.05)


def problems(folder: Path, num_steps: int, max_staleness: int, batch_size: int = 8) -> list[str]:
    """Of a run that has ended: prompts that were lost or trained twice, tokens that are too old, steps that are missing."""
    found = []
    paths = paths_of(folder)
    if list(paths) != list(range(1, num_steps + 1)) or num_lines(folder) != num_steps:
        found.append(f"steps with a record: {list(paths)}, in metrics.jsonl: {num_lines(folder)}")
    trained: Counter[int] = Counter()
    for step, path in paths.items():
        record = load_record(path)
        trained.update(group.key for group in record.groups)
        versions: Any = np.concatenate([done.weight_versions for group in record.groups for done in group.members.values()])
        if len(record.groups) != batch_size or not step - 1 - max_staleness <= versions.min() <= versions.max() <= step - 1:
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
