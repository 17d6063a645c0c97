"""Heartbeats between the trainer's ranks: a rank that is stopped, or has vanished, is named, and the run ends on all ranks.

A thread of each rank increments a counter in the ranks' store and watches the counters of some others. When a counter stands
still for the limit, by the watcher's own clock, that rank is killed if it runs on the same host, so that collectives which wait
for it fail; the other ranks end by SIGTERM, or by themselves GRACE_SECONDS later. torch's own limits do not replace this: the
collectives that wait for rollouts have none, and a flight recorder does not name a rank that SIGSTOP has stopped. Leaves out a
rank that is alive but stuck: collectives and calls to replicas have limits of their own.

    heartbeat = Heartbeat(rank, world_size, limit_seconds=300)
    heartbeat.start()
    heartbeat.phase = "train, step 3"
    heartbeat.leave()      # at the very end of a run that is done; after a failure close(), before anything else ends
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psutil
from torch import distributed

from bridge.processes import host_identity

dist: Any = distributed  # its stores are not typed

NUM_WATCHED = 8  # ranks that each rank watches: rank 0 and the ones after its own
MAX_INTERVAL_SECONDS = 10.0
GRACE_SECONDS = 5.0  # for a main thread to begin to close; one that waits in a collective never does
CLOSE_SECONDS = 2.0
LEAVE_SECONDS = 0.1  # from one look at the others to the next, at the end
PREFIX = "megasync/heartbeat"
LEFT = "left"  # the phase of a rank that has ended


class LastSeen:
    """The time at which each rank's count last changed, by the watcher's own clock. Ranks that were never seen are not silent."""

    def __init__(self, ranks: Iterable[int], limit_seconds: float, now: float) -> None:
        self.limit_seconds, self._looked = limit_seconds, now
        self._counts: dict[int, float] = {}
        self._changed: dict[int, float | None] = dict.fromkeys(ranks)

    def look(self, counts: Mapping[int, float], now: float) -> list[int]:
        """The ranks that have been silent for too long, given the present counts.

        None where the watcher itself was held up: the others may have been, too.
        """
        was_held_up, self._looked = now - self._looked > self.limit_seconds / 2, now
        for rank, changed in self._changed.items():
            if (was_held_up and changed is not None) or counts.get(rank) != self._counts.get(rank):
                self._changed[rank] = now
        self._counts |= counts
        return [rank for rank, changed in self._changed.items() if changed is not None and now - changed > self.limit_seconds]

    def forget(self, rank: int) -> None:
        """It has left."""
        self._changed.pop(rank, None)

    @property
    def ranks(self) -> list[int]:
        return list(self._changed)


def watched_ranks(rank: int, world_size: int) -> list[int]:
    """The ranks that `rank` watches; each rank is watched by several."""
    after = [(rank + step) % world_size for step in range(1, min(NUM_WATCHED, world_size))]
    return sorted({0, *after} - {rank})


class Heartbeat:
    """One rank's heartbeat. Ranks find the store as torch.distributed does (MASTER_ADDR, MASTER_PORT); a single rank has none."""

    def __init__(self, rank: int, world_size: int, limit_seconds: float) -> None:
        self.rank, self.world_size, self.limit_seconds = rank, world_size, limit_seconds
        self.phase = "start"
        self._interval_seconds = min(limit_seconds / 10, MAX_INTERVAL_SECONDS)
        self._over, self._leaves, self._awake = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._guard = threading.Thread(target=self._watch_store, name="heartbeat-store", daemon=True)
        self._asked: float | None = None  # since when the store has owed an answer
        self._prefix = store_prefix()
        self._phases: dict[int, dict[str, Any]] = {}

    @staticmethod
    def of_process(limit_seconds: float) -> Heartbeat:
        """The heartbeat of the rank that this process is by its launcher."""
        return Heartbeat(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), limit_seconds)

    def start(self) -> None:
        if self.world_size > 1 and "MASTER_ADDR" in os.environ:
            self._thread.start()
            self._guard.start()

    def leave(self) -> None:
        """Say that this rank has ended, and watch the others until they have: nobody else would miss them."""
        self._leaves.set()
        self._awake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._over.set()

    def close(self) -> None:
        """Say that this rank leaves, and watch no longer. Safe to repeat."""
        self._over.set()
        self._awake.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        self._asked = time.monotonic()
        try:
            self._watch_ranks()
        except RuntimeError:  # the process that had the store has ended; once all is done it may
            if not (self._over.is_set() or self._leaves.is_set()):
                print(self._describe_store("is gone"), file=sys.stderr, flush=True)
                self._end()
        self._asked = None

    def _watch_ranks(self) -> None:
        """Until this rank is over, or is to end."""
        limit = timedelta(seconds=self.limit_seconds)
        store = dist.TCPStore(*store_address(), is_master=False, wait_for_workers=False, timeout=limit)
        seen, count = LastSeen(watched_ranks(self.rank, self.world_size), self.limit_seconds, time.monotonic()), 0
        while not self._over.is_set():
            self._asked, count = time.monotonic(), count + 1
            self._beat(store, count, LEFT if self._leaves.is_set() else self.phase)
            is_over = self._look(store, seen)
            self._asked = None
            if is_over:
                self._end()
                return
            if not self._leaves.is_set():
                self._awake.wait(self._interval_seconds)
            elif seen.ranks:
                self._over.wait(LEAVE_SECONDS)
            else:
                return
        self._beat(store, count + 1, LEFT)

    def _watch_store(self) -> None:
        """Its client never returns where the store's process is stopped (torch 2.13: check, and wait even with a timeout)."""
        seen, looks = LastSeen([0], self.limit_seconds, time.monotonic()), 0
        while not self._over.wait(self._interval_seconds):
            asked, looks = self._asked, looks + 1
            if seen.look({0: looks if asked is None else asked}, time.monotonic()):
                silent = f"no answer for {self.limit_seconds:g} s (run.hung_rank_timeout_seconds)"
                print(self._describe_store(silent), file=sys.stderr, flush=True)
                self._end()

    def _beat(self, store: Any, count: int, phase: str) -> None:
        fields = {"count": count, "phase": phase, "pid": os.getpid(), "process": process_identity(os.getpid())}
        store.set(f"{self._prefix}/{self.rank}", json.dumps(fields))

    def _look(self, store: Any, seen: LastSeen) -> bool:
        """Whether the run is to end: a rank is silent, or another rank has said so."""
        if store.check([f"{self._prefix}/verdict"]):
            return True
        counts = {}
        for rank in seen.ranks:
            key = f"{self._prefix}/{rank}"
            if store.check([key]):
                self._phases[rank] = fields = json.loads(store.get(key))
                counts[rank] = fields["count"]
                if fields["phase"] == LEFT:
                    seen.forget(rank)
        silent = seen.look(counts, time.monotonic())
        if silent:
            verdict = self._describe(silent)
            if store.compare_set(f"{self._prefix}/verdict", "", verdict).decode() == verdict:
                print(verdict, file=sys.stderr, flush=True)
            self._kill(silent)
        return bool(silent)

    def _describe(self, silent: list[int]) -> str:
        who = [f"rank {rank} ({self._phases[rank]['phase']})" for rank in silent]
        limit = f"{self.limit_seconds:g} s (run.hung_rank_timeout_seconds)"
        return f"{', '.join(who)}: no sign of life for {limit}, seen from rank {self.rank} ({self.phase}); the run ends"

    def _describe_store(self, what: str) -> str:
        address, port = store_address()
        phase = self.phase if self.rank == 0 else self._phases.get(0, {}).get("phase", "not there yet")
        where = f"the ranks' store at {address}:{port}, which rank 0 ({phase}) or the launcher has"
        return f"{where}: {what}, seen from rank {self.rank} ({self.phase}); the run ends"

    def _kill(self, silent: list[int]) -> None:
        for rank in silent:
            fields = self._phases[rank]
            with suppress(psutil.Error, ProcessLookupError, PermissionError):
                if fields["process"] == process_identity(fields["pid"]):
                    os.kill(fields["pid"], signal.SIGKILL)

    def _end(self) -> None:
        """This rank: its main thread may wait in a collective, where no signal reaches it."""
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._over.wait(GRACE_SECONDS):
            os._exit(1)


def store_prefix() -> str:
    """The prefix of this start of the ranks: the store of torchrun's agent outlives them, any other one is new at each start."""
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"{PREFIX}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if is_shared else '0'}"


def store_address() -> tuple[str, int]:
    """Host and port of torch.distributed's store, from the environment."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def process_identity(pid: int) -> str:
    """Identifies a process of a host among processes that can signal each other; psutil.NoSuchProcess where it is gone."""
    return f"{host_identity()} {pid} {psutil.Process(pid).create_time()}"
