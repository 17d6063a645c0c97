"""Rank 0's requests: each is logged before it is acknowledged, done once, and its result kept for whoever asks again.

The HTTP thread submits and waits, the main thread takes work and finishes it. Training requests are done in the order in which
they were accepted, which is each client's own. `next_work` chooses between training and sampling. In memory a request is about a
kilobyte: its body and its result are read from the log. Leaves out how they are read (calls.py) and executed (worker.py,
sampling.py).
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import json
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from megasync.config.service_section import ServiceConfig
from megasync.service.bodies import BadRequestError
from megasync.service.calls import CREATING, DELETE, MOVABLE, SAMPLE, TRAINING, Call, Reader
from megasync.service.journal import Journal, Line, Place

Form = Literal["json", "protobuf", "error"]


class Result(NamedTuple):
    """The bytes of an answer. `error`: JSON with `error` and `category`, as the client's futures fail."""

    form: Form
    body: bytes


class TooBusyError(RuntimeError):
    """Too many requests wait; the client tries again."""


@dataclass(eq=False)
class Request:
    """One that was accepted. `call` has arguments only while it is executed."""

    name: str  # in futures
    call: Call
    digest: str  # of the body
    number: int  # of acceptance, among all
    place: Place  # in the log
    order: int = -1  # among training requests
    result: Place | Result | None = None  # in the log; in memory what failed here, which is tried again after a restart
    num_failures: int = 0
    waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = field(default_factory=list)

    def __reduce__(self) -> tuple[Any, ...]:
        """For the other ranks, which execute the call."""
        return Request, (self.name, self.call, self.digest, self.number, self.place, self.order)


class Work(NamedTuple):
    """What the main thread does next: a training request or passes that are done together, samples of versions that the replicas
    have, or a sync of another one.

    `slot`: of the version that the sync replaces.
    """

    kind: Literal["train", "sample", "sync", "end"]
    requests: Sequence[Request] = ()
    version: str = ""
    slot: int = 0


class Desk:
    """All requests of a service."""

    def __init__(self, config: ServiceConfig, journal: Journal, reader: Reader, done: int, num_slots: int = 1) -> None:
        """`done`: how many training requests the restored state holds; `num_slots`: for versions, in the replicas."""
        self._config, self._journal, self.reader, self._num_slots = config, journal, reader, num_slots
        self._changed = threading.Condition()
        self._requests: dict[str, Request] = {}
        self._by_place: dict[tuple[str, str], Request] = {}  # (scope, seq), or ("key", idempotency key) where there is no seq
        self._last_seq: dict[str, int] = {}  # of each training client
        self._training: deque[Request] = deque()
        self._samples: list[Request] = []
        self._in_flight: set[Request] = set()  # samples that replicas work on
        self._sampled: dict[str, None] = {}  # versions, the one that was sampled most recently last
        self._order, self._is_ended = 0, False
        self._failure: BaseException | None = None  # of a thread beside the main one
        self._restore(done)

    # ------------------------------------------------------------------------------------------------ of the HTTP thread

    def submit(self, kind: str, body: bytes, key: str) -> Request:
        """Accept a request, or return the one that it repeats. Its client may be answered after `sync`.

        Raises:
            BadRequestError: it cannot be done; nothing was accepted.
            TooBusyError: as many wait as may.
        """
        digest = hashlib.sha256(body).hexdigest()
        with self._changed:
            if (former := self._by_place.get(("key", key)) if key else None) is not None:
                return _same(former, kind, digest)
            call = self.reader.read(kind, body)
            if call.seq is not None and (former := self._by_place.get((call.scope, str(call.seq)))) is not None:
                return _same(former, kind, digest)
            self._check_place(call)
            if len(self._training) + len(self._samples) + len(self._in_flight) >= self._config.max_waiting:
                raise TooBusyError(f"{self._config.max_waiting} requests wait (service.max_waiting)")
            name = f"{len(self._requests)}-{digest[:12]}"
            line = {"request": name, "kind": kind, "key": key, "body": base64.b64encode(body).decode()}
            request = self._accept(name, call, digest, key, self._journal.append(line))
            self._queue(request)
            self._changed.notify_all()
            return request

    def sync(self, request: Request) -> None:
        """Wait until the request is on the disk. OSError: it cannot be; the service ends."""
        try:
            self._journal.sync(request.place)
        except OSError as failure:
            self.fail(failure)
            raise

    async def wait(self, name: str, seconds: float) -> bool:
        """Whether there is a result after so many seconds. KeyError: there is no such request."""
        event = asyncio.Event()
        with self._changed:
            request = self._requests[name]
            waiter = (asyncio.get_running_loop(), event)
            if request.result is None:
                request.waiters.append(waiter)
        if request.result is None:
            try:
                await asyncio.wait_for(event.wait(), seconds)
            except TimeoutError:
                pass
            finally:
                with self._changed:
                    request.waiters = [each for each in request.waiters if each is not waiter]
        return request.result is not None

    def result(self, name: str) -> tuple[Form, int, Iterable[bytes]]:
        """What `wait` has waited for: its form, its bytes, and these piece by piece out of the log."""
        result = self._requests[name].result
        assert result is not None
        if isinstance(result, Result):
            return result.form, len(result.body), [result.body]
        line, num_bytes, pieces = self._journal.body(result)
        return line["form"], num_bytes, pieces

    def scope(self, name: str) -> str:
        """The client of a request. KeyError: there is no such request."""
        return self._requests[name].call.scope

    def models_to_come(self) -> set[str]:
        """Names of the models whose creation is still queued."""
        with self._changed:
            return {each.call.scope for each in self._training if each.call.kind in CREATING}

    def num_open(self) -> tuple[Counter[str], Counter[str]]:
        """Requests that wait, and samples that replicas work on, by session."""
        with self._changed:
            waiting, in_flight = [*self._training, *self._samples], list(self._in_flight)
        sessions = ([each.call.scope.partition(":")[0] or "none" for each in some] for some in (waiting, in_flight))
        return Counter(next(sessions)), Counter(next(sessions))

    def is_used(self, version: str) -> bool:
        """Whether samples of this version wait or run."""
        with self._changed:
            return any(each.call.version == version for each in (*self._samples, *self._in_flight))

    # ------------------------------------------------------------------------------------------------ of the main thread

    def next_work(self, present: Mapping[str, int]) -> Work:
        """Waits for it. `present`: the versions that the replicas have, with their slots.

        Samples of those go first, since nothing waits for them. Of all else the oldest is first.
        """
        with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                if self._is_ended:
                    return Work("end")
                if own := [each for each in self._samples if each.call.version in present]:
                    self._samples = [each for each in self._samples if each.call.version not in present]
                    self._in_flight |= set(own)
                    for version in dict.fromkeys(each.call.version for each in own):
                        self._sampled.pop(version, None)
                        self._sampled[version] = None
                    return Work("sample", [self._with_arguments(each) for each in own])
                oldest = min(self._samples, key=lambda each: each.number, default=None)
                if self._training and (oldest is None or self._training[0].number < oldest.number):
                    return Work("train", self._take_training())
                if oldest is not None:
                    return Work("sync", version=oldest.call.version, slot=self._slot_to_fill(present))
                self._changed.wait()

    def finish(self, request: Request, result: Result) -> str:
        """`finish_all` of one."""
        return "".join(self.finish_all([(request, result)]))

    def finish_all(self, done: Sequence[tuple[Request, Result]]) -> list[str]:
        """Keep the results and wake up their waiters. Returns messages where repeated requests had other results before."""
        problems, kept = list[str](), list[tuple[Request, Place | Result]]()
        with self._changed:
            for request, result in done:
                self._in_flight.discard(request)
                request.call = dataclasses.replace(request.call, arguments={})
                if (former := self._result(request)) is None:
                    kept.append((request, result if is_ours(result) else self._log(request, result)))
                elif former != result:
                    problems.append(f"request {request.name} had another result before the restart")
        if places := [each for _, each in kept if isinstance(each, Place)]:
            self._journal.sync(places[-1])
        with self._changed:
            for request, each in kept:
                request.result = each
                for loop, event in request.waiters:
                    loop.call_soon_threadsafe(event.set)
                request.waiters = []
        return problems

    def _log(self, request: Request, result: Result) -> Place:
        encoded = base64.b64encode(result.body).decode()
        return self._journal.append({"result": request.name, "form": result.form, "body": encoded})

    def give_back(self, request: Request) -> None:
        """A sample that a replica did not finish waits again."""
        with self._changed:
            self._in_flight.discard(request)
            request.num_failures += 1
            self._samples.append(request)
            self._changed.notify_all()

    def take_samples(self, version: str) -> list[Request]:
        """The samples of a version that there cannot be; they do not wait any more."""
        with self._changed:
            found = [each for each in self._samples if each.call.version == version]
            self._samples = [each for each in self._samples if each.call.version != version]
            return found

    def fail(self, failure: BaseException) -> None:
        """`next_work` raises it."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------ inside

    def _take_training(self) -> list[Request]:
        """The oldest request and, where it is a pass with gradients, those of other clients that may be done at the same time.

        A client's own come in order. So that a checkpoint holds the first requests and no others, none is taken from behind the
        next place of one, or of a request that may cause one.
        """
        first = self._with_arguments(self._training.popleft())
        taken, every = [first], self._config.checkpoint_every
        if not _is_pass(first):
            return taken
        before = {first.call.scope}
        for request in list(self._training):
            is_behind = every and request.order // every > first.order // every
            if is_behind or request.call.kind not in MOVABLE or len(taken) >= self._config.shared_clients:
                break
            if request.call.kind == "forward_backward" and request.call.scope not in before:
                if _is_pass(self._with_arguments(request)):
                    taken.append(request)
                    self._training.remove(request)
                else:
                    request.call = dataclasses.replace(request.call, arguments={})
            before.add(request.call.scope)
        return taken

    def _slot_to_fill(self, present: Mapping[str, int]) -> int:
        """An empty one, or that of the version which was sampled least recently; one without running samples if possible."""
        held = {slot: version for version, slot in present.items()}
        running, order = {each.call.version for each in self._in_flight}, [*self._sampled]

        def last_use(slot: int) -> tuple[bool, int]:
            version = held.get(slot)
            return version in running, order.index(version) if version in order else -1

        return min(range(self._num_slots), key=last_use)

    def _check_place(self, call: Call) -> None:
        """BadRequestError for a training request out of its client's order, and for weights that samples need."""
        last = self._last_seq.get(call.scope, -1)
        if call.kind in TRAINING and call.seq is not None and call.seq < last:
            raise BadRequestError(f"seq_id = {call.seq}: {call.scope} has sent {last} before; a client's requests come in order")
        if call.kind == DELETE and self.is_used(call.version):
            raise BadRequestError(f"path = {call.version!r}: samples of it wait or run; delete it after them")

    def _accept(self, name: str, call: Call, digest: str, key: str, place: Place) -> Request:
        self.reader.accepted(call, name)
        request = Request(name, dataclasses.replace(call, arguments={}), digest, len(self._requests), place)
        if call.kind in TRAINING:
            request.order, self._order = self._order, self._order + 1
        self._requests[name] = request
        if call.seq is not None:
            self._by_place[call.scope, str(call.seq)] = request
            if call.kind in TRAINING:
                self._last_seq[call.scope] = call.seq
        elif key:
            self._by_place["key", key] = request
        return request

    def _queue(self, request: Request) -> None:
        if request.call.kind in TRAINING:
            self._training.append(request)
        elif request.call.kind == SAMPLE:
            self._samples.append(request)

    def _with_arguments(self, request: Request) -> Request:
        line = self._journal.read(request.place)
        arguments = self.reader.read(line["kind"], base64.b64decode(line["body"])).arguments
        request.call = dataclasses.replace(request.call, arguments=arguments)
        return request

    def _result(self, request: Request) -> Result | None:
        if not isinstance(request.result, Place):
            return request.result
        line = self._journal.read(request.result)
        return Result(line["form"], base64.b64decode(line["body"]))

    def _restore(self, done: int) -> None:
        """From the log: requests with their results. Those after the state's `done`, and samples without results, are to do."""
        for place, line in self._journal.replay():
            self._restore_line(place, line)
        for request in self._requests.values():
            if request.order >= done or (request.call.kind == SAMPLE and request.result is None):
                self._queue(request)

    def _restore_line(self, place: Place, line: Line) -> None:
        if "request" in line:
            body = base64.b64decode(line["body"])
            call = self.reader.read(line["kind"], body)
            self._accept(line["request"], call, hashlib.sha256(body).hexdigest(), line["key"], place)
        else:
            self._requests[line["result"]].result = place


def _is_pass(request: Request) -> bool:
    return request.call.kind == "forward_backward" and bool(request.call.arguments["has_gradients"])


def _same(former: Request, kind: str, digest: str) -> Request:
    if (former.call.kind, former.digest) != (kind, digest):
        place = f"seq_id {former.call.seq} of {former.call.scope}" if former.call.scope else "the idempotency key"
        raise BadRequestError(f"{place} was used for another request; two clients must not share an id")
    return former


def error(message: str, category: Literal["user", "server"]) -> Result:
    return Result("error", json.dumps({"error": message, "category": category}).encode())


def is_ours(result: Result) -> bool:
    """Whether it is an error of the server, and no result."""
    return result.form == "error" and json.loads(result.body)["category"] == "server"


def as_json(value: Any) -> Result:
    return Result("json", json.dumps(value).encode())
