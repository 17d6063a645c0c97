"""Rank 0's requests: each is logged before it is acknowledged, done once, and its result kept for later requests.

The HTTP thread submits and waits, the main thread takes work from `queue` and finishes it. In memory a request is about a
kilobyte: its body and its result are read from the log. Leaves out which request is next (work_queue.py), how requests are read
(calls.py) and executed (worker.py, sampling.py).
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import threading
from collections.abc import Iterable, Sequence

from megasync.config.service_section import ServiceConfig
from megasync.service.bodies import BadRequestError
from megasync.service.calls import DELETE, SAMPLE, TRAINING, Call, Reader
from megasync.service.journal import Journal, Line, Place
from megasync.service.requests import Form, Request, Result
from megasync.service.work_queue import WAIT_SECONDS, WorkQueue


class TooBusyError(RuntimeError):
    """Too many requests wait; the client tries again."""


class Desk:
    """All requests of a service."""

    def __init__(
        self,
        config: ServiceConfig,
        journal: Journal,
        reader: Reader,
        done: int,
        num_slots: int = 1,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """`done`: how many training requests the restored state holds; `num_slots`, `wait_seconds`: see WorkQueue."""
        self._max_waiting, self._journal, self.reader = config.max_waiting, journal, reader
        self.queue = WorkQueue(config, num_slots, self._with_arguments, wait_seconds)
        self._lock = threading.Lock()
        self._requests: dict[str, Request] = {}
        self._by_place: dict[tuple[str, str], Request] = {}  # (scope, seq), or ("key", idempotency key) where there is no seq
        self._last_seq: dict[str, int] = {}  # of each training client
        self._order = 0
        self._restore(done)

    # ------------------------------------------------------------------------------------------------ of the HTTP thread

    def submit(self, kind: str, body: bytes, key: str) -> Request:
        """Accept a request, or return the one that it repeats. Its client may be answered after `sync`.

        Raises:
            BadRequestError: it cannot be done; nothing was accepted.
            TooBusyError: as many wait as may.
        """
        digest = hashlib.sha256(body).hexdigest()
        with self._lock:
            if (former := self._by_place.get(("key", key)) if key else None) is not None:
                return _same(former, kind, digest)
            call = self.reader.read(kind, body)
            if call.seq is not None and (former := self._by_place.get((call.scope, str(call.seq)))) is not None:
                return _same(former, kind, digest)
            self._check_place(call)
            if len(self.queue) >= self._max_waiting:
                raise TooBusyError(f"{self._max_waiting} requests wait (service.max_waiting)")
            name = f"{len(self._requests)}-{digest[:12]}"
            line = {"request": name, "kind": kind, "key": key, "body": base64.b64encode(body).decode()}
            request = self._accept(name, call, digest, key, self._journal.append(line))
            self.queue.add(request)
            return request

    def sync(self, request: Request) -> None:
        """Wait until the request is on the disk. OSError: it cannot be; the service ends."""
        try:
            self._journal.sync(request.place)
        except OSError as failure:
            self.queue.fail(failure)
            raise

    async def wait(self, name: str, seconds: float) -> bool:
        """Whether there is a result after so many seconds. KeyError: there is no such request."""
        event = asyncio.Event()
        with self._lock:
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
                with self._lock:
                    request.waiters = [each for each in request.waiters if each is not waiter]
        return request.result is not None

    def result(self, name: str) -> tuple[Form, int, Iterable[bytes]]:
        """The result that `wait` has waited for: its form, its number of bytes, and its pieces from the log."""
        result = self._requests[name].result
        assert result is not None
        if isinstance(result, Result):
            return result.form, len(result.body), [result.body]
        line, num_bytes, pieces = self._journal.body(result)
        return line["form"], num_bytes, pieces

    def scope(self, name: str) -> str:
        """The client of a request. KeyError: there is no such request."""
        return self._requests[name].call.scope

    # ------------------------------------------------------------------------------------------------ of the main thread

    def finish_all(self, done: Sequence[tuple[Request, Result]]) -> list[str]:
        """Keep the results and wake up their waiters. Returns messages where repeated requests had other results before."""
        problems, kept = list[str](), list[tuple[Request, Place | Result]]()
        with self._lock:
            for request, result in done:
                self.queue.done(request)
                request.call = dataclasses.replace(request.call, arguments={})
                if (former := self._result(request)) is None:
                    kept.append((request, result if result.is_server_error else self._log(request, result)))
                elif former != result:
                    problems.append(f"request {request.name} had another result before the restart")
        if places := [each for _, each in kept if isinstance(each, Place)]:
            self._journal.sync(places[-1])
        with self._lock:
            for request, each in kept:
                request.result = each
                for loop, event in request.waiters:
                    loop.call_soon_threadsafe(event.set)
                request.waiters = []
        return problems

    # ------------------------------------------------------------------------------------------------ inside

    def _check_place(self, call: Call) -> None:
        """BadRequestError for a training request out of its client's order or session, and for weights that samples need."""
        session = call.scope.partition(":")[0]
        if call.kind in TRAINING and session in self.reader.finished:
            raise BadRequestError(
                f"session_id = {session!r}: it is finished, by its client or after silence (service.silent_seconds), and its "
                "models are gone; create another session, and load saved weights there"
            )
        last = self._last_seq.get(call.scope, -1)
        if call.kind in TRAINING and call.seq is not None and call.seq < last:
            raise BadRequestError(f"seq_id = {call.seq}: {call.scope} has sent {last} before; a client's requests come in order")
        if call.kind == DELETE and self.queue.is_used(call.version):
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

    def _with_arguments(self, request: Request) -> Request:
        line = self._journal.read(request.place)
        arguments = self.reader.read(line["kind"], base64.b64decode(line["body"])).arguments
        request.call = dataclasses.replace(request.call, arguments=arguments)
        return request

    def _log(self, request: Request, result: Result) -> Place:
        encoded = base64.b64encode(result.body).decode()
        return self._journal.append({"result": request.name, "form": result.form, "body": encoded})

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
                self.queue.add(request)

    def _restore_line(self, place: Place, line: Line) -> None:
        if "request" in line:
            body = base64.b64decode(line["body"])
            call = self.reader.read(line["kind"], body)
            self._accept(line["request"], call, hashlib.sha256(body).hexdigest(), line["key"], place)
        else:
            self._requests[line["result"]].result = place


def _same(former: Request, kind: str, digest: str) -> Request:
    if (former.call.kind, former.digest) != (kind, digest):
        place = f"seq_id {former.call.seq} of {former.call.scope}" if former.call.scope else "the idempotency key"
        raise BadRequestError(f"{place} was used for another request; two clients must not share an id")
    return former
