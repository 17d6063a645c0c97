"""Where the time of a run goes: each step's line has its wall time by phase, and the phases add up to it.

A step's time is that since the line before, so that evaluation and checkpoint after step 10 are in the line of step 11; those
after the last step are the end's. Leaves out what happens beside the steps, such as rollouts ahead of them (timeline.json).

    clock = StepClock(psutil.Process().create_time())
    clock.start()                                   # the first step begins
    with clock.phase("train"): ...
    clock.take(generates=True)                      # {"step/seconds": 1.5, "step/train_seconds": 0.6, ...}
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASES = ("rollout", "log_probs", "train", "sync", "evaluation", "checkpoint")
OF_GENERATION = ("rollout", "sync")


class StepClock:
    """Of one rank. A phase within another counts as the outer one."""

    def __init__(self, begin_seconds: float, now: Callable[[], float] = time.time) -> None:
        """`begin_seconds`: when the process was started, by the clock `now`."""
        self.now, self.begin_seconds = now, begin_seconds
        self.start_seconds = self.steps_seconds = 0.0  # before the first step, and of all steps whose lines are written
        self._line_seconds: float | None = None
        self._phases: dict[str, float] = {}
        self._is_inside = False

    def start(self) -> None:
        """The first step begins."""
        self._line_seconds, self._phases = self.now(), {}
        self.start_seconds = self._line_seconds - self.begin_seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._is_inside:
            yield
            return
        begin, self._is_inside = self.now(), True
        try:
            yield
        finally:
            name, self._is_inside = name.replace("-", "_"), False
            self._phases[name] = self._phases.get(name, 0.0) + self.now() - begin

    @property
    def elapsed(self) -> float:
        return self.now() - self.begin_seconds

    def take(self, *, generates: bool) -> dict[str, float]:
        """Metrics of the step whose line is written now: `step/seconds`, and its parts, the rest as `step/other_seconds`."""
        assert self._line_seconds is not None
        end = self.now()
        seconds, self._line_seconds = end - self._line_seconds, end
        spent, self._phases = self._phases, {}
        parts = {name: spent.get(name, 0.0) for name in PHASES if generates or name not in OF_GENERATION}
        self.steps_seconds += seconds
        metrics = {"step/seconds": seconds, **{f"step/{name}_seconds": part for name, part in parts.items()}}
        return metrics | {"step/other_seconds": seconds - sum(parts.values())}

    def summary(self) -> dict[str, float]:
        """Of the whole: the start, the steps and the end are the total."""
        total = self.elapsed
        start = self.start_seconds if self._line_seconds is not None else total
        end = total - start - self.steps_seconds
        return {"seconds_start": start, "seconds_steps": self.steps_seconds, "seconds_end": end, "seconds_total": total}
