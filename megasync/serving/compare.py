"""What a step was trained on, as requests that sample it again, and where that comes out otherwise: pure functions.

A piece is what one turn sampled with the weights of its first token. What it sampled after an update in its midst, with another
version and with keys and values of both, is not compared. Leaves out replicas and weights (replay.py).

    pieces = pieces_of(record)
    difference = first_difference(pieces[0], completion)       # None: each token is the same
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from bridge.generation import Completion, GenerationRequest
from megasync.config.errors import ConfigError
from megasync.episodes.record import turns_of
from megasync.episodes.task import Played
from megasync.rollouts.records import RecordedGroup, StepRecord


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

    @property
    def name(self) -> str:
        return f"episode {self.group}/{self.member}, turn {self.turn}"


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


def chosen_members(record: StepRecord, names: Sequence[str]) -> dict[tuple[int, int], RecordedGroup]:
    """The episodes of these names, GROUP or GROUP/MEMBER, with their groups; all without any.

    Raises:
        ConfigError: there is none of a name.
    """
    found = {(group.key, member): group for group in record.groups for member in group.members}
    wanted = set[tuple[int, int]]()
    for name in names:
        group, _, member = name.partition("/")
        own = {key for key in found if str(key[0]) == group and member in ("", str(key[1]))}
        if not own:
            there = ", ".join(f"{group}/{member}" for group, member in found)
            told = there if len(there) < 300 else f"{there[:300]} ..."
            raise ConfigError(f"--episode {name}: step {record.step} has no such episode", there=told, remedy="write one of them")
        wanted |= own
    return {key: group for key, group in found.items() if key in wanted or not names}


def pieces_of(members: Mapping[tuple[int, int], RecordedGroup]) -> list[Piece]:
    """In the order of groups, members and turns."""
    return [piece for (_, member), group in members.items() for piece in _of_member(group, member)]


def _of_member(group: RecordedGroup, member: int) -> Iterator[Piece]:
    done = group.members[member]
    if isinstance(done, Completion):
        arrays = done.token_ids, done.log_probs, done.weight_versions
        yield _piece(group.key, member, 0, group.request, member, *arrays)
        return
    assert isinstance(done, Played)
    for asked, (prompt, turn) in zip(done.turns, turns_of(done.branches, done.turns), strict=True):
        request = replace(
            group.request,
            prompt_ids=tuple(prompt.tolist()),
            num_samples=1,
            seed=asked.seed,
            max_new_tokens=asked.max_new_tokens,
            stop=asked.stop,
        )
        arrays = turn.token_ids, turn.log_probs, turn.weight_versions
        yield _piece(group.key, member, asked.number, request, 0, *arrays)


def _piece(
    group: int,
    member: int,
    number: int,
    request: GenerationRequest,
    sample: int,
    token_ids: npt.NDArray[np.int32],
    log_probs: npt.NDArray[np.float32],
    versions: npt.NDArray[np.int32],
) -> Piece:
    version, others = int(versions[0]), np.flatnonzero(versions != versions[0])
    end = int(others[0]) if len(others) else len(token_ids)
    later = len(token_ids) - end
    return Piece(group, member, number + 1, version, request, sample, token_ids[:end], log_probs[:end], later)


def tokens_by_version(pieces: Iterable[Piece]) -> dict[int, int]:
    """That can be compared."""
    found = Counter[int]()
    for piece in pieces:
        found[piece.version] += len(piece.token_ids)
    return dict(sorted(found.items()))


def requests_of(pieces: Iterable[Piece]) -> list[GenerationRequest]:
    """Each once: samples of one prompt have one."""
    return list(dict.fromkeys(piece.request for piece in pieces))


def first_difference(piece: Piece, now: Completion) -> Difference | None:
    """None: each token of the piece is the same, and where it ended the turn, so is its end."""
    length = len(piece.token_ids)
    ids = now.token_ids[:length] if piece.num_later else now.token_ids
    for place, (sampled, own) in enumerate(zip_longest(piece.token_ids.tolist(), ids.tolist())):
        if sampled != own:
            log_probs = piece.log_probs, now.log_probs
            of_both = [float(column[place]) if place < len(column) else None for column in log_probs]
            where = piece.group, piece.member, piece.turn, place + 1
            return Difference(*where, sampled, of_both[0] if place < length else None, own, of_both[1])
    return None


def largest_gap(piece: Piece, now: Completion) -> float:
    """Of log-probs, over the tokens before the first difference."""
    length = min(len(piece.token_ids), len(now.token_ids))
    same = piece.token_ids[:length] == now.token_ids[:length]
    end = length if same.all() else int(np.argmin(same))
    return float(np.abs(piece.log_probs[:end] - now.log_probs[:end]).max(initial=0.0))
