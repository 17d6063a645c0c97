"""Weights that are newer than a run's newest checkpoint: out of its log of versions, with what was trained by then.

    mark(run_folder, 12, stream.progress())          # on rank 0, after a step that is written down
    newer, note = find_newer(run_folder, model, 10)  # what of it a resumed run can go on from

A version of the log is the weights alone. Which prompts they were trained on is in the marker, a file beside the versions that
each step replaces. Leaves out the log itself (bridge/versions/), and the optimizer, which is the checkpoint's (checkpoints.py).
"""

from __future__ import annotations

import json
import shutil
from dataclasses import astuple, dataclass
from pathlib import Path

from bridge.layout.digest import digest_tensor
from bridge.versions.file import VersionLogError
from bridge.versions.reader import VersionReader
from engine.checkpoint.hf_folder import Share, finish_folder, save_weights
from megasync.config.files import CHECKPOINTS, MARKER, VERSIONS, read_marker, write_atomically
from megasync.rollouts.progress import Progress, SavedGroup, order_of

REBUILT = ".newer"  # among the checkpoints: on the file system that all nodes share


@dataclass(frozen=True)
class NewerWeights:
    """`folder`: the weights of version `step`, a Hugging Face folder."""

    step: int
    progress: Progress
    folder: Path


def mark(run_folder: Path, step: int, progress: Progress) -> None:
    """All that was written of `step`, counted from 1, is there: its version, its metrics. Samples that wait are not kept."""
    told = {
        "step": step,
        "num_trained": progress.num_trained,
        "num_begun": progress.num_begun,
        "expected_tokens": progress.expected_tokens,
        "begun": [group.key for group in progress.groups],
        "order": None if progress.order is None else astuple(progress.order),
    }
    write_atomically(run_folder / MARKER, json.dumps(told))


def marked(run_folder: Path) -> tuple[int, Progress] | None:
    """The step and where the prompts were after it; what had begun and was not trained begins anew. None: there is none."""
    if (told := read_marker(run_folder)) is None:
        return None
    groups = tuple(SavedGroup(key) for key in told["begun"])
    order = order_of(told["order"]) if told.get("order") else None
    return told["step"], Progress(told["num_trained"], told["num_begun"], told["expected_tokens"], groups, order)


def find_newer(run_folder: Path, model: Path, than: int) -> tuple[NewerWeights | None, str]:
    """What is marked after step `than`, rebuilt and verified by its digests, and what to say where that cannot be.

    `model`: the folder that the run starts from. `forget` removes the rebuilt one. On rank 0.
    """
    forget(run_folder)
    there = marked(run_folder)
    if there is None or there[0] <= than:
        return None, f"{run_folder / VERSIONS}: has no weights that are newer than the checkpoint of step {than}"
    step, progress = there
    folder = run_folder / CHECKPOINTS / REBUILT
    try:
        folder.mkdir(parents=True)
        save_weights(folder, VersionReader(run_folder / VERSIONS).tensors(step), Share(0), digest_tensor)
        finish_folder(folder, model)
    except (VersionLogError, OSError) as error:
        forget(run_folder)
        return None, f"the weights of step {step} are not to be had: {error}"
    return NewerWeights(step, progress, folder), ""


def forget(run_folder: Path) -> None:
    """The folder of rebuilt weights: the engine has read them, or who rebuilt them is no more."""
    shutil.rmtree(run_folder / CHECKPOINTS / REBUILT, ignore_errors=True)


def unmark(run_folder: Path) -> None:
    """Where a run goes on from a checkpoint: the steps after it are trained anew, on other samples."""
    (run_folder / MARKER).unlink(missing_ok=True)
