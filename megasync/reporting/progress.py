"""Live progress of a run: a bar with the latest figures on a terminal, else one plain line a step.

Leaves out files (log.py).

    progress = make_progress("auto", num_steps=120, first_step=0)
    progress.update(1, {"reward/mean": 0.4})
    progress.close()
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

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
    """Shows nothing; what the other kinds are made from."""

    def update(self, step: int, values: Mapping[str, object]) -> None:
        """So many steps are done."""

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


def make_progress(kind: str, num_steps: int, first_step: int) -> Progress:
    """`kind` is run.progress; auto is rich on a terminal, else plain."""
    if kind == "auto":
        kind = "rich" if sys.stdout.isatty() else "plain"
    if kind == "rich":
        return _RichProgress(num_steps, first_step)
    return _PlainProgress(num_steps) if kind == "plain" else Progress()


def figures(values: Mapping[str, object]) -> str:
    """The metrics worth a look, those that there are, on one line."""
    shown = []
    for key, (label, form) in SHOWN.items():
        value = values.get(key)
        if isinstance(value, int | float):
            shown.append(f"{label} {form.format(value)}")
    of_sets = ((key.removeprefix("eval/").replace("/", " "), value) for key, value in values.items() if "@" in key)
    shown += [f"{name} {value:.3f}" for name, value in of_sets if isinstance(value, int | float)]
    return "  ".join(shown)


class _PlainProgress(Progress):
    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def update(self, step: int, values: Mapping[str, object]) -> None:
        print(f"step {step}/{self._num_steps}  {figures(values)}".rstrip(), flush=True)

    def note(self, text: str) -> None:
        print(text, flush=True)


class _RichProgress(Progress):
    def __init__(self, num_steps: int, first_step: int) -> None:
        from rich import progress

        self._progress = progress.Progress(
            progress.TextColumn("step"),
            progress.MofNCompleteColumn(),
            progress.BarColumn(bar_width=20),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[figures]}"),
        )
        self._task = self._progress.add_task("train", total=num_steps, completed=first_step, figures="")
        self._progress.start()

    def update(self, step: int, values: Mapping[str, object]) -> None:
        self._progress.update(self._task, completed=step, figures=figures(values))

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()
