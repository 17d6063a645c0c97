"""Rank 0's requests: each is logged before it is acknowledged, done once, and its result kept for whoever asks again.

The HTTP thread submits and waits, the main thread takes work and finishes it. Training requests are done in the order in which
they were accepted; a client sends the next once the former is acknowledged. `next_work` chooses between training and sampling.
Leaves out how they are read (calls.py) and executed (worker.py, sampling.py).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from megasync.config.service_section import ServiceConfig
from megasync.service.calls import SAMPLE, TRAINING, Call, Reader
from megasync.service.journal import Journal, Line
from megasync.service.wire import BadRequestError

Form = Literal["json", "protobuf", "error"]


class Result(NamedTuple):
    """The bytes of an answer. `error`: JSON with `error` and `category`, as the client's futures fail."""

    form: Form
    body: bytes


class TooBusyError(RuntimeError):
    """Too many requests wait; the client tries again."""


@dataclass(eq=False)
class Request:
    """One that was accepted."""

    name: str  # in futures
    call: Call
    digest: str  # of the body
    number: int  # of acceptance, among all
    order: int = -1  # among training requests
    result: Result | None = None
    waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = field(default_factory=list)

    def __reduce__(self) -> tuple[Any, ...]:
        """For the other ranks, which execute the call."""
        return Request, (self.name, self.call, self.digest, self.number, self.order)


class Work(NamedTuple):
    """What the main thread does next: a training request, samples of the version that the replicas have, or a sync to another."""

    kind: Literal["train", "sample", "sync", "end"]
    requests: Sequence[Request] = ()
    version: str = ""


class Desk:
    """All requests of a service. `done`: how many training requests the restored state holds."""

    def __init__(self, config: ServiceConfig, journal: Journal, reader: Reader, done: int) -> None:
        self._config, self._journal, self.reader = config, journal, reader
        self._changed = threading.Condition()
        self._requests: dict[str, Request] = {}
        self._by_place: dict[tuple[str, str], Request] = {}  # (scope, seq) and ("key", idempotency key)
        self._training: deque[Request] = deque()
        self._samples: list[Request] = []
        self._results: deque[Request] = deque()
        self._result_bytes = 0
        self._order, self._is_ended = 0, False
        self._restore(done)

    # ------------------------------------------------------------------------------------------------ of the HTTP thread

    def submit(self, kind: str, body: bytes, key: str) -> Request:
        """Accept a request, or return the one that it repeats.

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
            if len(self._training) + len(self._samples) >= self._config.max_waiting:
                raise TooBusyError(f"{self._config.max_waiting} requests wait (service.max_waiting)")
            name = f"{len(self._requests)}-{digest[:12]}"
            line = {"request": name, "kind": kind, "key": key, "body": base64.b64encode(body).decode()}
            self._journal.append(line)
            request = self._accept(name, call, digest, key)
            self._queue(request)
            self._changed.notify_all()
            return request

    async def wait(self, name: str, seconds: float) -> Result | None:
        """The result, or None where there is none after so many seconds. KeyError: there is no such request, or not any more."""
        event = asyncio.Event()
        with self._changed:
            request = self._requests[name]
            if request.result is not None:
                if not request.result.body:
                    raise KeyError(name)
                return request.result
            waiter = (asyncio.get_running_loop(), event)
            request.waiters.append(waiter)
        try:
            await asyncio.wait_for(event.wait(), seconds)
        except TimeoutError:
            request.waiters.remove(waiter)
        return request.result

    # ------------------------------------------------------------------------------------------------ of the main thread

    def next_work(self, present: str | None) -> Work:
        """Waits for it. `present`: the version that the replicas have.

        Samples of that version go first, since nothing waits for them. Of all else the oldest is first.
        """
        with self._changed:
            while True:
                if self._is_ended:
                    return Work("end")
                if own := [each for each in self._samples if each.call.version == present]:
                    self._samples = [each for each in self._samples if each.call.version != present]
                    return Work("sample", own)
                oldest = self._samples[0] if self._samples else None
                if self._training and (oldest is None or self._training[0].number < oldest.number):
                    return Work("train", [self._training.popleft()])
                if oldest is not None:
                    return Work("sync", version=oldest.call.version)
                self._changed.wait()

    def finish(self, request: Request, result: Result) -> str:
        """Keep the result and wake up whoever waits. Returns what is wrong where a repeated request had another result before."""
        with self._changed:
            if request.result is not None:
                is_same = request.result.body in (b"", result.body)
                return "" if is_same else f"request {request.name} ({request.call.kind}) had another result before the restart"
            if result.form != "error" or b'"server"' not in result.body:  # what failed here is tried again after a restart
                encoded = base64.b64encode(result.body).decode()
                self._journal.append({"result": request.name, "form": result.form, "body": encoded})
            self._keep(request, result)
            for loop, event in request.waiters:
                loop.call_soon_threadsafe(event.set)
            request.waiters.clear()
        return ""

    def take_samples(self, version: str) -> list[Request]:
        """The samples of a version that there cannot be; they do not wait any more."""
        with self._changed:
            found = [each for each in self._samples if each.call.version == version]
            self._samples = [each for each in self._samples if each.call.version != version]
            return found

    def end(self) -> None:
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------ inside

    def _accept(self, name: str, call: Call, digest: str, key: str) -> Request:
        request = Request(name, call, digest, len(self._requests))
        if call.kind in TRAINING:
            request.order, self._order = self._order, self._order + 1
        self._requests[name] = request
        if call.seq is not None:
            self._by_place[call.scope, str(call.seq)] = request
        if key:
            self._by_place["key", key] = request
        self.reader.accepted(call, name)
        return request

    def _queue(self, request: Request) -> None:
        if request.call.kind in TRAINING:
            self._training.append(request)
        elif request.call.kind == SAMPLE:
            self._samples.append(request)

    def _keep(self, request: Request, result: Result) -> None:
        """Of results beyond `service.max_result_bytes` the oldest lose their bytes."""
        request.result = result
        self._results.append(request)
        self._result_bytes += len(result.body)
        while self._result_bytes > self._config.max_result_bytes and len(self._results) > 1:
            oldest = self._results.popleft()
            assert oldest.result is not None
            self._result_bytes -= len(oldest.result.body)
            oldest.result = Result(oldest.result.form, b"")

    def _restore(self, done: int) -> None:
        """From the log: requests with their results. Those after the state's `done`, and samples without results, are to do."""
        for line in self._journal.lines:
            self._restore_line(line)
        for request in self._requests.values():
            if request.order >= done or (request.call.kind == SAMPLE and request.result is None):
                self._queue(request)
        self._journal.lines = []

    def _restore_line(self, line: Line) -> None:
        body = base64.b64decode(line["body"])
        if "request" in line:
            call = self.reader.read(line["kind"], body)
            self._accept(line["request"], call, hashlib.sha256(body).hexdigest(), line["key"])
        else:
            self._keep(self._requests[line["result"]], Result(line["form"], body))


def _same(former: Request, kind: str, digest: str) -> Request:
    if (former.call.kind, former.digest) != (kind, digest):
        place = f"seq_id {former.call.seq} of {former.call.scope}" if former.call.scope else "the idempotency key"
        raise BadRequestError(f"{place} was used for another request; two clients must not share an id")
    return former


def error(message: str, category: Literal["user", "server"]) -> Result:
    return Result("error", json.dumps({"error": message, "category": category}).encode())


def as_json(value: Any) -> Result:
    return Result("json", json.dumps(value).encode())
