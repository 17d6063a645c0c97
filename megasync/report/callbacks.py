"""`run.callbacks`: functions of the user's own that rank 0 calls after each step. No torch in here.

for callback in resolve_callbacks(("my_module:watch",)):
    callback(StepResult(step=1, metrics={"reward/mean": 0.4}, folder=Path("runs/run"), config=config))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megasync.config.named import own_object
from megasync.config.schema import Config

WANTED = "a function of one StepResult (megasync/report/callbacks.py), which returns nothing"


@dataclass(frozen=True)
class StepResult:
    """A step that is done and logged. The weights of `step` are published; a checkpoint of it may still be written."""

    step: int  # finished steps, from 1
    metrics: Mapping[str, float]  # its line in metrics.jsonl
    folder: Path  # the run's
    config: Config


Callback = Callable[[StepResult], object]


def resolve_callbacks(names: Sequence[str]) -> list[Callback]:
    """ConfigError where one cannot be imported, or does not take one argument."""
    return [own_object("run.callbacks", name, WANTED, ["a StepResult"]) for name in names]


def call_back(callbacks: Mapping[str, Callback], result: StepResult) -> None:
    """Call them in order.

    Raises:
        RuntimeError: one raised; it names the callback.
    """
    for name, callback in callbacks.items():
        try:
            callback(result)
        except Exception as error:
            raise RuntimeError(f"run.callbacks: {name} raised {type(error).__name__}: {error}") from error
