"""Requests that come again, that nobody waits for any more, that fail or are bad: by the official clients and without.

Tests import them themselves: it takes two seconds, in each worker that collects this file.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from megasync.episodes.proxy import Access, Proxy
from megasync.episodes.segments import Turn
from tests.support.proxies import QUESTION, of_anthropic, of_openai, texts_of, through_proxy
from tests.support.samplers import Lines, model_of


def test_the_same_request_again_is_one_turn_until_it_is_followed_up() -> None:
    async def talk(access: Access) -> None:
        url, headers = f"{access.url}/v1/chat/completions", {"Authorization": f"Bearer {access.key}"}

        async def ask(messages: Any, **more: str) -> str:
            async with (
                aiohttp.ClientSession() as session,
                session.post(url, json={"messages": messages}, headers={**headers, **more}) as response,
            ):
                return str((await response.json())["choices"][0]["message"]["content"])

        assert [await ask(QUESTION), await ask(QUESTION)] == ["One", "One"]
        assert await ask(QUESTION, **{"x-stainless-retry-count": "1"}) == "One"
        assert await ask(QUESTION, **{"x-stainless-retry-count": "0"}) == "Two"  # the client says that it is no retry
        assert await asyncio.gather(*(ask([*QUESTION, {"role": "user", "content": "?"}]) for _ in range(3))) == ["Three"] * 3
        answered = [*QUESTION, {"role": "assistant", "content": "Two"}, {"role": "user", "content": "Sure?"}]
        assert await ask(answered) == "Four"
        assert await ask(QUESTION) == "Five"

    model = through_proxy(Lines("One", "Two", "Three", "Four", "Five"), talk)
    assert texts_of(model) == [f"{text}<|im_end|>" for text in ("One", "Two<|im_end|>Four", "Three", "Five")]


def test_a_client_that_goes_away_cancels_the_sampling() -> None:
    import openai

    sampler = Lines("", "", "Yes.")

    async def talk(access: Access) -> None:
        client = of_openai(access, timeout=2.0, max_retries=1)
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="any", messages=QUESTION)
        while sampler.num_cancelled < 2:
            await asyncio.sleep(0.01)
        completion = await of_openai(access).chat.completions.create(model="any", messages=QUESTION)
        assert completion.choices[0].message.content == "Yes."

    assert texts_of(through_proxy(sampler, talk)) == ["Yes.<|im_end|>"]


def test_of_samples_that_are_given_up_none_is_trained() -> None:
    """Nor are those that had ended before the others were cancelled, which no program got."""
    sampler = Lines("One", "", "Two", "Three")

    async def talk(access: Access) -> None:
        url, body = f"{access.openai_url}/chat/completions", {"messages": QUESTION, "n": 2}
        async with aiohttp.ClientSession() as session:
            with pytest.raises(TimeoutError):
                await session.post(url, json=body, timeout=aiohttp.ClientTimeout(total=0.5))
            while not sampler.num_cancelled:
                await asyncio.sleep(0.01)
            async with session.post(url, json=body) as response:
                choices = (await response.json())["choices"]
        assert [choice["message"]["content"] for choice in choices] == ["Two", "Three"]

    assert texts_of(through_proxy(sampler, talk)) == ["Two<|im_end|>", "Three<|im_end|>"]


def test_a_request_that_comes_again_while_it_is_being_cancelled_is_answered() -> None:
    class Slow(Lines):
        """Takes a moment to end."""

        async def __call__(self, *arguments: Any, **options: Any) -> Turn:
            try:
                return await super().__call__(*arguments, **options)
            except asyncio.CancelledError:
                await asyncio.sleep(0.5)
                raise

    sampler = Slow("", "Yes.")

    async def talk(access: Access) -> None:
        url = f"{access.openai_url}/chat/completions"
        async with aiohttp.ClientSession() as session:
            with pytest.raises(TimeoutError):
                await session.post(url, json={"messages": QUESTION}, timeout=aiohttp.ClientTimeout(total=0.5))
            while not sampler.num_cancelled:
                await asyncio.sleep(0.01)
            async with session.post(url, json={"messages": QUESTION}) as response:
                assert (await response.json())["choices"][0]["message"]["content"] == "Yes."

    assert texts_of(through_proxy(sampler, talk)) == ["Yes.<|im_end|>"]


def test_the_end_of_an_episode_cancels_what_it_waits_for() -> None:
    import openai

    sampler = Lines("")

    async def talk(access: Access) -> None:
        client = of_openai(access, max_retries=0)
        waiting.append(asyncio.create_task(client.chat.completions.create(model="any", messages=QUESTION)))
        while not sampler.prompts:
            await asyncio.sleep(0.01)

    waiting: list[asyncio.Task[Any]] = []

    async def run() -> None:
        proxy = await Proxy.start()
        with proxy.episode(model_of(sampler)) as access:
            await talk(access)
        with pytest.raises(openai.APIError):
            await waiting[0]
        with pytest.raises(openai.AuthenticationError, match="no episode has this key"):
            await of_openai(access).chat.completions.create(model="any", messages=QUESTION)
        await proxy.close()

    asyncio.run(run())
    assert sampler.num_cancelled == 1


def test_a_sampler_that_fails_is_reported_once() -> None:
    import anthropic
    import openai

    sampler = Lines()  # has nothing to say: IndexError

    async def talk(access: Access) -> None:
        with pytest.raises(openai.InternalServerError, match="IndexError: pop from empty"):
            await of_openai(access).chat.completions.create(model="any", messages=QUESTION)
        with pytest.raises(anthropic.InternalServerError, match="IndexError: pop from empty"):
            await of_anthropic(access).messages.create(model="any", max_tokens=5, messages=QUESTION)

    through_proxy(sampler, talk)
    assert len(sampler.prompts) == 2


CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
USER = {"role": "user", "content": "x"}
FORCED = {"type": "function", "function": {"name": "f"}}
BAD = [
    (CHAT, b"{", 400, "not JSON"),
    (CHAT, b"[]", 400, "not a JSON object"),
    (CHAT, b"[" * 100_000, 400, "not JSON"),
    (CHAT, {}, 400, "there are no messages"),
    (CHAT, {"messages": "x"}, 400, "messages: write a list of objects"),
    (CHAT, {"messages": ["x"]}, 400, "messages: write a list of objects"),
    (CHAT, {"messages": [{"content": "x"}]}, 400, "a message has no role"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "only text is taken"),
    (CHAT, {"messages": [USER], "n": 0}, 400, "n = 0: write a whole number from 1 to 128"),
    (CHAT, {"messages": [USER], "n": 1000}, 400, "from 1 to 128"),
    (CHAT, {"messages": [USER], "max_tokens": "9"}, 400, "max_tokens = '9'"),
    (CHAT, {"messages": [USER], "max_completion_tokens": -1}, 400, "max_completion_tokens = -1"),
    (CHAT, {"messages": [USER], "stop": [1]}, 400, "stop = [1]: write a text"),
    (CHAT, {"messages": [USER], "logprobs": True}, 400, "logprobs: the policy's server has no such thing"),
    (CHAT, {"messages": [USER], "response_format": {"type": "json_object"}}, 400, "response_format"),
    (CHAT, {"messages": [USER], "tools": [{"type": "function"}]}, 400, "a tool has no name"),
    (CHAT, {"messages": [USER], "tools": [{"function": "f"}], "tool_choice": FORCED}, 400, "function = 'f': write an object"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400, "no function with a name"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": 1}]}, 400, "tool_calls are of type int: write a list"),
    (MESSAGES, {"messages": [{"role": "tool", "content": "x"}]}, 400, "role is 'tool': write user or assistant"),
    (MESSAGES, {"messages": [USER], "tools": [{"type": "web_search_20250305", "name": "s"}]}, 400, "a server's own tool"),
    (MESSAGES, {"messages": [USER], "max_tokens": 0}, 400, "max_tokens = 0"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "only text is taken"),
    (MESSAGES, {"messages": [USER], "stop_sequences": 5}, 400, "stop_sequences = 5"),
    (MESSAGES, {"messages": [USER], "mcp_servers": [{}]}, 400, "mcp_servers"),
    ("/v1/responses", {"input": "x"}, 404, "POST /v1/responses: is not served"),
]


def test_bad_requests_are_refused_by_name() -> None:
    async def talk(access: Access) -> None:
        async with aiohttp.ClientSession(headers={"x-api-key": access.key}) as session:
            for path, body, status, said in BAD:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                async with session.post(access.url + path, data=data) as response:
                    error = (await response.json())["error"]
                    assert (response.status, response.headers["x-should-retry"]) == (status, "false"), body
                    assert said in error["message"], (body, error)
            async with session.get(f"{access.url}/v1/models") as response:
                assert (await response.json())["data"][0]["id"] == "policy"
        async with aiohttp.ClientSession() as session, session.post(access.url + MESSAGES, json={"messages": [USER]}) as response:
            assert (response.status, (await response.json())["error"]["type"]) == (401, "authentication_error")

    assert texts_of(through_proxy(Lines(), talk)) == []
