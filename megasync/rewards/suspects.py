"""Who ended a process that several shared: they are tried again apart, in smaller sets, until whoever ends one is alone in it.

With n calls in a process, k of which kill every process that they are in, about k log2(n) processes die, and no other call fails.
Leaves out the processes (rewards/lane.py, episodes/pool.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
MOST_ALONE = 4  # more likely ones than that are no hint


def divide(suspects: Sequence[T], likely: Collection[T] = ()) -> list[list[T]]:
    """Each of the suspects in one smaller set: those that are likely alone, where they are few, the others in two halves.

    One suspect is a set of one. No set is empty, and none has more than half of the suspects, rounded up.
    """
    alone = [one for one in suspects if one in likely]
    alone = alone if len(alone) <= MOST_ALONE else []
    others = [one for one in suspects if one not in alone]
    half = -(-len(others) // 2)
    return [[one] for one in alone] + [part for part in (others[:half], others[half:]) if part]


class State(Protocol):
    """Of a process."""

    is_ready: bool
    ended_by_us: str
    num_begun: int  # that were in it, all its life

    @property
    def is_usable(self) -> bool: ...

    @property
    def is_empty(self) -> bool: ...


def hand_out(
    sets: deque[list[T]], processes: Mapping[Any, State], give: Callable[[Any, list[T]], None], start: Callable[[], bool]
) -> None:
    """Give each set to an empty process, one that is alone to one that nobody was in before.

    For those that are left processes are started, or where `start` starts none, empty ones ended to make room.
    """
    for suspects in list(sets):
        free = (each for each, state in processes.items() if state.is_usable and state.is_empty)
        found = next((each for each in free if len(suspects) > 1 or not processes[each].num_begun), None)
        if found is not None:
            sets.remove(suspects)
            give(found, suspects)
    coming = sum(not state.is_ready or bool(state.ended_by_us) for state in processes.values())
    for _ in range(len(sets) - coming):
        empty = next((each for each, state in processes.items() if state.is_usable and state.is_empty), None)
        if not start() and empty is not None:
            processes[empty].ended_by_us = "makes room"
            empty.kill()
