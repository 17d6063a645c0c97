"""How far a run has come with its prompts, as a file in a checkpoint: what was begun and not trained, with its tokens.

save_progress writes the file, load_progress reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bridge.generation import Completion

FILE = "rollouts.npz"
ARRAYS = ("token_ids", "log_probs", "weight_versions")
FINISH_REASONS = ("stop", "length")
EXPERT_DTYPES = {1: np.uint8, 2: np.int16}  # by their size


@dataclass(frozen=True)
class SavedSample:
    """A sample that has ended; its reward is NaN where there was none yet."""

    index: int  # in its group
    completion: Completion
    reward: float


@dataclass(frozen=True)
class SavedGroup:
    """A prompt that has begun and is not trained. The digests tell whether it is asked, and scored, as it was then."""

    key: int  # its ordinal
    samples: tuple[SavedSample, ...] = ()
    request_digest: int = 0
    reward_digest: int = 0


@dataclass(frozen=True)
class Progress:
    """`num_begun`: the ordinal of the next prompt that has not begun yet."""

    num_trained: int  # prompts, all
    num_begun: int = 0
    expected_tokens: float | None = None
    groups: tuple[SavedGroup, ...] = ()


def save_progress(folder: Path, progress: Progress) -> None:
    """Numbers alone, in NumPy's format."""
    pairs = [(place, sample) for place, group in enumerate(progress.groups) for sample in group.samples]
    done = [sample.completion for _, sample in pairs]
    np.savez(
        folder / FILE,
        counts=np.array([progress.num_trained, progress.num_begun], np.int64),
        expected_tokens=np.array([np.nan if progress.expected_tokens is None else progress.expected_tokens]),
        groups=np.array([(one.key, one.request_digest, one.reward_digest) for one in progress.groups], np.int64).reshape(-1, 3),
        places=np.array([place for place, _ in pairs], np.int64),
        indices=np.array([sample.index for _, sample in pairs], np.int64),
        rewards=np.array([sample.reward for _, sample in pairs], np.float64),
        finish_reasons=np.array([FINISH_REASONS.index(completion.finish_reason) for completion in done], np.int64),
        lengths=np.array([len(completion.token_ids) for completion in done], np.int64),
        token_ids=_joined([completion.token_ids for completion in done], np.int32),
        log_probs=_joined([completion.log_probs for completion in done], np.float32),
        weight_versions=_joined([completion.weight_versions for completion in done], np.int32),
        expert_shapes=np.array([completion.routed_experts.shape for completion in done], np.int64).reshape(-1, 3),
        expert_bytes=np.array([completion.routed_experts.itemsize for completion in done], np.int64),
        routed_experts=_joined([np.ascontiguousarray(one.routed_experts).reshape(-1).view(np.uint8) for one in done], np.uint8),
    )


def load_progress(folder: Path) -> Progress | None:
    """What `save_progress` wrote; no code is read from the file. Groups of older files have no digests, and will begin anew."""
    if not (folder / FILE).is_file():
        return None
    with np.load(folder / FILE, allow_pickle=False) as file:
        data = {name: file[name] for name in file.files}
    spans = list(pairwise([0, *np.cumsum(data["lengths"]).tolist()]))
    samples: list[list[SavedSample]] = [[] for _ in data["groups"]]
    experts = _experts(data)
    for number, place in enumerate(data["places"].tolist()):
        tokens, log_probs, versions = (data[name][slice(*spans[number])] for name in ARRAYS)
        reason = FINISH_REASONS[int(data["finish_reasons"][number])]
        completion = Completion(tokens, log_probs, versions, reason, experts[number])
        samples[place].append(SavedSample(int(data["indices"][number]), completion, float(data["rewards"][number])))
    trained, begun, *_ = data["counts"].tolist()
    (expected,) = data["expected_tokens"].tolist()
    heads = data["groups"] if data["groups"].ndim == 2 else np.pad(data["groups"][:, None], [(0, 0), (0, 2)])
    pairs = zip(heads.tolist(), map(tuple, samples), strict=True)
    groups = tuple(SavedGroup(key, done, asked, scored) for (key, asked, scored), done in pairs)
    return Progress(trained, begun, None if np.isnan(expected) else expected, groups)


def _experts(data: dict[str, Any]) -> list[Any]:
    """Each sample's routed experts."""
    dtypes = [EXPERT_DTYPES[size] for size in data["expert_bytes"].tolist()]
    sizes = data["expert_shapes"].prod(1) * data["expert_bytes"]
    pieces = np.split(data["routed_experts"], np.cumsum(sizes)[:-1]) if len(sizes) else []
    shapes = data["expert_shapes"].tolist()
    return [piece.view(dtype).reshape(shape) for piece, dtype, shape in zip(pieces, dtypes, shapes, strict=True)]


def _joined(arrays: Sequence[Any], dtype: type) -> Any:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype)
