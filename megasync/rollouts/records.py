"""Records of trained groups: a file for each step, from which `megasync replay` samples it again. No torch in here.

runs/NAME/episodes/step_00000001.npz holds compressed NumPy arrays, of numbers and of bytes of JSON. A file is written once its
step is trained, atomically; a step that a resumed run trains again replaces its former record. Leaves out routed experts.

    records = Records(run_folder, first_step=0)
    records.write(1, groups, {"episode": identity})
    records.close()
    record = load_record(paths_of(run_folder)[1])
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bridge.generation import Completion, GenerationRequest
from megasync.config.errors import ConfigError
from megasync.config.files import EPISODES, write_atomically
from megasync.episodes.task import EpisodeResult
from megasync.rollouts.group import Group
from megasync.rollouts.progress import UNREADABLE, SavedGroup, packed, unpacked

NAME = re.compile(r"step_(\d{8})\.npz")
HEAD = "head"


@dataclass(frozen=True)
class RecordedGroup:
    """A prompt with its samples, by member; a member that was dropped has no tokens."""

    key: int  # its ordinal in the run
    request: GenerationRequest
    members: Mapping[int, Completion | EpisodeResult]
    rewards: Mapping[int, float]


@dataclass(frozen=True)
class StepRecord:
    """The groups of step `step`, counted from 1. `head`: other fields of the run."""

    step: int
    groups: tuple[RecordedGroup, ...]
    head: Mapping[str, Any]


class Records:
    """Writes a run's records, on rank 0. Files are made in a thread; an error of it is raised by the next call."""

    def __init__(self, run_folder: Path, first_step: int) -> None:
        """Records of steps after `first_step`, which a process left that had passed its last checkpoint, are removed."""
        self.folder = run_folder / EPISODES
        for step, path in paths_of(run_folder).items():
            if step > first_step:
                path.unlink()
        self._thread = ThreadPoolExecutor(1, "records")
        self._writing: Future[None] | None = None

    def write(self, step: int, groups: Sequence[Group], head: Mapping[str, Any]) -> None:
        self.wait()
        path = self.folder / f"step_{step:08}.npz"
        head = {"step": step, "requests": [asdict(group.request) for group in groups], **head}
        self._writing = self._thread.submit(_write, path, [group.saved() for group in groups], head)

    def wait(self) -> None:
        """Until all is on the disk.

        Raises:
            OSError: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Waits for the file that is being written. Safe after any failure."""
        self._thread.shutdown()


def paths_of(run_folder: Path) -> dict[int, Path]:
    """By step, in order."""
    paths = sorted((run_folder / EPISODES).glob("step_*.npz"))
    return {int(match[1]): path for path in paths if (match := NAME.fullmatch(path.name))}


def load_record(path: Path) -> StepRecord:
    """Load a file of `Records`; it holds no code.

    Raises:
        ConfigError: it is cut off, of another version, or something else.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            data = {name: file[name] for name in file.files}
        head = json.loads(data[HEAD].tobytes())
        groups = [_group(*pair) for pair in zip(unpacked(data), head.pop("requests"), strict=True)]
        return StepRecord(head.pop("step"), tuple(groups), head)
    except UNREADABLE as error:
        remedy = "take a step whose record is whole"
        raise ConfigError(f"{path}: cannot be read as a record: {type(error).__name__}: {error}", remedy=remedy) from error


def _write(path: Path, groups: Sequence[SavedGroup], head: Mapping[str, Any]) -> None:
    file = io.BytesIO()
    arrays = packed(groups, with_experts=False) | {HEAD: np.frombuffer(json.dumps(head).encode(), np.uint8)}
    np.savez_compressed(file, **arrays)
    write_atomically(path, file.getvalue())


def _group(saved: SavedGroup, request: dict[str, Any]) -> RecordedGroup:
    tuples = {name: tuple(request[name]) for name in ("prompt_ids", "stop", "stop_token_ids")}
    members = {sample.index: sample.completion for sample in saved.samples}
    rewards = {sample.index: sample.reward for sample in saved.samples}
    return RecordedGroup(saved.key, GenerationRequest(**request | tuples), members, rewards)
