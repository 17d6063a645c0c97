"""A recorded step as requests that sample it again, and where the result differs.

A piece is the part of a turn that the weights of its first token sampled. Tokens after an update in the midst of a turn were
sampled over keys and values of both versions, and are not compared. Leaves out which steps and weights (command.py).

    pieces = pieces_of(members, config)
    difference = first_difference(pieces[0], completion)       # None: each token is the same
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bridge.generation import Completion, GenerationRequest
from megasync.config.schema import Config
from megasync.episodes.record import turns_of
from megasync.episodes.task import EpisodeResult
from megasync.rollouts.records import RecordedGroup
from megasync.tools.replay.results import StepResult, TextOf, counted
from megasync.tools.serving.replicas import Serve
from megasync.tools.serving.send import sender

if TYPE_CHECKING:
    from bridge.replicas.pool import ReplicaPool


@dataclass(frozen=True, eq=False)
class Piece:
    """Tokens of one version. `sample`: which of the request's samples has them."""

    group: int
    member: int
    turn: int  # from 1
    version: int
    request: GenerationRequest
    sample: int
    token_ids: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]
    num_later: int  # tokens of the turn that later versions sampled


Pieces = Mapping[int, Sequence[Piece]]  # by step


@dataclass(frozen=True)
class Difference:
    """The first of a turn. A token is None where one of the two had ended."""

    group: int
    member: int
    turn: int
    token: int  # of the turn, from 1
    sampled: int | None
    sampled_log_prob: float | None
    now: int | None
    now_log_prob: float | None


@dataclass
class Sampled(StepResult):
    turns: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def is_same(self) -> bool:
        return not self.differences

    def add(self, piece: Piece, now: Completion) -> None:
        self.compared_tokens += len(piece.token_ids)
        self.largest_gap = max(self.largest_gap, largest_gap(piece, now))
        if difference := first_difference(piece, now):
            self.differences.append(difference)
            self.differences.sort(key=lambda one: (one.group, one.member, one.turn))

    def lines(self, text_of: TextOf) -> list[str]:
        compared = f"{self.compared_tokens} of {self.tokens} tokens compared"
        found = f"step {self.step}: {self.episodes} episodes, {self.turns} turns, {compared}"
        if not self.compared_tokens:
            return [found]
        if not self.differences:
            return [f"{found}: every one is the same; log-probs within {self.largest_gap:.1e}"]
        first = self.differences[0]
        where = f"episode {first.group}/{first.member}, turn {first.turn}, token {first.token}"
        then = _token(text_of, first.sampled, first.sampled_log_prob)
        now = _token(text_of, first.now, first.now_log_prob)
        counts = f"{len(self.differences)} of {self.turns} turns differ; log-probs before that within {self.largest_gap:.1e}"
        return [found, f"  differs first in {where}: sampled was {then}, now {now}", f"  {counts}"]


def _token(text_of: TextOf, token: int | None, log_prob: float | None) -> str:
    return "the end" if token is None else f"{token} {text_of([token])!r} ({log_prob:.4f})"


def result_of(step: int, num_episodes: int, pieces: Sequence[Piece]) -> Sampled:
    """Before anything is compared."""
    by_version = counted(piece.version for piece in pieces for _ in piece.token_ids)
    return Sampled(step, num_episodes, by_version, sum(piece.num_later for piece in pieces), turns=len(pieces))


def compare(_: Config, weights: Iterator[tuple[int, Config]], pieces: Pieces, done: Sequence[Sampled], serve: Serve) -> None:
    """Replicas start with the first of the `weights`, versions with their configs; the others are sent to them."""
    first = next(weights, None)
    if first is None:
        return
    with serve(first[1]) as pool, sender(first[1], pool) as send:
        _compare(pool, first[0], pieces, done)
        for version, config in weights:
            send(version, Path(config.model.path))
            _compare(pool, version, pieces, done)


def _compare(pool: ReplicaPool, version: int, pieces: Pieces, done: Sequence[Sampled]) -> None:
    pairs = [(each, piece) for each in done for piece in pieces[each.step] if piece.version == version]
    requests = requests_of(piece for _, piece in pairs)
    now = dict(zip(requests, pool.generate(requests).result(), strict=True))
    for each, piece in pairs:
        each.add(piece, now[piece.request][piece.sample])


def pieces_of(members: Mapping[tuple[int, int], RecordedGroup], _: Config) -> list[Piece]:
    """In the order of groups, members and turns."""
    return [piece for (_, member), group in members.items() for piece in _of_member(group, member)]


def _of_member(group: RecordedGroup, member: int) -> Iterator[Piece]:
    done = group.members[member]
    if isinstance(done, Completion):
        yield _piece(group.key, member, 1, group.request, member, done)
        return
    assert isinstance(done, EpisodeResult)
    for asked, (prompt, turn) in zip(done.turns, turns_of(done.branches, done.turns), strict=True):
        request = replace(
            group.request,
            prompt_ids=tuple(prompt.tolist()),
            num_samples=1,
            seed=asked.seed,
            max_new_tokens=asked.max_new_tokens,
            stop=asked.stop,
        )
        completion = Completion(turn.token_ids, turn.log_probs, turn.weight_versions, "")
        yield _piece(group.key, member, asked.number + 1, request, 0, completion)


def _piece(group: int, member: int, turn: int, request: GenerationRequest, sample: int, done: Completion) -> Piece:
    versions = done.weight_versions
    others = np.flatnonzero(versions != versions[0])
    end = int(others[0]) if len(others) else len(versions)
    own = done.token_ids[:end], done.log_probs[:end]
    return Piece(group, member, turn, int(versions[0]), request, sample, *own, len(versions) - end)


def requests_of(pieces: Iterable[Piece]) -> list[GenerationRequest]:
    """Each once: samples of one prompt have one."""
    return list(dict.fromkeys(piece.request for piece in pieces))


def first_difference(piece: Piece, now: Completion) -> Difference | None:
    """None: each token of the piece is the same, and where it ended the turn, so is its end."""
    length = len(piece.token_ids)
    ids = now.token_ids[:length] if piece.num_later else now.token_ids
    for place, (sampled, own) in enumerate(zip_longest(piece.token_ids.tolist(), ids.tolist())):
        if sampled != own:
            then = float(piece.log_probs[place]) if sampled is not None else None
            log_prob = float(now.log_probs[place]) if own is not None else None
            return Difference(piece.group, piece.member, piece.turn, place + 1, sampled, then, own, log_prob)
    return None


def largest_gap(piece: Piece, now: Completion) -> float:
    """The largest gap of log-probs, over the tokens before the first difference."""
    length = min(len(piece.token_ids), len(now.token_ids))
    same = piece.token_ids[:length] == now.token_ids[:length]
    end = length if same.all() else int(np.argmin(same))
    return float(np.abs(piece.log_probs[:end] - now.log_probs[:end]).max(initial=0.0))
