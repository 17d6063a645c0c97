"""The cases of the table: which process gets which signal, in which phase or at which random point. Pure functions.

Leaves out how that is done (program.py for replicas, watch.py for ranks).
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

PHASES = ("generating", "pausing", "receiving", "committing", "starting")
SIGNALS = ("SIGKILL", "SIGSTOP")
PARTS = ("core", "actor")  # the processes of a replica: vLLM's engine core, and the Ray actor around it
VERSION, BUCKET, REPLICA = 2, 7, 1
UNDISTURBED, OF_EPISODES = "undisturbed", "episodes-undisturbed"
NUM_FAILURES = {"hangs": 1, "blocks": 1, "raises": 1, "is-killed": 1, "floods": 0, "forks": 0}  # counted, of each deed


@dataclass(frozen=True)
class Case:
    """One run. A rank is signalled `offset` of a step's time after `step` steps; step -1: of the time to the first step."""

    name: str
    kind: str  # replica | rank | none
    number: int = 0
    signal: str = ""
    phase: str = ""
    part: str = ""
    version: int = VERSION  # that is generated with, or that the sync brings
    bucket: int = BUCKET
    step: int = 0
    offset: float = 0.0
    episode: str = ""  # what one of them does (episodes.py), where samples are episodes

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Case:
        fields: dict[str, Any] = json.loads(text)
        return Case(**fields)


def all_cases(num_points: int, num_steps: int, num_ranks: int, seed: int) -> list[Case]:
    """The undisturbed run, each phase of a replica, and `num_points` random ones of rank 0 and of others in turns."""
    found = [Case(UNDISTURBED, "none")]
    for phase, signal, part in product(PHASES, SIGNALS, PARTS):
        found.append(Case(f"replica-{phase}-{part}-{signal}", "replica", REPLICA, signal, phase, part))
    draw = random.Random(seed)
    for point in range(num_points):
        rank = draw.randrange(1, num_ranks) if point % 2 and num_ranks > 1 else 0
        signal, step, offset = SIGNALS[point // 2 % 2], draw.randrange(-1, num_steps), draw.random()
        found.append(Case(f"rank{rank}-{point:02d}-{signal}", "rank", rank, signal, step=step, offset=offset))
    return found


def episode_cases(num_steps: int, num_ranks: int, seed: int) -> list[Case]:
    """Samples are episodes: undisturbed, what a tool may do, a replica in the midst of a turn, and ranks that are killed."""
    found = [Case(OF_EPISODES, "none"), *(Case(f"episode-{deed}", "none", episode=deed) for deed in NUM_FAILURES)]
    for signal, part in product(SIGNALS, PARTS):
        found.append(Case(f"episodes-turn-{part}-{signal}", "replica", REPLICA, signal, "generating", part))
    draw = random.Random(seed)
    for rank in range(num_ranks):
        step, offset = draw.randrange(1, num_steps - 1), draw.random()
        found.append(Case(f"episodes-rank{rank}-SIGKILL", "rank", rank, "SIGKILL", step=step, offset=offset))
    return found


def chosen_cases(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """Those with one of these names; a part of a name stands for all that have it, `all` for every case.

    Raises:
        ValueError: a name stands for none.
    """
    for name in names:
        if name != "all" and not any(name in case.name for case in cases):
            raise ValueError(f"{name} is no case; choose from all, {', '.join(case.name for case in cases)}, or a part of a name")
    return [case for case in cases if any(name in ("all", case.name) or name in case.name for name in names)]
