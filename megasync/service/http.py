"""The HTTP server of rank 0: an aiohttp application in a thread of its own. It submits to the desk and waits there.

Leaves out what a request means (calls.py), lists and downloads (queries.py). Routes are those that Tinker's client calls; those
of its hosted service alone, such as billing, get an answer that says so.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress

from aiohttp import web

from megasync.config.service_section import ServiceConfig
from megasync.service.bodies import BadRequestError, GetInfo, Heartbeat, LoadWeights, RetrieveFuture, WeightsInfo, parse
from megasync.service.calls import BASE, CREATING, DELETE, FINISH, OF_MODELS, SAMPLE, SAVES
from megasync.service.catalog import Catalog, Found
from megasync.service.desk import Desk, TooBusyError
from megasync.service.queries import CHECKPOINT, PREFIX, SIGNED, Queries, found_or, path_of_route, problem
from megasync.service.requests import Form, Request, Result, error
from megasync.service.usage import Usage
from megasync.service.wire import PROTOBUF

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CLIENT_CONFIG = {"parallel_fwdbwd_chunks": False, "proto_compress_fwdbwd": False, "use_pyqwest_transport": True}
MOVE_SECONDS = 120.0  # for a body to arrive, or a result to be read
CLOSE_SECONDS = 1.0
TOO_LARGE = 413
STATUS: dict[type[Exception], int] = {
    BadRequestError: 422,
    TooBusyError: 429,
    TimeoutError: 408,
    web.HTTPRequestEntityTooLarge: TOO_LARGE,
}
JSON_BYTES = 2**20  # of a body that is no protobuf, beside its tokens
TOKEN_BYTES = 16  # of a token in JSON


class Server:
    """`key`: the key that clients must send; empty: any."""

    def __init__(self, config: ServiceConfig, desk: Desk, catalog: Catalog, usage: Usage, key: str, max_tokens: int) -> None:
        self._config, self._desk, self._catalog, self._key = config, desk, catalog, key
        self._usage, self._max_tokens = usage, max_tokens
        self._queries = Queries(catalog, desk.reader)
        self._failed: dict[str, Result] = {}  # requests that were never accepted
        self._arriving_bytes = 0
        self._start_seconds = time.monotonic()
        self._heard_seconds: dict[str, float] = {}  # when a session's client sent something, since this server runs
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)

    def start(self, host: str, port: int) -> int:
        """Listen; returns the port. OSError where that is taken."""
        self._thread.start()
        started: Future[int] = asyncio.run_coroutine_threadsafe(self._start(host, port), self._loop)
        return started.result()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(5.0 * CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _start(self, host: str, port: int) -> int:
        app = web.Application(client_max_size=self._config.max_body_bytes, middlewares=[self._guard])
        app.add_routes([web.post(f"{PREFIX}/{kind}", self._submit) for kind in (*OF_MODELS, *SAVES, SAMPLE)])
        app.add_routes(
            [
                web.post(f"{PREFIX}/create_session", self._create_session),
                web.post(f"{PREFIX}/create_sampling_session", self._create_sampling_session),
                web.post(f"{PREFIX}/sessions/{{name}}/finish", self._finish_session),
                web.post(f"{PREFIX}/retrieve_future", self._retrieve),
                web.post(f"{PREFIX}/get_info", self._get_info),
                web.post(f"{PREFIX}/weights_info", self._weights_info),
                web.get(f"{PREFIX}/samplers/{{name}}", self._sampler),
                web.get(f"{PREFIX}/get_server_capabilities", self._capabilities),
                *self._queries.routes(),
                web.delete(CHECKPOINT, self._delete),
                web.put(f"{CHECKPOINT}/ttl", _always({})),  # saved weights stay until they are deleted
                web.post(f"{PREFIX}/client/config", _always(CLIENT_CONFIG)),
                web.post(f"{PREFIX}/client/dynamic_config", _always({})),
                web.post(f"{PREFIX}/session_heartbeat", self._heartbeat),
                web.post(f"{PREFIX}/telemetry", _always({"status": "accepted"})),
                web.get(f"{PREFIX}/healthz", _always({"status": "ok"})),
                web.get("/usage", self._report),
                web.get("/", self._page),
                web.route("*", "/{tail:.*}", self._not_here),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_SECONDS)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        return int(self._runner.addresses[0][1])

    # ------------------------------------------------------------------------------------------------ for all routes

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The key, and errors as answers with a `detail`. Pages in a browser get none: no client of ours sends an Origin."""
        if "Origin" in request.headers:
            return problem(403, "requests of web pages are not answered")
        sent = request.headers.get("X-API-Key", "") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        is_signed = request.match_info.route.name == SIGNED
        if self._key and not is_signed and not hmac.compare_digest(sent.encode(), self._key.encode()):
            return problem(401, "wrong key: TINKER_API_KEY must be the server's MEGASYNC_API_KEY")
        try:
            return await handler(request)
        except tuple(STATUS) as refused:
            too_large = f"the body is larger than {self._config.max_body_bytes} bytes (service.max_body_bytes)"
            status = STATUS[type(refused)]
            return problem(status, too_large if status == TOO_LARGE else str(refused) or f"it took over {MOVE_SECONDS:g} s")

    async def _body(self, request: web.Request) -> bytes:
        """Its memory is reserved before it arrives; a body of unknown length may be as large as any."""
        length = request.content_length
        most = self._config.max_body_bytes
        reserved = most if length is None else min(length, most)
        if self._arriving_bytes and self._arriving_bytes + reserved > self._config.max_arriving_bytes:
            raise TooBusyError(f"{self._arriving_bytes} bytes of other bodies arrive (service.max_arriving_bytes)")
        self._arriving_bytes += reserved
        try:
            body = await asyncio.wait_for(request.read(), MOVE_SECONDS)
        finally:
            self._arriving_bytes -= reserved
        if request.path.rpartition("/")[2] != "forward_backward" and len(body) > JSON_BYTES + TOKEN_BYTES * self._max_tokens:
            raise BadRequestError(f"the body has {len(body)} bytes of JSON: {JSON_BYTES} are possible beside tokens")
        return body

    async def _not_here(self, request: web.Request) -> web.StreamResponse:
        return problem(404, f"{request.method} {request.path}: not here; this is `megasync serve`, not the hosted service")

    # ------------------------------------------------------------------------------------------------ requests and futures

    async def _submit(self, request: web.Request) -> web.StreamResponse:
        """Accept a request; one that cannot be done becomes a failed future, and the client continues with its next request."""
        kind = request.path.rpartition("/")[2]
        if request.headers.get("Content-Encoding", "identity") != "identity":
            return problem(415, f"Content-Encoding = {request.headers['Content-Encoding']}: bodies are not compressed here")
        try:
            body = await self._body(request)
            if kind in CREATING and (kind == "create_model" or parse(LoadWeights, body).session_id):
                self._make_room()
            accepted = await self._accept(kind, body, request)
        except BadRequestError as refused:
            return web.json_response({"request_id": self._fail(str(refused))})
        self._hear(accepted.call.scope)
        answer: Found = {"request_id": accepted.name}
        if kind == SAMPLE:  # the client wants the id of each sequence at once
            answer["sample_sequence_ids"] = [f"{accepted.name}/{index}" for index in range(accepted.call.count)]
        if kind in CREATING:
            answer["model_id"] = accepted.call.scope
        return web.json_response(answer)

    async def _accept(self, kind: str, body: bytes, request: web.Request | None = None) -> Request:
        """Like Desk.submit, and on the disk when it returns. `request`: read for its idempotency key."""
        key = "" if request is None else request.headers.get("x-idempotency-key", "")
        accepted = self._desk.submit(kind, body, key)
        await self._loop.run_in_executor(None, self._desk.sync, accepted)
        return accepted

    def _make_room(self) -> None:
        """At the limit of models, end the sessions of silent clients: a client that was killed cannot end its own."""
        models = {*self._catalog.specs()} | self._desk.queue.models_to_come()
        if len(models) < self._config.num_models:
            return
        since = time.monotonic() - self._config.silent_seconds
        for session in {model.partition(":")[0] for model in models}:
            if self._heard_seconds.get(session, self._start_seconds) < since:
                self._desk.submit(FINISH, json.dumps({"session_id": session}).encode(), "")

    def _hear(self, scope: str) -> None:
        self._heard_seconds[scope.partition(":")[0]] = time.monotonic()

    async def _heartbeat(self, request: web.Request) -> web.StreamResponse:
        session = parse(Heartbeat, await self._body(request)).session_id
        if session in self._desk.reader.sessions:
            self._heard_seconds[session] = time.monotonic()
        return web.json_response({"type": "session_heartbeat"})

    def _fail(self, text: str) -> str:
        name = f"failed-{uuid.uuid4()}"
        self._failed[name] = error(text, "user")
        if len(self._failed) > self._config.max_waiting:
            del self._failed[next(iter(self._failed))]
        return name

    async def _retrieve(self, request: web.Request) -> web.StreamResponse:
        name = parse(RetrieveFuture, await self._body(request)).request_id
        if (failed := self._failed.get(name)) is not None:
            return web.Response(body=failed.body, content_type="application/json")
        try:
            is_done = await self._desk.wait(name, self._config.poll_seconds)
            self._hear(self._desk.scope(name))
        except KeyError:
            return problem(410, f"request_id = {name[:100]!r}: there is no such request")
        if not is_done:
            return web.json_response({"type": "try_again", "request_id": name, "queue_state": "active"}, status=408)
        return await _sent(request, *self._desk.result(name))

    async def _create_session(self, request: web.Request) -> web.StreamResponse:
        accepted = await self._accept("create_session", await self._body(request), request)
        return web.json_response({"type": "create_session", "session_id": accepted.name})

    async def _create_sampling_session(self, request: web.Request) -> web.StreamResponse:
        call = (await self._accept("create_sampling_session", await self._body(request), request)).call
        return web.json_response({"type": "create_sampling_session", "sampling_session_id": f"{call.scope}:{call.seq}"})

    async def _finish_session(self, request: web.Request) -> web.StreamResponse:
        """Its models leave memory behind all that was asked before."""
        await self._body(request)  # why it ended: nobody reads it
        await self._accept(FINISH, json.dumps({"session_id": request.match_info["name"]}).encode())
        return web.json_response({})

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        path = path_of_route(request)
        if self._catalog.weights(path) is None:
            return problem(404, f"{path}: there are no such weights")
        accepted = await self._accept(DELETE, json.dumps({"path": path}).encode(), request)
        while not await self._desk.wait(accepted.name, self._config.poll_seconds):
            pass
        return web.Response(status=204)

    # ------------------------------------------------------------------------------------------------ queries

    async def _get_info(self, request: web.Request) -> web.StreamResponse:
        model = parse(GetInfo, await self._body(request)).model_id
        return found_or(self._catalog.model(model), f"model_id = {model[:100]!r}: there is no such model")

    async def _weights_info(self, request: web.Request) -> web.StreamResponse:
        path = parse(WeightsInfo, await self._body(request)).tinker_path
        return found_or(self._catalog.weights(path), f"tinker_path = {path!r}: there are no such weights")

    async def _report(self, _: web.Request) -> web.StreamResponse:
        return web.json_response(self._usage.report())

    async def _page(self, _: web.Request) -> web.StreamResponse:
        return web.Response(text=self._usage.page(self._catalog.specs()), content_type="text/html")

    async def _sampler(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        version = self._desk.reader.samplers.get(name)
        if version is None:
            return problem(404, f"sampler {name!r}: there is no such session")
        found = {"sampler_id": name, "base_model": self._desk.reader.base_models[0]}
        return web.json_response(found if version == BASE else {**found, "model_path": version})

    async def _capabilities(self, request: web.Request) -> web.StreamResponse:
        model = {"model_name": self._desk.reader.base_models[0], "max_context_length": self._max_tokens}
        return web.json_response({"supported_models": [{**model, "trainable": True, "sampleable": True}]})


async def _sent(request: web.Request, form: Form, num_bytes: int, pieces: Iterable[bytes]) -> web.StreamResponse:
    """A client that does not read holds one piece in memory. TimeoutError: it reads too slowly."""
    response = web.StreamResponse()
    response.content_type = PROTOBUF if form == "protobuf" else "application/json"
    response.content_length = num_bytes
    with suppress(ConnectionResetError):  # the client is gone, and will ask again if it wants to know
        async with asyncio.timeout(MOVE_SECONDS):
            await response.prepare(request)
            for piece in pieces:
                await response.write(piece)
            await response.write_eof()
    return response


def _always(answer: Found) -> Handler:
    async def handle(_: web.Request) -> web.StreamResponse:
        return web.json_response(answer)

    return handle
