"""The cases of the table: who is hit, in which phase or at which random point, and by which signal. Pure functions.

Leaves out how that is done (program.py for replicas, watch.py for ranks).
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from megasync.config.errors import ConfigError, nearest_name

PHASES = ("generating", "pausing", "receiving", "committing", "starting")
SIGNALS = ("SIGKILL", "SIGSTOP")
PARTS = ("core", "actor")  # the processes of a replica: vLLM's engine core, and the Ray actor around it
VERSION, BUCKET, REPLICA = 2, 7, 1
UNDISTURBED = "undisturbed"


@dataclass(frozen=True)
class Case:
    """One run. A rank is hit `offset` of a step's time after `step` steps; -1: of the time that the first step's end takes."""

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


def chosen_cases(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """The undisturbed run and those of these names; `all`: every one. A part of a name stands for all that have it.

    Raises:
        ConfigError: a name stands for none.
    """
    chosen = {UNDISTURBED}
    for name in names:
        found = {case.name for case in cases if name in ("all", case.name) or name in case.name}
        if not found:
            near = nearest_name(name, [case.name for case in cases])
            remedy = "write bench_faults.cases=[all], or a part of a name"
            choices = ", ".join(("all", *PHASES, "rank0", *SIGNALS))
            raise ConfigError(f"bench_faults.cases: {name} is no case", choices=choices, nearest=near, remedy=remedy)
        chosen |= found
    return [case for case in cases if case.name in chosen]
