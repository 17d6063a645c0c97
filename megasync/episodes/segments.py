"""An episode's tokens: sampled by a replica, or given. Leaves out where they come from (render.py).

A request whose prompt begins with exactly the tokens of an earlier request and its answer continues that branch; any other
begins a branch: a template that drops thinking, a compacted history, a second agent that starts from the same turn. Each
branch is a training sequence. A sampled token is trained in the branch to which its turn was added, and is context in others.

    recorder = Recorder()
    recorder.add(prompt_ids, await sampler(prompt_ids))      # a Turn
    recorder.branches()                                      # arrays for training
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from bridge.generation import NO_EXPERTS, NO_SUPPORT, TOKEN_ARRAYS, Completion, joined_support

if TYPE_CHECKING:
    import numpy.typing as npt

    from engine.sample import ExpertArray, FloatArray, IntArray

BRANCH_ARRAYS = {**TOKEN_ARRAYS, "is_sampled": np.bool_, "support": np.int32}
Turn = Completion  # sampled for one request of an episode


class Sampler(Protocol):
    """Asks an episode's replica for tokens. Cancelling the call cancels the sampling."""

    async def __call__(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Turn: ...


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """One training sequence of n tokens: loss where `is_sampled`. Its first `prompt_length` tokens, at least one, are given.

    A given token has log-prob 0 and the version of the sampled token before it; the first ones that of the first sampled one.
    """

    token_ids: IntArray  # [n]
    prompt_length: int
    is_sampled: npt.NDArray[np.bool_]  # [n]
    log_probs: FloatArray  # [n]
    weight_versions: IntArray  # [n]
    finish_reason: str = "stop"  # of the last turn: stop | length
    # [n - 1, layers, experts of a token], each from the turn that first went through the token; empty where a turn had none
    routed_experts: ExpertArray = field(default_factory=lambda: NO_EXPERTS)
    support: IntArray = field(default_factory=lambda: NO_SUPPORT)  # of its n tokens (Completion.support); given ones have none

    def __post_init__(self) -> None:
        for name, dtype in BRANCH_ARRAYS.items():
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype))


class Recorder:
    """Collects the turns of one episode, in the order in which they ended."""

    def __init__(self) -> None:
        self._branches: list[_Growing] = []
        self._by_end: dict[tuple[int, bytes], list[_Growing]] = {}  # by length and digest of the tokens so far
        self._num_of_length: dict[int, int] = {}
        self.last_branch = -1  # that a turn was added to

    def add(self, prompt_ids: Sequence[int] | IntArray, turn: Turn) -> None:
        """Extends the longest branch that is a prefix of `prompt_ids`, or begins a new one. A turn without tokens adds none."""
        assert len(turn.token_ids) == len(turn.log_probs) == len(turn.weight_versions)
        if not len(turn.token_ids):
            return
        prompt = np.asarray(prompt_ids, np.int32)
        assert len(prompt)
        branch = self._take_prefix_of(prompt) or self._begin()
        branch.extend(prompt[branch.num_tokens :], turn)
        self.last_branch = branch.number
        self._by_end.setdefault(branch.end(), []).append(branch)
        self._num_of_length[branch.num_tokens] = self._num_of_length.get(branch.num_tokens, 0) + 1

    def branches(self) -> list[Branch]:
        """Branches in the order in which they began; each sampled token is a sampled one in exactly one of them."""
        return [branch.finished() for branch in self._branches]

    def _begin(self) -> _Growing:
        self._branches.append(_Growing(len(self._branches)))
        return self._branches[-1]

    def _take_prefix_of(self, prompt: IntArray) -> _Growing | None:
        """One pass of the hash over the prompt, with a look at each length that some branch has."""
        lengths = sorted(length for length in self._num_of_length if length <= len(prompt))
        hasher, found = hashlib.blake2b(digest_size=16), None
        for begin, end in pairwise([0, *lengths]):
            hasher.update(prompt[begin:end].tobytes())
            key = end, hasher.digest()
            found = key if key in self._by_end else found
        if found is None:
            return None
        branch = self._by_end[found].pop(0)  # samples of one prompt may be equal: the first continues
        if not self._by_end[found]:
            del self._by_end[found]
        self._num_of_length[found[0]] -= 1
        if not self._num_of_length[found[0]]:
            del self._num_of_length[found[0]]
        return branch


class _Growing:
    """A branch that may continue: given and sampled tokens in turns."""

    def __init__(self, number: int) -> None:
        self.number, self.num_tokens = number, 0
        self._hasher = hashlib.blake2b(digest_size=16)
        self._pieces: list[tuple[IntArray, Turn]] = []
        self._experts: list[npt.NDArray[Any]] = []

    def extend(self, given: IntArray, turn: Turn) -> None:
        self._hasher.update(given.tobytes())
        self._hasher.update(turn.token_ids.tobytes())
        self._experts.append(turn.routed_experts[max(self.num_tokens - 1, 0) :])
        self._pieces.append((given.copy(), turn))
        self.num_tokens += len(given) + len(turn.token_ids)

    def end(self) -> tuple[int, bytes]:
        return self.num_tokens, self._hasher.digest()

    def finished(self) -> Branch:
        pairs = self._pieces
        before = [pairs[0][1].weight_versions[0], *(turn.weight_versions[-1] for _, turn in pairs)]
        versions = [(np.full(len(given), last), turn.weight_versions) for (given, turn), last in zip(pairs, before, strict=False)]
        with_experts = all(rows.size for rows in self._experts)
        return Branch(
            token_ids=_joined([(given, turn.token_ids) for given, turn in pairs]),
            prompt_length=len(pairs[0][0]),
            is_sampled=_joined([(np.zeros(len(given)), np.ones(len(turn.token_ids))) for given, turn in pairs]),
            log_probs=_joined([(np.zeros(len(given)), turn.log_probs) for given, turn in pairs]),
            weight_versions=_joined(versions),
            finish_reason=pairs[-1][1].finish_reason,
            routed_experts=np.concatenate(self._experts) if with_experts else NO_EXPERTS,
            support=joined_support(
                [part for given, turn in pairs for part in ((len(given), NO_SUPPORT), (len(turn.token_ids), turn.support))]
            ),
        )


def _joined(pairs: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]]) -> npt.NDArray[Any]:
    return np.concatenate([piece for pair in pairs for piece in pair])
