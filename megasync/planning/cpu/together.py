"""Seconds of calls in as many processes at once as will share the machine's cores, and caches, memory and a core's threads.

    found = seconds_of(operations, 2)     # by operation

All are timed in turn, again and again, and the median counts: the machine's speed changes from second to second. The processes
are forked from this one and are gone afterwards. Some begin anew: those of several threads, which do not survive a fork, and of
large models, since a fork of a process that holds one is slower by a twelfth. Leaves out what is timed (calls.py).
"""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import BinaryIO, NamedTuple

import torch

from megasync.planning.cpu.calls import MOST_BYTES, Call, fresh, moved, prepare
from megasync.planning.meta.operations import Operation

MOST_PROCESSES = 16
ROUNDS, MOST_SECONDS = 3, 2.0  # as many rounds, or until so much time has gone; the first is for warming up
MOST_COLD_SECONDS = 8.0  # where each call is timed once a round
TIMEOUT_SECONDS = 120.0
SHORT_SECONDS = 2e-4  # what is shorter is called several times
COLD_BYTES = 2**28  # more than any cache holds
FEW_BYTES = 2**14  # of a call whose time is that of any call
# malloc.h: M_MMAP_THRESHOLD and M_TRIM_THRESHOLD. What calls make here is memory that the process has already: what a rank's
# tensors take that come from the kernel is counted apart (calls.py: fresh)
MALLOC = ((-3, 2**25), (-1, 2**30))
THREADS = "OMP_NUM_THREADS"


class Way(NamedTuple):
    """How calls are timed."""

    at_once: int  # processes
    is_cold: bool  # caches hold other memory than a call's
    threads: int = 1  # of each


_KNOWN: dict[tuple[Operation, Way], float] = {}
LATELY: dict[str, float] = {}  # what others have timed on this machine, by `_text` (kept.py)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def rank_threads(num_ranks: int) -> int:
    """Of each trainer rank that this environment starts, or that has it. Of several torchrun sets OMP_NUM_THREADS to 1."""
    given = os.environ.get(THREADS, "")
    return int(given) if given.isdigit() and int(given) else (1 if num_ranks > 1 else usable_cores())


def seconds_of(
    operations: Iterable[Operation], num_processes: int, *, threads: int = 1, is_cold: bool = False
) -> dict[Operation, float]:
    """Of each call, with its new tensors but without its arguments, while `num_processes` of so many threads do the same.

    Where there are fewer cores each waits for its turn. `is_cold`: in a pass through more weights than caches hold, where a call
    finds its arguments in memory.

    Raises:
        RuntimeError: the processes did not answer.
    """
    threads = min(threads, usable_cores())
    way = Way(max(1, min(num_processes, usable_cores(), MOST_PROCESSES)), is_cold, threads)
    wanted = [*dict.fromkeys(operations), fresh()]
    if LATELY:
        lately = {each: LATELY.get(_text(each, way)) for each in wanted if (each, way) not in _KNOWN}
        _KNOWN.update({(each, way): seconds for each, seconds in lately.items() if seconds is not None})
    missing = [each for each in wanted if (each, way) not in _KNOWN and not _is_small(each)]
    if missing:
        answers = zip(*_run(missing, way), strict=True)
        _KNOWN.update({(each, way): max(seconds) for each, seconds in zip(missing, answers, strict=True)})  # others wait for it
    turns = max(1.0, num_processes / usable_cores())  # more threads than cores are so in what was timed, too
    new = _KNOWN[fresh(), way]
    own = {each: 0.0 if _is_small(each) else _KNOWN[each, way] for each in wanted}
    return {each: (seconds + each.kernel_bytes * new) * turns for each, seconds in own.items()}


def known() -> dict[str, float]:
    """Of all calls whose seconds this process knows, by their text."""
    return {_text(*call): seconds for call, seconds in _KNOWN.items()}


def _text(each: Operation, way: Way) -> str:
    several = f"{way.threads} threads " * (way.threads > 1)
    return f"{way.at_once} x {several}{'cold ' * way.is_cold}{tuple(each)}"


def _is_small(each: Operation) -> bool:
    return (not each.name or each.name.startswith("aten.")) and each.num_bytes < FEW_BYTES


def _run(operations: Sequence[Operation], way: Way) -> list[list[float]]:
    """What each of the processes has found."""
    children = [_start(operations, way) for _ in range(way.at_once)]
    deadline = time.monotonic() + TIMEOUT_SECONDS
    try:
        return [_read(descriptor, deadline) for _, descriptor in children]
    finally:
        for pid, descriptor in children:
            os.close(descriptor)
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
            os.waitpid(pid, 0)


def _start(operations: Sequence[Operation], way: Way) -> tuple[int, int]:
    """A child's number, and where its answer comes from."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as asked:
        pickle.dump((operations, tuple(way)), asked)
        asked.seek(0)
        if pid := os.fork():
            os.close(writing)
            return pid, reading
        try:
            os.close(reading)
            if way.threads > 1 or way.is_cold:
                _begin_anew(asked.fileno(), writing, way.threads)
            with os.fdopen(writing, "wb") as file:
                _answer(operations, way, file)
        finally:
            os._exit(0)  # nothing of the parent's is to run at this end


def _begin_anew(asked: int, answer: int, threads: int) -> None:
    """This process becomes another Python, which runs `main`."""
    os.dup2(asked, 0)
    os.dup2(answer, 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    own = {**os.environ, THREADS: str(threads), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    os.execve(sys.executable, [sys.executable, "-m", "megasync.planning.cpu.together"], own)  # noqa: S606 # no shell is wanted


def main() -> None:
    """A child that began anew: what it is asked is standard input, and its answer standard output."""
    operations, way = pickle.load(sys.stdin.buffer)  # noqa: S301 - of the process that became this one
    _answer(operations, Way(*way), sys.stdout.buffer)


def _answer(operations: Sequence[Operation], way: Way, file: BinaryIO) -> None:
    torch.set_num_threads(way.threads)
    for option, value in MALLOC:
        ctypes.CDLL(None).mallopt(option, value)
    pickle.dump(measure(operations, is_cold=way.is_cold), file)


def _read(descriptor: int, deadline: float) -> list[float]:
    """Until its end."""
    received = b""
    while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (part := os.read(descriptor, 2**16)):
            break
        received += part
    if not received:
        raise RuntimeError("the processes that time calls on this machine's CPU gave no answer")
    found: list[float] = pickle.loads(received)  # noqa: S301 - what a child of this process has written
    return found


def measure(operations: Sequence[Operation], *, is_cold: bool = False) -> list[float]:
    """Medians of several rounds, in this process."""
    begin = time.perf_counter()
    found: list[list[float]] = [[] for _ in operations]
    for number in range(ROUNDS + 1):
        for group in in_groups(operations, COLD_BYTES if is_cold else 0):
            passed = _cold_pass if is_cold else _warm_pass
            for place, seconds in zip(group, passed([_prepared(operations[place]) for place in group]), strict=True):
                found[place].append(seconds)
        if number and time.perf_counter() - begin > (MOST_COLD_SECONDS if is_cold else MOST_SECONDS):
            break
    return [statistics.median(seconds[1:]) for seconds in found]


def in_groups(operations: Sequence[Operation], num_bytes: int) -> Iterator[list[int]]:
    """Their places; the arguments of a group, in memory together, take at least so many bytes, but for those of the last one."""
    group, size = list[int](), 0
    for place, each in enumerate(operations):
        group.append(place)
        size += min(each.num_bytes, MOST_BYTES)
        if size >= num_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group


def _warm_pass(calls: Sequence[tuple[Call, float]]) -> list[float]:
    """Seconds of each, again and again on the same memory."""
    return [timed(call) * share for call, share in calls]


def _cold_pass(calls: Sequence[tuple[Call, float]]) -> list[float]:
    """Seconds of each, once, when others have taken its arguments' place in the caches."""
    for call, _ in calls:
        call()
    torch.ones(COLD_BYTES, dtype=torch.uint8)
    seconds = []
    for call, share in calls:
        begin = time.perf_counter()
        call()
        seconds.append((time.perf_counter() - begin) * share)
    return seconds


def _prepared(each: Operation) -> tuple[Call, float]:
    """Called once already."""
    try:
        call, share = prepare(each)
        call()
    except Exception:  # noqa: BLE001 - a call whose arguments mean something, or that is not to be cut
        call, share = prepare(moved(each.num_bytes))
    return call, share


def timed(call: Call) -> float:
    """Seconds of one call, warm."""
    begin = time.perf_counter()
    call()
    taken = time.perf_counter() - begin
    if taken > SHORT_SECONDS:
        return taken
    repeats = round(SHORT_SECONDS / max(taken, 1e-6)) + 1
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats


if __name__ == "__main__":
    main()
