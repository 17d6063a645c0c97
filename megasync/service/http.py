"""The HTTP server of rank 0: an aiohttp application in a thread of its own. It submits to the desk and waits there.

Leaves out what a request means (calls.py). Routes are those that Tinker's client calls; those of its hosted service alone, such
as billing, get an answer that says so.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import threading
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from aiohttp import web

from megasync.config.service_section import ServiceConfig
from megasync.service.calls import BASE, SAMPLE, TRAINING
from megasync.service.desk import Desk, Result, TooBusyError, error
from megasync.service.wire import PROTOBUF, BadRequestError, GetInfo, RetrieveFuture, WeightsInfo, parse

PREFIX = "/api/v1"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Info = Callable[[str], dict[str, Any] | None]
CLIENT_CONFIG = {"parallel_fwdbwd_chunks": False, "proto_compress_fwdbwd": False, "use_pyqwest_transport": False}


class Server:
    """`key`: what clients must send; empty: anything. `info`: of a model by its id, or of saved weights by their path."""

    def __init__(self, config: ServiceConfig, desk: Desk, key: str, info: Info, max_tokens: int) -> None:
        self._config, self._desk, self._key, self._info = config, desk, key, info
        self._max_tokens = max_tokens
        self._failed: dict[str, Result] = {}  # requests that were never accepted
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)

    def start(self, host: str, port: int) -> int:
        """Listen; returns the port. OSError where that is taken."""
        self._thread.start()
        started: Future[int] = asyncio.run_coroutine_threadsafe(self._start(host, port), self._loop)
        return started.result()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _start(self, host: str, port: int) -> int:
        app = web.Application(client_max_size=self._config.max_body_bytes, middlewares=[self._guard])
        app.add_routes([web.post(f"{PREFIX}/{kind}", self._submit) for kind in (*TRAINING, SAMPLE)])
        app.add_routes(
            [
                web.post(f"{PREFIX}/create_session", self._create_session),
                web.post(f"{PREFIX}/create_sampling_session", self._create_sampling_session),
                web.post(f"{PREFIX}/retrieve_future", self._retrieve),
                web.post(f"{PREFIX}/get_info", self._get_info),
                web.post(f"{PREFIX}/weights_info", self._weights_info),
                web.get(f"{PREFIX}/samplers/{{name}}", self._sampler),
                web.get(f"{PREFIX}/get_server_capabilities", self._capabilities),
                web.post(f"{PREFIX}/client/config", _always(CLIENT_CONFIG)),
                web.post(f"{PREFIX}/client/dynamic_config", _always({})),
                web.post(f"{PREFIX}/session_heartbeat", _always({"type": "session_heartbeat"})),
                web.post(f"{PREFIX}/sessions/{{name}}/finish", _always({})),
                web.post(f"{PREFIX}/telemetry", _always({"status": "accepted"})),
                web.get(f"{PREFIX}/healthz", _always({"status": "ok"})),
                web.route("*", "/{tail:.*}", self._not_here),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        return int(self._runner.addresses[0][1])

    # ------------------------------------------------------------------------------------------------ for all routes

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The key, and errors as answers with a `detail`."""
        sent = request.headers.get("X-API-Key", "") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self._key and not hmac.compare_digest(sent.encode(), self._key.encode()):
            return _problem(401, "wrong key: TINKER_API_KEY must be the server's MEGASYNC_API_KEY")
        try:
            return await handler(request)
        except BadRequestError as problem:
            return _problem(422, str(problem))
        except TooBusyError as problem:
            return _problem(429, str(problem))
        except web.HTTPRequestEntityTooLarge:
            return _problem(413, f"the body is larger than {self._config.max_body_bytes} bytes (service.max_body_bytes)")

    async def _not_here(self, request: web.Request) -> web.StreamResponse:
        return _problem(404, f"{request.method} {request.path}: not here; this is `megasync serve`, not the hosted service")

    # ------------------------------------------------------------------------------------------------ requests and futures

    async def _submit(self, request: web.Request) -> web.StreamResponse:
        """What cannot be done is a future that has failed: the client goes on with its next request."""
        kind, body = request.path.rpartition("/")[2], await request.read()
        if request.headers.get("Content-Encoding", "identity") != "identity":
            return _problem(415, f"Content-Encoding = {request.headers['Content-Encoding']}: bodies are not compressed here")
        try:
            accepted = self._desk.submit(kind, body, request.headers.get("x-idempotency-key", ""))
        except BadRequestError as problem:
            return web.json_response({"request_id": self._fail(str(problem))} | _sequence_ids(kind, "failed", body))
        answer = {"request_id": accepted.name} | _sequence_ids(kind, accepted.name, body)
        if kind in ("create_model", "load_weights"):
            answer["model_id"] = accepted.call.arguments["model"]
        return web.json_response(answer)

    def _fail(self, problem: str) -> str:
        name = f"failed-{uuid.uuid4()}"
        self._failed[name] = error(problem, "user")
        if len(self._failed) > self._config.max_waiting:
            del self._failed[next(iter(self._failed))]
        return name

    async def _retrieve(self, request: web.Request) -> web.StreamResponse:
        name = parse(RetrieveFuture, await request.read()).request_id
        try:
            result = self._failed.get(name) or await self._desk.wait(name, self._config.poll_seconds)
        except KeyError:
            return _problem(410, f"request_id = {name!r}: there is no such request, or its result was dropped")
        if result is None:
            return web.json_response({"type": "try_again", "request_id": name, "queue_state": "active"}, status=408)
        return web.Response(body=result.body, content_type=PROTOBUF if result.form == "protobuf" else "application/json")

    async def _create_session(self, request: web.Request) -> web.StreamResponse:
        accepted = self._desk.submit("create_session", await request.read(), request.headers.get("x-idempotency-key", ""))
        return web.json_response({"type": "create_session", "session_id": accepted.name})

    async def _create_sampling_session(self, request: web.Request) -> web.StreamResponse:
        key = request.headers.get("x-idempotency-key", "")
        call = self._desk.submit("create_sampling_session", await request.read(), key).call
        return web.json_response({"type": "create_sampling_session", "sampling_session_id": f"{call.scope}:{call.seq}"})

    # ------------------------------------------------------------------------------------------------ queries

    async def _get_info(self, request: web.Request) -> web.StreamResponse:
        model = parse(GetInfo, await request.read()).model_id
        info = self._info(model)
        return _problem(404, f"model_id = {model!r}: there is no such model") if info is None else web.json_response(info)

    async def _weights_info(self, request: web.Request) -> web.StreamResponse:
        path = parse(WeightsInfo, await request.read()).tinker_path
        info = self._info(path)
        return _problem(404, f"tinker_path = {path!r}: there are no such weights") if info is None else web.json_response(info)

    async def _sampler(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        version = self._desk.reader.samplers.get(name)
        if version is None:
            return _problem(404, f"sampler {name!r}: there is no such session")
        found = {"sampler_id": name, "base_model": self._desk.reader.base_models[0]}
        return web.json_response(found if version == BASE else {**found, "model_path": version})

    async def _capabilities(self, request: web.Request) -> web.StreamResponse:
        model = {"model_name": self._desk.reader.base_models[0], "max_context_length": self._max_tokens}
        return web.json_response({"supported_models": [{**model, "trainable": True, "sampleable": True}]})


def _always(answer: dict[str, Any]) -> Handler:
    async def handle(_: web.Request) -> web.StreamResponse:
        return web.json_response(answer)

    return handle


def _problem(status: int, detail: str) -> web.Response:
    return web.json_response({"detail": detail}, status=status)


def _sequence_ids(kind: str, name: str, body: bytes) -> dict[str, Any]:
    """A sampling client wants the id of each sequence at once."""
    if kind != SAMPLE:
        return {}
    try:
        count = int(json.loads(body).get("num_samples", 1))
    except (ValueError, TypeError, AttributeError):
        count = 1
    return {"sample_sequence_ids": [f"{name}/{index}" for index in range(min(max(count, 1), 4096))]}
