"""How far a run has come with its prompts, as a file in a checkpoint: groups that had begun and were not trained, with tokens.

save_progress writes the file, load_progress reads it. An episode is kept as its branches, with the request of each turn and the
answers of its environment; of an unfinished one the turns that have ended.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bridge.generation import NO_EXPERTS, NO_SUPPORT, TOKEN_ARRAYS, Completion
from engine.resume import instead
from megasync.config.errors import ConfigError
from megasync.data.data import PromptOrder
from megasync.episodes.record import EnvironmentAnswer, TurnRecord
from megasync.episodes.segments import Branch
from megasync.episodes.task import EpisodeResult

OF_EPISODES = (
    *("reward", "finish_reason", "num_turns", "seconds", "tool_seconds", "num_failures", "is_dropped", "num_prompt", "num_held"),
    *("metrics", "info"),
)
OF_BRANCHES = ("log_probs", "weight_versions", "finish_reason", "routed_experts", "support")
RECORDED = ("turns", "answers", "num_resumed", "turn_rewards")
RESTART = "is_anew"  # in the file, of `is_restart`
FILE = "rollouts.npz"
FINISH_REASONS = ("stop", "length")
UNREADABLE = (  # what NumPy and `unpacked` raise of a file that another version wrote, or that is cut off
    *(OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error),
)
EXPERT_DTYPES = {1: np.uint8, 2: np.int16}  # by their size


@dataclass(frozen=True)
class SavedSample:
    """A sample that has ended; its reward is NaN where there was none yet."""

    index: int  # in its group
    completion: Completion | EpisodeResult
    reward: float
    is_over: bool = True  # false: an unfinished episode


@dataclass(frozen=True)
class SavedGroup:
    """A prompt that has begun and is not trained. Equal digests: it is asked, and scored, as it was then."""

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
    order: PromptOrder | None = None  # whose ordinals these are
    sampler: str = ""  # see data/sampler.py: its state, and the examples of the prompts that have begun; empty: without one


def save_progress(folder: Path, progress: Progress) -> None:
    """Numbers alone, in NumPy's format."""
    arrays: dict[str, Any] = {"sampler": np.frombuffer(progress.sampler.encode(), np.uint8)} if progress.sampler else {}
    np.savez(
        folder / FILE,
        counts=np.array([progress.num_trained, progress.num_begun], np.int64),
        expected_tokens=np.array([np.nan if progress.expected_tokens is None else progress.expected_tokens]),
        **packed(progress.groups),
        **_of_order(progress.order),
        **arrays,
    )


def _of_order(order: PromptOrder | None) -> dict[str, Any]:
    if order is None:
        return {}
    own = {"order": np.array([order.num_examples, order.seed, order.shuffle], np.int64)}
    return own | ({"sources": np.array(order.sources, np.float64)} if order.sources else {})


def packed(groups: Sequence[SavedGroup], *, with_experts: bool = True) -> dict[str, Any]:
    """The groups as arrays by name; texts are bytes of JSON. `with_experts`: also the experts of each token."""
    pairs = [(place, sample) for place, group in enumerate(groups) for sample in group.samples]
    done = [piece for _, sample in pairs for piece in _pieces(sample.completion)]
    experts = [completion.routed_experts if with_experts else NO_EXPERTS for completion in done]
    return {
        "groups": np.array([(one.key, one.request_digest, one.reward_digest) for one in groups], np.int64).reshape(-1, 3),
        "places": np.array([place for place, _ in pairs], np.int64),
        "indices": np.array([sample.index for _, sample in pairs], np.int64),
        "rewards": np.array([sample.reward for _, sample in pairs], np.float64),
        "are_over": np.array([sample.is_over for _, sample in pairs], np.bool_),
        "finish_reasons": np.array([FINISH_REASONS.index(completion.finish_reason) for completion in done], np.int64),
        "lengths": np.array([len(completion.token_ids) for completion in done], np.int64),
        "token_ids": _joined([completion.token_ids for completion in done], np.int32),
        "log_probs": _joined([completion.log_probs for completion in done], np.float32),
        "weight_versions": _joined([completion.weight_versions for completion in done], np.int32),
        "expert_shapes": np.array([rows.shape for rows in experts], np.int64).reshape(-1, 3),
        "expert_bytes": np.array([rows.itemsize for rows in experts], np.int64),
        "routed_experts": _joined([_bytes(rows) for rows in experts], np.uint8),
        **_supports(done),
        **_of_episodes([sample.completion for _, sample in pairs]),
    }


def _supports(done: Sequence[Completion]) -> dict[str, Any]:
    """Arrays of samples with a support."""
    if not any(completion.support.size for completion in done):
        return {}
    lengths = np.array([len(completion.support) for completion in done], np.int64)
    return {"support_lengths": lengths, "supports": _joined([completion.support for completion in done], np.int32)}


def _pieces(done: Completion | EpisodeResult) -> list[Completion]:
    """The response, or each branch of an episode from its first token on."""
    if isinstance(done, Completion):
        return [done]
    names = (*TOKEN_ARRAYS, "finish_reason", "routed_experts", "support")
    return [Completion(*(getattr(branch, name) for name in names)) for branch in done.branches]


def _of_episodes(done: Sequence[Completion | EpisodeResult]) -> dict[str, Any]:
    """Arrays of samples that are episodes."""
    played = [one for one in done if isinstance(one, EpisodeResult)]
    if not played:
        return {}
    texts = [
        json.dumps({name: getattr(one, name) for name in (*OF_EPISODES, *RECORDED)} | {RESTART: one.is_restart}).encode()
        for one in played
    ]
    branches = [branch for one in played for branch in one.branches]
    return {
        "num_branches": np.array([len(one.branches) for one in played], np.int64),
        "prompt_lengths": np.array([branch.prompt_length for branch in branches], np.int64),
        "masks": _joined([branch.is_sampled for branch in branches], np.bool_),
        "text_bytes": np.array([len(text) for text in texts], np.int64),
        "texts": np.frombuffer(b"".join(texts), np.uint8),
    }


def _episodes(data: dict[str, Any], pieces: list[Completion]) -> Iterator[EpisodeResult]:
    """The episodes of the branches' pieces."""
    masks = np.split(data["masks"], np.cumsum([len(piece.token_ids) for piece in pieces])[:-1]) if pieces else []
    rows = zip(pieces, data["prompt_lengths"].tolist(), masks, strict=True)
    branches = [
        Branch(one.token_ids, length, mask, *(getattr(one, name) for name in OF_BRANCHES))
        for one, length, mask in rows
    ]
    text, place = data["texts"].tobytes(), 0
    for number, (begin, end) in zip(data["num_branches"].tolist(), pairwise([0, *np.cumsum(data["text_bytes"])]), strict=True):
        fields = json.loads(text[begin:end])
        fields["turns"] = tuple(TurnRecord(*row)._replace(stop=tuple(row[-1])) for row in fields["turns"])
        fields["turn_rewards"] = tuple(fields.get("turn_rewards", ()))  # older versions wrote none
        fields["answers"] = tuple(EnvironmentAnswer(*row) for row in fields["answers"])
        yield EpisodeResult(tuple(branches[place : place + number]), is_restart=fields.pop(RESTART), **fields)
        place += number


def load_progress(folder: Path) -> Progress | None:
    """Load the file of `save_progress`; it holds no code.

    Raises:
        ConfigError: it is cut off, or another version wrote it.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as file:
            data = {name: file[name] for name in file.files}
        trained, begun = data["counts"].tolist()
        (expected,) = data["expected_tokens"].tolist()
        order = order_of([*data["order"].tolist(), data.get("sources", np.empty((0, 2))).tolist()]) if "order" in data else None
        sampler = data["sampler"].tobytes().decode() if "sampler" in data else ""
        return Progress(trained, begun, None if np.isnan(expected) else expected, unpacked(data), order, sampler)
    except UNREADABLE as error:
        remedy = f"continue with the version that wrote it. {instead(folder)}"
        message = f"{path}: cannot be read: {type(error).__name__}: {error}; it is damaged, or another version wrote it"
        raise ConfigError(message, remedy=remedy) from error


def order_of(fields: Sequence[Any]) -> PromptOrder:
    """The order from dataclasses.astuple, in which tuples may be lists, and sources be missing."""
    num_examples, seed, shuffle, *sources = fields
    return PromptOrder(num_examples, seed, bool(shuffle), tuple((int(size), weight) for size, weight in (sources or [()])[0]))


def unpacked(data: dict[str, Any]) -> tuple[SavedGroup, ...]:
    """The groups from the arrays of `packed`."""
    spans = list(pairwise([0, *np.cumsum(data["lengths"]).tolist()]))
    samples: list[list[SavedSample]] = [[] for _ in data["groups"]]
    experts, supports = _experts(data), [NO_SUPPORT] * len(spans)
    if "supports" in data:
        supports = np.split(data["supports"], np.cumsum(data["support_lengths"])[:-1])
    pieces = []
    for number, span in enumerate(spans):
        tokens, log_probs, versions = (data[name][slice(*span)] for name in TOKEN_ARRAYS)
        reason = FINISH_REASONS[int(data["finish_reasons"][number])]
        pieces.append(Completion(tokens, log_probs, versions, reason, experts[number], supports[number]))
    done = list(_episodes(data, pieces)) if "masks" in data else pieces
    for number, place in enumerate(data["places"].tolist()):
        index, reward, is_over = (data[name][number].item() for name in ("indices", "rewards", "are_over"))
        samples[place].append(SavedSample(index, done[number], reward, is_over))
    pairs = zip(data["groups"].tolist(), map(tuple, samples), strict=True)
    return tuple(SavedGroup(key, done, asked, scored) for (key, asked, scored), done in pairs)


def _experts(data: dict[str, Any]) -> list[Any]:
    """Each sample's routed experts."""
    dtypes = [EXPERT_DTYPES[size] for size in data["expert_bytes"].tolist()]
    sizes = data["expert_shapes"].prod(1) * data["expert_bytes"]
    pieces = np.split(data["routed_experts"], np.cumsum(sizes)[:-1]) if len(sizes) else []
    shapes = data["expert_shapes"].tolist()
    return [piece.view(dtype).reshape(shape) for piece, dtype, shape in zip(pieces, dtypes, shapes, strict=True)]


def _bytes(array: Any) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _joined(arrays: Sequence[Any], dtype: type) -> Any:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype)
