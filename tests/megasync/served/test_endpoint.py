"""An endpoint over real connections: what fails is sent again, to another URL where one answers; what is refused is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from bridge.generation import Sampling
from megasync.checks.endpoint import check_endpoint
from megasync.config.errors import ConfigError
from megasync.config.load import load_config
from megasync.data.tokenizer import load_tokenizer
from megasync.launch.ray_cluster import free_port
from megasync.served.endpoint import Endpoint, EndpointSettings, scores_of, urls_of
from megasync.served.protocol import CALLS, FAILURES, RETRIES, LostError, RefusedError

Answer = Callable[[dict[str, Any], int], Any]
KEY = "teacher.endpoint"


def places_of(ids: list[int], top_k: int) -> list[dict[str, Any] | None]:
    """In vLLM's form: the token itself at rank 50, behind the tokens 1000, 1001, ... ."""
    top = {str(1000 + rank): {"logprob": -rank / 8, "rank": rank} for rank in range(1, top_k + 1)}
    return [None, *({str(token): {"logprob": -float(token), "rank": 50}, **top} for token in ids[1:])]


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    """The URL of a server that gives `answer(body, number of the request)`: JSON, a status, or None to cut the connection."""
    number = iter(range(10**6))

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "tiny"}]})
        body = await request.json()
        assert body["model"] == "tiny"
        found = answer(body, next(number))
        if isinstance(found, int):
            return web.Response(status=found, text="out of order")
        if found is None:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response(found)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner, port = web.AppRunner(app), free_port()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        await runner.cleanup()


def scored(body: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"prompt_logprobs": places_of(body["prompt"], body["prompt_logprobs"])}]}


def through(urls: tuple[str, ...], use: Callable[[Endpoint], Awaitable[Any]], **settings: Any) -> Awaitable[Any]:
    async def run() -> Any:
        endpoint = Endpoint(EndpointSettings(KEY, urls, **settings))
        try:
            return await use(endpoint), dict(endpoint.counts)
        finally:
            await endpoint.close()

    return run()


def test_lost_requests_are_sent_again() -> None:
    """A server that is overloaded, cuts a connection and fails, beside a URL where there is none; every sequence comes back."""
    sequences = [[7, 8, 9], [7, 3], [5]]

    async def run() -> Any:
        broken: list[Any] = [503, None, 500, 429]
        async with serving(lambda body, number: broken[number] if number < len(broken) else scored(body)) as url:
            dead = f"http://127.0.0.1:{free_port()}/v1"
            return await through((dead, url), lambda endpoint: endpoint.prompt_log_probs(sequences, 2), patience_seconds=30.0)

    found, counts = asyncio.run(run())
    assert [one.log_probs.tolist() for one in found] == [[-8.0, -9.0], [-3.0], []]
    assert found[0].top_ids.tolist() == [[1001, 1002]] * 2
    assert found[0].top_log_probs.tolist() == [[-0.125, -0.25]] * 2
    assert found[2].top_ids.shape == (0, 2)
    assert counts[CALLS] == 3 and counts[RETRIES] >= 4 and not counts.get(FAILURES)  # the models' list and two sequences


@pytest.mark.parametrize(
    ("context", "limit", "is_right"),
    [(33, "max_model_len=32", True), (32, "max_model_len=32", False), (20, "max_model_len=32", False),
     (None, "max_model_len=32", True), (10, "max_new_tokens=8", True), (9, "max_new_tokens=8", False)],
)  # fmt: skip
def test_a_teacher_has_room_for_the_longest_sample_and_a_token(
    runnable: Path, context: int | None, limit: str, is_right: bool
) -> None:
    tokenizer, _ = load_tokenizer(runnable.parent / "model")

    def answer(body: dict[str, Any], _: int) -> dict[str, Any]:
        if isinstance(body["prompt"], list):
            return scored(body)
        return {"tokens": tokenizer.encode(body["prompt"], add_special_tokens=False), "max_model_len": context}

    async def check() -> None:
        async with serving(answer) as url:
            given = [f"teacher.endpoint={url}", "rollout.max_new_tokens=8", f"rollout.{limit}"]
            await asyncio.to_thread(check_endpoint, load_config(runnable, given))

    if is_right:
        asyncio.run(check())
        return
    with pytest.raises(ConfigError) as error:
        asyncio.run(check())
    assert context is not None and error.value.key == KEY and "--max-model-len" in error.value.remedy
    has_room = context - 1 > 8  # for a prompt before the new tokens
    assert (f"rollout.max_model_len={context - 1}" in error.value.remedy) == has_room


@pytest.mark.parametrize("size", [127, 128])
def test_a_teacher_has_the_policys_tokens(runnable: Path, size: int) -> None:
    """All of its 128, also those that stand for no text: the policy may sample them, and vLLM would refuse the sample."""
    tokenizer, _ = load_tokenizer(runnable.parent / "model")

    def answer(body: dict[str, Any], _: int) -> Any:
        if isinstance(body["prompt"], list):
            return scored(body) if max(body["prompt"]) < size else 400
        return {"tokens": tokenizer.encode(body["prompt"], add_special_tokens=False), "max_model_len": 4096}

    async def check() -> None:
        async with serving(answer) as url:
            await asyncio.to_thread(check_endpoint, load_config(runnable, [f"teacher.endpoint={url}"]))

    with nullcontext() if size == 128 else pytest.raises(ConfigError) as error:
        asyncio.run(check())
    assert error is None or (error.value.key == KEY and "vocab_size = 128" in error.value.remedy)


def test_a_chat_has_its_sampling() -> None:
    seen: list[dict[str, Any]] = []

    def answer(body: dict[str, Any], _: int) -> Any:
        seen.append(body)
        return {"choices": [{"message": {"content": "9/10"}}]}

    async def run() -> Any:
        sampling = Sampling(max_new_tokens=16, temperature=0.5, top_k=3)
        async with serving(answer) as url:
            messages = [{"role": "user", "content": "?"}]
            return await through((url,), lambda endpoint: endpoint.chat(messages, sampling, seed=4))

    assert asyncio.run(run())[0] == "9/10"
    assert (seen[0]["max_tokens"], seen[0]["temperature"], seen[0]["top_k"], seen[0]["seed"]) == (16, 0.5, 3, 4)


@pytest.mark.parametrize(
    ("answer", "error", "most"),
    [(400, RefusedError, 1), ({"choices": [{}]}, RefusedError, 1), (500, LostError, 99), (None, LostError, 99)],
)
def test_no_answer_is_an_error_with_the_key(answer: Any, error: type[Exception], most: int) -> None:
    """What would be refused again is asked once."""
    asked: list[int] = []

    async def run() -> None:
        async with serving(lambda _, number: (asked.append(number), answer)[1]) as url:
            with pytest.raises(error, match=f"{KEY} = {url}: "):
                await through((url,), lambda endpoint: endpoint.prompt_log_probs([[1, 2]], 0), patience_seconds=1.0)

    asyncio.run(run())
    assert 1 <= len(asked) <= most


@given(st.lists(st.integers(0, 90), min_size=2, max_size=9), st.integers(0, 5))
def test_scores_of_any_places(ids: list[int], top_k: int) -> None:
    found = scores_of([place for place in places_of(ids, top_k) if place is not None], ids[1:], top_k)
    assert found.log_probs.tolist() == [-float(token) for token in ids[1:]]
    assert found.top_ids.shape == found.top_log_probs.shape == (len(ids) - 1, top_k)
    kept = found.behind(2)
    assert np.array_equal(kept.log_probs, found.log_probs[1:])
    with pytest.raises(LookupError):
        scores_of([{"1": {"logprob": 0.0, "rank": 1}}], [2], 0)


def test_several_urls() -> None:
    assert urls_of("http://a:1/v1, http://b:2/v1/") == ("http://a:1/v1", "http://b:2/v1")
