"""An HTTP server on the loopback that speaks OpenAI's and Anthropic's protocols: any program that does becomes an episode.

A request says by its key whose episode it is of: in `Authorization: Bearer KEY`, in `x-api-key: KEY`, or as the first part of the
path. Token ids stay inside. A client that is gone cancels its sampling; the same request sent again is answered by the same turn
until it has been followed up. Leaves out how tokens are drawn (the run says it) and streaming token by token.

    proxy = await Proxy.start()
    with proxy.episode(model) as access:
        openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.key)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from megasync.episodes import anthropic_form, openai_form
from megasync.episodes.chat import Model, Reply
from megasync.episodes.messages import MessageError
from megasync.episodes.task import EpisodeLimitError
from megasync.episodes.upstream_requests import Asked, Form

LOG = logging.getLogger(__name__)
MAX_BODY_BYTES = 64 << 20
ROUTES: dict[str, Form] = {"/v1/chat/completions": openai_form, "/v1/messages": anthropic_form}
RETRY_HEADER = "x-stainless-retry-count"  # of both official clients
WITHOUT_EFFECT = "x-megasync-without-effect"  # names fields of the request that are the run's and not the program's
NO_RETRY = {"x-should-retry": "false"}  # which they read


@dataclass(slots=True)
class Access:
    """The address of an episode's model for programs."""

    url: str
    key: str
    limit: str = ""  # for which the last request was refused; empty if it was not

    @property
    def openai_url(self) -> str:
        """OpenAI's clients append /chat/completions."""
        return f"{self.url}/{self.key}/v1"

    @property
    def anthropic_url(self) -> str:
        """Anthropic's append /v1/messages."""
        return f"{self.url}/{self.key}"

    def environment(self) -> dict[str, str]:
        """Variables that both official clients, and most programs built on them, read."""
        names = {"OPENAI_BASE_URL": self.openai_url, "OPENAI_API_BASE": self.openai_url, "OPENAI_API_KEY": self.key}
        return {**names, "ANTHROPIC_BASE_URL": self.anthropic_url, "ANTHROPIC_API_KEY": self.key}


@dataclass(slots=True, eq=False)
class _Call:
    """One turn, or n of them: a task, and who waits for it."""

    task: asyncio.Task[list[Reply]]
    history: bytes
    num_waiting: int = 0
    is_delivered: bool = False


@dataclass(slots=True, eq=False)
class _Episode:
    model: Model
    access: Access
    calls: dict[bytes, _Call] = field(default_factory=dict)  # the last of each request
    followed_up: set[bytes] = field(default_factory=set)

    def call(self, asked: Asked, retry: str | None) -> _Call:
        """A new call, or the one that this request retries."""
        histories, key = asked.histories(), asked.key()
        self.followed_up.update(histories[:-1])
        found = self.calls.get(key)
        if found and found.history not in self.followed_up and _is_retry(found, retry):
            return found
        made = _Call(asyncio.create_task(_sample(self.model, asked)), histories[-1] if histories else b"")
        made.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may be left to wait for it
        self.calls[key] = made
        return made


class Proxy:
    """Made by `start`, ended by `close`. One serves all episodes of a process."""

    def __init__(self) -> None:
        self._episodes: dict[str, _Episode] = {}
        self._runner = web.AppRunner(self._application(), handler_cancellation=True, access_log=None)
        self.url = ""

    @classmethod
    async def start(cls) -> Proxy:
        """On a free port of 127.0.0.1."""
        proxy = cls()
        await proxy._runner.setup()
        site = web.TCPSite(proxy._runner, "127.0.0.1", 0)
        await site.start()
        proxy.url = "http://127.0.0.1:{1}".format(*proxy._runner.addresses[0])
        return proxy

    async def close(self) -> None:
        for key in list(self._episodes):
            self._end(key)
        await self._runner.cleanup()

    @contextlib.contextmanager
    def episode(self, model: Model) -> Iterator[Access]:
        """Requests with this key are the model's. At the end pending ones are cancelled, and the key becomes unknown."""
        key = f"ep-{secrets.token_urlsafe(24)}"
        access = Access(self.url, key)
        self._episodes[key] = _Episode(model, access)
        try:
            yield access
        finally:
            self._end(key)

    def _end(self, key: str) -> None:
        for call in self._episodes.pop(key).calls.values():
            call.task.cancel()

    # ------------------------------------------------------------------------------------------------ HTTP

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        for prefix in ("", "/{key}"):
            for path in ROUTES:
                application.router.add_post(prefix + path, self._answer)
            application.router.add_post(f"{prefix}/v1/messages/count_tokens", self._count)
            application.router.add_get(f"{prefix}/v1/models", self._models)
        application.router.add_route("*", "/{rest:.*}", self._unknown)
        return application

    def _found(self, request: web.Request) -> _Episode | None:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        given = (request.match_info.get("key"), request.headers.get("x-api-key"), bearer)
        return next((self._episodes[key] for key in given if key and key in self._episodes), None)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        form = ROUTES["/v1/" + request.path.partition("/v1/")[2]]
        episode = self._found(request)
        if episode is None:
            return _error(form, 401, "no episode has this key, or it has ended: give the key of the episode that runs you")
        try:
            asked = form.read(await _body(request))
            call = episode.call(asked, request.headers.get(RETRY_HEADER))
            replies = await _wait(call)
            episode.access.limit = ""
        except ValueError as error:  # a MessageError, or what the sampler has to say of the request
            episode.access.limit = str(error) if isinstance(error, EpisodeLimitError) else ""
            return _error(form, 400, str(error))
        except Exception as error:
            LOG.exception("an episode's request failed")
            return _error(form, 500, f"{type(error).__name__}: {error}")
        response = await (_streamed(request, form, asked, replies) if asked.stream else _whole(request, form, asked, replies))
        call.is_delivered = True
        return response

    async def _count(self, request: web.Request) -> web.Response:
        episode = self._found(request)
        if episode is None:
            return _error(anthropic_form, 401, "no episode has this key, or it has ended")
        try:
            asked = anthropic_form.read(await _body(request))
            options: dict[str, Any] = {"continue_final_message": asked.continues, "chat_template_kwargs": asked.template}
            return web.json_response({"input_tokens": episode.model.num_prompt_tokens(asked.messages, asked.tools, **options)})
        except MessageError as error:
            return _error(anthropic_form, 400, str(error))

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": "policy",
            "object": "model",
            "type": "model",
            "created": 0,
            "owned_by": "megasync",
            "display_name": "policy",
        }
        return web.json_response({"object": "list", "data": [model], "has_more": False})

    async def _unknown(self, request: web.Request) -> web.Response:
        paths = ", ".join(ROUTES)
        return _error(openai_form, 404, f"{request.method} {request.path}: is not served; POST {paths}")


# ---------------------------------------------------------------------------------------------------- inside


def _is_retry(call: _Call, retry: str | None) -> bool:
    """The official clients number their retries. A request with number 0 is new, unless the former answer never reached them."""
    if call.task.cancelling() or (call.task.done() and (call.task.cancelled() or call.task.exception())):
        return False
    if retry is None or retry != "0":
        return True
    return call.task.done() and not call.is_delivered


async def _sample(model: Model, asked: Asked) -> list[Reply]:
    options: dict[str, Any] = {"max_tokens": asked.max_tokens, "stop": asked.stop, "keeps_stop": False}
    options |= {"continue_final_message": asked.continues, "chat_template_kwargs": asked.template}
    return await model.replies(asked.messages, asked.tools, num_samples=asked.num_samples, **options)


async def _wait(call: _Call) -> list[Reply]:
    """A cancelled one cancels the sampling unless another waits for it too."""
    call.num_waiting += 1
    try:
        return await asyncio.shield(call.task)
    finally:
        call.num_waiting -= 1
        if not call.num_waiting and not call.task.done():
            call.task.cancel()


async def _body(request: web.Request) -> Mapping[str, Any]:
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise MessageError(f"the request's body is not JSON: {error}") from error
    if not isinstance(body, Mapping):
        raise MessageError("the request's body is not a JSON object")
    return body


def _headers(asked: Asked) -> dict[str, str]:
    return {WITHOUT_EFFECT: ", ".join(asked.without_effect)} if asked.without_effect else {}


async def _whole(request: web.Request, form: Form, asked: Asked, replies: list[Reply]) -> web.StreamResponse:
    response = web.json_response(form.whole(asked, replies), headers=_headers(asked))
    await response.prepare(request)
    await response.write_eof()
    return response


async def _streamed(request: web.Request, form: Form, asked: Asked, replies: list[Reply]) -> web.StreamResponse:
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **_headers(asked)}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    for event in form.events(asked, replies):
        await response.write(event.encode())
    await response.write_eof()
    return response


def _error(form: Form, status: int, message: str) -> web.Response:
    return web.json_response(form.error(status, message), status=status, headers=NO_RETRY)
