"""Progress of a run on the terminal: a bar with the latest figures, or one plain line per step.

    progress = make_progress("auto", num_steps=100, first_step=0)
    progress.update(1, {"reward/mean": 0.4, "step/seconds": 2.5})
    progress.close()

Leaves out the run's files (log.py).
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

BAR_WIDTH, GAP = 20, "  "
TIMED_STEPS = 20  # last steps, whose mean duration gives the time left
SHOWN = {  # metric -> (label, format)
    "reward/mean": ("reward", "{:.3f}"),
    "eval/reward": ("held-out reward", "{:.3f}"),
    "eval/accuracy": ("held-out accuracy", "{:.3f}"),
    "loss/policy": ("loss", "{:+.4f}"),
    "loss/sft": ("loss", "{:.4f}"),
    "grad_norm": ("grad norm", "{:.3f}"),
    "logprob_gap/max": ("largest gap", "{:.1e}"),
    "staleness/max": ("stale", "{:.0f}"),
    "sync/seconds": ("sync", "{:.3f} s"),
    "rollout/tokens_per_second": ("rollout", "{:,.0f} tok/s"),
    "train/tokens_per_second": ("train", "{:,.0f} tok/s"),
    "step/seconds": ("step", "{:.2f} s"),
}


class Progress:
    """Shows nothing; base class of the other kinds."""

    def update(self, step: int, values: Mapping[str, object]) -> None:
        """Shows the figures after `step` steps."""

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


def make_progress(kind: str, num_steps: int, first_step: int) -> Progress:
    """`kind` is the value of run.progress; auto is rich on a terminal that can move its cursor, else plain."""
    if kind == "auto":
        kind = "rich" if sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown") else "plain"
    if kind == "rich":
        return _RichProgress(num_steps, first_step)
    return _PlainProgress(num_steps) if kind == "plain" else Progress()


def figures(values: Mapping[str, object]) -> str:
    """The metrics of SHOWN and of evaluation sets, on one line."""
    return "  ".join(_figures(values))


def _figures(values: Mapping[str, object]) -> list[str]:
    """The metrics of SHOWN and of evaluation sets that `values` has, the important ones first."""
    shown = []
    for key, (label, form) in SHOWN.items():
        value = values.get(key)
        if isinstance(value, int | float):
            shown.append(f"{label} {form.format(value)}")
    scores = ((key, value) for key, value in values.items() if key.startswith("eval/") and "@" in key)
    of_sets = ((key.removeprefix("eval/").replace("/", " "), value) for key, value in scores)
    return shown + [f"{name} {value:.3f}" for name, value in of_sets if isinstance(value, int | float)]


class _PlainProgress(Progress):
    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def update(self, step: int, values: Mapping[str, object]) -> None:
        print(f"step {step}/{self._num_steps}  {figures(values)}".rstrip(), flush=True)

    def note(self, text: str) -> None:
        print(text, flush=True)


class _RichProgress(Progress):
    """One line of the terminal's width: step, bar, time left, and as many figures as fit."""

    def __init__(self, num_steps: int, first_step: int) -> None:
        from rich import get_console
        from rich.live import Live

        self._num_steps, self._step = num_steps, first_step
        self._figures: list[str] = []
        self._seconds = deque[float](maxlen=TIMED_STEPS)  # of the last steps
        self._updated_seconds = time.monotonic()
        self._console = get_console()
        self._live = Live(console=self._console, get_renderable=self._line)
        self._live.start()

    def _line(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        step, left = f"step {self._step}/{self._num_steps}", f"{self._time_left()} left"
        shown = fitting([step, " " * BAR_WIDTH, left, *self._figures], self._console.width)
        bar = ProgressBar(self._num_steps, self._step, width=BAR_WIDTH)
        line = Table.grid(padding=(0, len(GAP), 0, 0), pad_edge=False)
        line.add_row(*(part if part.strip() else bar for part in shown))
        return line

    def _time_left(self) -> str:
        """The remaining steps by the mean of the last ones, less the time since the last update."""
        if not self._seconds:
            return "-:--:--"
        seconds = statistics.fmean(self._seconds) * (self._num_steps - self._step) - (time.monotonic() - self._updated_seconds)
        return str(timedelta(seconds=max(0, round(seconds))))

    def update(self, step: int, values: Mapping[str, object]) -> None:
        self._step, self._figures, self._updated_seconds = step, _figures(values), time.monotonic()
        if isinstance(seconds := values.get("step/seconds"), int | float):
            self._seconds.append(seconds)

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()
        if not self._console.is_terminal:  # where rich leaves the line open
            self._console.line()


def fitting(parts: Sequence[str], width: int) -> list[str]:
    """The first parts that fit, with GAP between, on a line of `width` columns. Pure."""
    from rich.cells import cell_len  # two columns for each of 数学

    ends = itertools.accumulate(cell_len(part) + len(GAP) for part in parts)
    return [part for part, end in zip(parts, ends, strict=True) if end - len(GAP) <= width]
