"""A process group of one sender and its readers, beside torch.distributed's own: NCCL on CUDA devices, gloo on CPUs.

The sender is rank 0 and holds the store through which the members find each other. A member that aborts writes its reason there;
the others look while they wait, so that nobody waits for one who is gone. On CUDA a call that queues work can itself wait for a
broadcast whose other side is gone, for example where it loads a kernel for the first time; a thread looks too, and ends the
group. Leaves out the messages (nccl.py).
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from bridge.transport.protocol import TransportError
from bridge.transport.store import ABORT, SCHEME, STORE_TIMEOUT, abort_all, connect_store, open_store, own_address

dist: Any = distributed  # its stores and backends are not typed

POLL_SECONDS = 50e-6
STORE_SECONDS = 10e-3  # between two looks into the store
WATCH_SECONDS = 0.25  # between two looks of the thread
WATCH_MARGIN_SECONDS = 5.0  # after the deadline, which waiting calls see first
GROUP_TIMEOUT = timedelta(hours=12)  # NCCL's own watchdog would end the process; the sync's deadline comes first
GLOO_MARGIN_SECONDS = 5.0  # gloo's own limit comes after the sync's, which says who waits for what
MAX_UNDER_WAY = 8  # broadcasts: on CUDA a call waits where too much is queued, and nobody looks for aborts then
JOINED = "joined"


class Channel:
    """Broadcasts from rank 0.

    On CUDA everything is queued on `stream`; while all members are there nothing blocks but `meet`, `wait` and a broadcast after
    MAX_UNDER_WAY others.
    """

    def __init__(self, store: Any, rank: int, size: int, device: torch.device, name: str = "") -> None:
        """`name`: of one of several groups that find each other through one store."""
        self.rank, self.size, self.device = rank, size, device
        self.owner, self.others = "the sender", "members of the group"  # whose store it is, and who has to join, for messages
        self._store, self._name = store, name
        self._group: Any = None
        self._next_look = 0.0
        self._under_way: deque[Any] = deque(maxlen=MAX_UNDER_WAY)  # the last broadcasts, which may not be over
        self._deadline = math.inf  # of the last of them
        self._ended = ""  # why the thread ended the group: nothing that came is to be trusted
        self._closed = threading.Event()
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @staticmethod
    def listen(size: int, device: torch.device) -> tuple[Channel, str]:
        """The sender's side, and the endpoint that readers connect to."""
        address = own_address()
        store = open_store(address)
        return Channel(store, 0, size, device), f"{SCHEME}{address}:{store.port}"

    @staticmethod
    def connect(endpoint: str, rank: int, size: int, device: torch.device, deadline: float) -> Channel:
        """A reader's side. Raises TransportError when nobody listens there."""
        left = min(STORE_TIMEOUT, timedelta(seconds=max(1.0, deadline - time.monotonic())))
        try:
            store = connect_store(endpoint, left)
            store.set_timeout(STORE_TIMEOUT)
        except RuntimeError as error:
            raise TransportError(f"cannot reach the sender at {endpoint}: {_first_line(error)}") from None
        return Channel(store, rank, size, device)

    def beside(self, name: str, rank: int, size: int) -> Channel:
        """Another group, of other members, that shares the store, and so aborts."""
        other = Channel(self._store, rank, size, self.device, name)
        other.owner = self.owner
        return other

    def meet(self, deadline: float, check: Callable[[], None] = lambda: None) -> None:
        """Wait until all members are there and build the group; once."""
        if self._group is not None:
            return
        joined = f"{self._name}{JOINED}"
        self._store.add(joined, 1)
        self.poll(lambda: self._store.add(joined, 0) >= self.size, deadline, f"{self.others} to join", check)
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = GROUP_TIMEOUT
            options.is_high_priority_stream = True  # it gets cores before more blocks of the kernels that pack and load
            with torch.cuda.device(self.device):
                store = dist.PrefixStore(f"{self._name}nccl", self._store)
                self._group = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
            threading.Thread(target=self._watch, args=(self._group,), name="megasync-watch", daemon=True).start()
        else:
            left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
            self._group = dist.ProcessGroupGloo(dist.PrefixStore(f"{self._name}gloo", self._store), self.rank, self.size, left)

    def _watch(self, group: Any) -> None:
        """End `group` on an abort, and where a broadcast is not over long after its deadline: then all calls return.

        `_ended` is written first: a broadcast that is over because of this is not taken for one that arrived.
        """
        while not self._closed.wait(WATCH_SECONDS):
            reason = ""
            with suppress(RuntimeError):  # the sender has ended or is stopped: then the deadline decides
                reason = self._abort_reason()
            if reason := reason or self._late():
                self._ended = reason
                group.abort()
                return

    def _late(self) -> str:
        """Broadcasts that have ended are not queried again: a query would break a CUDA graph that another thread captures."""
        deadline = self._deadline
        if time.monotonic() < deadline + WATCH_MARGIN_SECONDS:
            return ""
        with suppress(IndexError):  # closed in between
            if not self._under_way[-1].query():
                return f"deadline passed: waits for {self.others}"
        if self._deadline == deadline:
            self._deadline = math.inf
        return ""

    def publish(self, key: str, value: bytes) -> None:
        """Publish a value for all processes that know the store."""
        self._store.set(key, value)

    def withdraw(self, key: str) -> None:
        self._store.delete_key(key)

    def wait_for(self, key: str, deadline: float, what: str, check: Callable[[], None] = lambda: None) -> bytes:
        """Wait for a published value. Raises TransportError as `poll` does."""
        self.poll(lambda: self._store.check([key]), deadline, what, check)
        return bytes(self._store.get(key))

    def broadcast(self, data: torch.Tensor, deadline: float, after: Any = None) -> Any:
        """Send or take `data` [n] uint8, on CUDA after the event `after`; what `order` and `wait` take.

        Raises:
            TransportError: on CUDA: as `wait` does.
        """
        assert self._group is not None
        options = dist.BroadcastOptions()
        options.rootRank = 0
        left = max(0.0, deadline - time.monotonic()) + GLOO_MARGIN_SECONDS
        options.timeout = timedelta(seconds=left) if self.stream is None else GROUP_TIMEOUT
        if self.stream is not None and len(self._under_way) == MAX_UNDER_WAY:
            self.wait(self._under_way[0], deadline, f"the broadcast {MAX_UNDER_WAY} before the next one")
        self._deadline = deadline
        with self.on_stream():
            if self.stream is not None and after is not None:
                self.stream.wait_event(after)
            try:
                done = self._group.broadcast([data], options)
            except RuntimeError:
                self._raise_if_ended()
                raise
            if self.stream is not None:
                done.wait()  # of the stream, not of this thread
                done = self.stream.record_event()
        self._under_way.append(done)
        return done

    def on_stream(self) -> Any:
        """The scope in which work is queued on `stream`."""
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def order(self, done: Any, deadline: float, what: str, check: Callable[[], None] = lambda: None) -> None:
        """Order later work on the current stream after the broadcast `done`. On CPUs this waits."""
        if done is not None and self.stream is not None:
            torch.cuda.current_stream(self.device).wait_event(done)
        elif done is not None:
            self.wait(done, deadline, what, check)

    def mark(self) -> Any:
        """An event after all that is queued on the current stream; None on CPUs, where it is done."""
        return torch.cuda.current_stream(self.device).record_event() if self.stream is not None else None

    def wait(self, done: Any, deadline: float, what: str, check: Callable[[], None] = lambda: None) -> None:
        """Until `done` is over: a broadcast, or on CUDA an event.

        Raises:
            TransportError: aborted by another member, over the deadline, or a member is gone.
        """
        if done is None:
            return
        self.poll(done.query if self.stream is not None else done.is_completed, deadline, what, check)
        if self.stream is None:
            try:
                done.wait()
            except RuntimeError as error:
                self.raise_if_aborted()
                raise TransportError(f"{what}: {_first_line(error)}") from None

    def poll(self, ready: Callable[[], bool], deadline: float, what: str, check: Callable[[], None]) -> None:
        """Until `ready`; raises TransportError on an abort and at the deadline, whatever `check` raises too."""
        while not ready():
            check()
            self.look()
            if time.monotonic() > deadline:
                raise TransportError(f"deadline passed: waits for {what}")
            time.sleep(POLL_SECONDS)
        self._raise_if_ended()

    def look(self) -> None:
        """`raise_if_aborted`, at most every STORE_SECONDS."""
        if time.monotonic() > self._next_look:
            self.raise_if_aborted()
            self._next_look = time.monotonic() + STORE_SECONDS

    def raise_if_aborted(self) -> None:
        try:
            reason = self._abort_reason()
        except RuntimeError as error:
            raise TransportError(f"{self.owner} is gone: {_first_line(error)}") from None
        if reason:
            raise TransportError(reason)

    def _abort_reason(self) -> str:
        """Empty where nobody has aborted."""
        return f"aborted: {self._store.get(ABORT).decode(errors='replace')}" if self._store.check([ABORT]) else ""

    def _raise_if_ended(self) -> None:
        if self._ended:
            raise TransportError(self._ended)

    def abort(self, reason: str) -> None:
        """Publish the reason, unless there is one already, and leave the group."""
        with suppress(RuntimeError):  # the sender has ended, and with it the store
            self._store.compare_set(ABORT, "", reason)
        self.close()

    def close(self) -> None:
        """Leave the group. What is under way in it ends: NCCL's kernels at once, gloo's calls soon after the sync's deadline."""
        group, self._group = self._group, None
        self._closed.set()
        if group is not None and self.stream is not None:
            group.abort()
        elif group is not None:
            threading.Thread(target=_leave, args=([group], list(self._under_way)), daemon=True).start()
        self._under_way.clear()


class Channels:
    """One to the sender of each stage. `reader`: the index of whose they are among the `num_readers` workers of all replicas."""

    def __init__(self, endpoints: Sequence[str], reader: int, num_readers: int, device: torch.device) -> None:
        self._endpoints, self._place, self._device = endpoints, (1 + reader, 1 + num_readers), device
        self._joined: dict[int, Channel] = {}  # by stage

    def join(self, stage: int, deadline: float) -> Channel:
        """Raises TransportError as `connect` and `meet` do."""
        if stage not in self._joined:
            self._joined[stage] = Channel.connect(self._endpoints[stage], *self._place, self._device, deadline)
        self._joined[stage].meet(deadline)
        return self._joined[stage]

    def abort(self, reason: str) -> None:
        """At all senders, also those whose group this reader has not joined."""
        joined = dict(self._joined)
        for channel in joined.values():
            channel.abort(reason)
        abort_all([endpoint for stage, endpoint in enumerate(self._endpoints) if stage not in joined], reason)

    def close(self) -> None:
        for channel in self._joined.values():
            channel.close()
        self._joined = {}


def _leave(group: list[Any], under_way: list[Any]) -> None:
    """Let a gloo group go once nothing is under way in it: its destructor waits for that with Python's lock held."""
    while not all(work.is_completed() for work in under_way):
        time.sleep(STORE_SECONDS)
    under_way.clear()
    group.clear()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
