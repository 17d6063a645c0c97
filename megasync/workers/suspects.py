"""Which jobs to try again together after the end of a process that they shared: in smaller sets, until the guilty one is alone.

With n jobs in a worker, k of which end every process that they are in, about k log2(n) workers die, and no other job fails.
Leaves out the workers (pool.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

T = TypeVar("T")
MAX_ALONE = 4  # with more likely ones the hint is worth nothing


def divide(suspects: Sequence[T], likely: Collection[T] = ()) -> list[list[T]]:
    """The suspects in smaller sets: the likely ones alone, if they are few, the others in two halves.

    One suspect is a set of one. No set is empty, and none has more than half of the suspects, rounded up.
    """
    alone = [one for one in suspects if one in likely]
    alone = alone if len(alone) <= MAX_ALONE else []
    others = [one for one in suspects if one not in alone]
    half = -(-len(others) // 2)
    return [[one] for one in alone] + [part for part in (others[:half], others[half:]) if part]


def sort_out(
    jobs: Sequence[T], *, is_serial: bool, is_solved: bool, were_suspects: bool, likely: Collection[T]
) -> tuple[list[list[T]], list[T]]:
    """Sets of suspects among the jobs of a worker that died, oldest first, and the jobs that are innocent.

    `is_solved`: the guilty one is known, and not among them. Of a serial worker only the one that ran is a suspect. It is
    not guilty yet: a thread of an earlier one may have ended the worker. Jobs that were suspects before stay together.
    """
    if is_serial:
        ran = [] if is_solved else [job for job in jobs if job in likely] or jobs[:1]
        return [[job] for job in ran], [job for job in jobs if job not in ran]
    if not is_solved:
        return divide(jobs, likely), []
    return ([list(jobs)], []) if were_suspects and jobs else ([], list(jobs))
