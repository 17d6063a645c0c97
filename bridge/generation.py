"""The input and output of generation: requests, groups of samples, completions.

Leaves out who works on them (replicas/).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

NO_EXPERTS = np.empty((0, 0, 0), np.uint8)
NO_SUPPORT = np.empty(0, np.int32)
NO_TOP = np.empty((0, 0), np.int32), np.empty((0, 0), np.float32)
NO_ADAPTER = -1  # stands for the folder's weights where others are in slots
MAX_SUPPORT = 256  # the largest `top_k` with which a support is returned
TOKEN_ARRAYS = {"token_ids": np.int32, "log_probs": np.float32, "weight_versions": np.int32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of responses to a prompt. `top_k` 0 and `min_p` 0 leave no token out.

    `stop`: texts, special tokens included as they are. `max_new_tokens` of each response; 0 is for log-probs of the
    prompt (Generator.score).
    """

    num_samples: int = 1
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationRequest(Sampling):
    """One prompt and how to sample from it. Nothing but `stop_token_ids`, `stop` and the limit ends a completion.

    `slot`: of the adapter, in a replica that holds several (ReplicaConfig.adapter_slots); None: that of the last sync;
    NO_ADAPTER: none. `num_top`: how many of the most likely tokens are returned at each place, at most vLLM's max_logprobs;
    `Generator.submit` returns none.
    """

    prompt_ids: tuple[int, ...]
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    first_is_greedy: bool = False  # the first of its samples is at temperature 0
    slot: int | None = None
    num_top: int = 0

    def of_sample(self, sample: int) -> GenerationRequest:
        """The request for one of its samples: greedy where that sample is."""
        if not self.first_is_greedy:
            return self
        return replace(self, first_is_greedy=False, temperature=0.0 if sample == 0 else self.temperature)


@dataclass(frozen=True, slots=True)
class ScoreRequest(GenerationRequest):
    """The log-probs of a prompt's own tokens, and of the most likely ones at their places."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """Scores of n tokens: natural log-probs of the tokens from the second on, and the k most likely tokens at their places."""

    log_probs: npt.NDArray[np.float32]  # [n - 1]
    top_ids: npt.NDArray[np.int32]  # [n - 1, k], the most likely first
    top_log_probs: npt.NDArray[np.float32]  # [n - 1, k]

    def behind(self, num_prompt: int) -> TokenScores:
        """The scores of the tokens behind the first `num_prompt`, at least 1; copies, without the memory of the others."""
        first = num_prompt - 1
        return TokenScores(self.log_probs[first:].copy(), self.top_ids[first:].copy(), self.top_log_probs[first:].copy())


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One sample of n tokens. A stop token, or the token that completed a stop text, is its last token.

    Any sequence of numbers becomes an array of the field's dtype.

    `log_probs` are natural logarithms at the request's temperature (plain at temperature 0), renormalised over the tokens
    that `top_p`, `top_k` and `min_p` leave. In `weight_versions` FOLDER_VERSION stands for the model folder's weights.
    """

    token_ids: npt.NDArray[np.int32]  # [n]
    log_probs: npt.NDArray[np.float32]  # [n]
    weight_versions: npt.NDArray[np.int32]  # [n]
    finish_reason: str = "stop"  # stop | length
    # [prompt and response tokens - 1, layers, experts of a token], uint8 or int16, where ReplicaConfig.returns_experts is set
    routed_experts: npt.NDArray[Any] = field(default_factory=lambda: NO_EXPERTS)
    # [n + kept tokens]: how many tokens the sampler kept at each of the n, then their ids; empty without `returns_support`
    support: npt.NDArray[np.int32] = field(default_factory=lambda: NO_SUPPORT)
    # each [n, GenerationRequest.num_top]: the most likely tokens and their log-probs, the most likely first; -inf: left out
    top: tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] = NO_TOP

    def __post_init__(self) -> None:
        for name, dtype in {**TOKEN_ARRAYS, "support": np.int32}.items():
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype))

    def copy(self) -> Completion:
        """A copy with its own arrays. Ray returns views of its object store, which keep the object alive."""
        arrays = self.token_ids.copy(), self.log_probs.copy(), self.weight_versions.copy()
        ids, log_probs = self.top
        return Completion(
            *arrays, self.finish_reason, self.routed_experts.copy(), self.support.copy(), (ids.copy(), log_probs.copy())
        )


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Samples of one prompt that are generated side by side: those of these indices, below the request's `num_samples`."""

    key: int  # the caller's
    request: GenerationRequest
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """Sample `sample` of group `key` has ended."""

    key: int
    sample: int
    completion: Completion


@dataclass(frozen=True, slots=True)
class Speculation:
    """Counts of speculative decoding: passes that verified drafts of a sample, drafted tokens, and those that were accepted."""

    num_passes: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def __add__(self, other: Speculation) -> Speculation:
        return Speculation(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class Collected:
    """The results that a replica has finished since the last call.

    `silent_seconds`: how long vLLM's engine core has owed it an answer; none is due while it loads weights.
    """

    finished: tuple[Finished, ...]
    silent_seconds: float

    def __reduce__(self) -> tuple[Any, ...]:
        """Sent as a few arrays for all: each costs more than the numbers in it."""
        done = [each.completion for each in self.finished]
        names = [(each.key, each.sample, each.completion.finish_reason) for each in self.finished]
        columns = [[getattr(each, name) for each in done] for name in TOKEN_ARRAYS]
        experts = [each.routed_experts for each in done] if any(each.routed_experts.size for each in done) else []
        supports = [each.support for each in done] if any(each.support.size for each in done) else []
        joined = [np.concatenate(column) if done else np.empty(0) for column in columns]
        return _collected, (names, [len(each.token_ids) for each in done], joined, experts, supports, self.silent_seconds)


def _collected(
    names: Any, lengths: list[int], joined: Any, experts: Any, supports: Any, silent_seconds: float
) -> Collected:
    """Copies the completions' arrays: Ray returns views of its object store."""
    columns = [np.split(column.copy(), np.cumsum(lengths[:-1], dtype=np.int64)) for column in joined]
    routed = [rows.copy() for rows in experts] or [NO_EXPERTS] * len(names)
    kept = [support.copy() for support in supports] or [NO_SUPPORT] * len(names)
    finished = (
        Finished(key, sample, Completion(tokens, log_probs, versions, reason, rows, support))
        for (key, sample, reason), tokens, log_probs, versions, rows, support in zip(names, *columns, routed, kept, strict=False)
    )  # of no samples numpy.split makes one part
    return Collected(tuple(finished), silent_seconds)


def joined_support(parts: Sequence[tuple[int, npt.NDArray[np.int32]]]) -> npt.NDArray[np.int32]:
    """The support of tokens that follow each other: of each part their number, and their support or none."""
    if not any(support.size for _, support in parts):
        return NO_SUPPORT
    counts = [support[:number] if support.size else np.zeros(number, np.int32) for number, support in parts]
    return np.concatenate([*counts, *(support[number:] for number, support in parts)])


def part_of_support(support: npt.NDArray[np.int32], num_tokens: int, part: slice) -> npt.NDArray[np.int32]:
    """The support of the tokens `part`, cut from the support of `num_tokens` tokens."""
    if not support.size:
        return NO_SUPPORT
    counts, ends = support[:num_tokens], np.cumsum([0, *support[:num_tokens]])
    return np.concatenate([counts[part], support[num_tokens:][ends[part.start] : ends[part.stop]]])
