"""The official clients, unchanged, against the proxy: what they get, and whose episode it is.

Tests import them themselves: it takes two seconds, in each worker that collects this file.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from megasync.episodes.chat import Model
from megasync.episodes.proxy import Access, Proxy
from tests.support.proxies import QUESTION, of_anthropic, of_openai, texts_of, through_proxy
from tests.support.samplers import Lines, model_of

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OPENAI_TOOLS: Any = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}]
ANTHROPIC_TOOLS: Any = [{"name": "add", "description": "Adds.", "input_schema": PARAMETERS}]
CALL = '<think>\nHm.\n</think>\n\nLet me see.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_a_reply_ends_before_the_text_that_stopped_it() -> None:
    """As the protocols have it; what was sampled is trained whole, and goes on where the client sends it back."""
    lines = [f"Thought: {number}\nObservation:" for number in range(3)]
    sampler, options = Lines(*lines, "12"), {"model": "any", "max_tokens": 90}

    async def talk(access: Access) -> None:
        client, messages = of_openai(access), list(QUESTION)
        choice = (await client.chat.completions.create(messages=messages, stop=["Obs", "Observation:"], **options)).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Thought: 0\n", "stop")
        messages += [choice.message, {"role": "user", "content": "2"}]
        other, texts = of_anthropic(access), ["\nObservation:"]
        messages = [{"role": one["role"], "content": one["content"]} for one in map(dict, messages)]
        message = await other.messages.create(messages=messages, stop_sequences=texts, **options)
        assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("Thought: 1", "stop_sequence", texts[0])
        messages += [{"role": "assistant", "content": "Thought: 1"}, {"role": "user", "content": "3"}]
        async with other.messages.stream(messages=messages, stop_sequences=texts, **options) as events:
            streamed = await events.get_final_message()
        assert (streamed.content[0].text, streamed.stop_reason) == ("Thought: 2", "stop_sequence")
        messages += [{"role": "assistant", "content": "Thought: 2"}, {"role": "user", "content": "4"}]
        message = await other.messages.create(messages=messages, stop_sequences=texts, **options)
        assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("12", "end_turn", None)

    (text,) = texts_of(through_proxy(sampler, talk))
    assert text == "<|im_end|>".join([*lines, "12", ""])


@pytest.mark.parametrize("stream", [False, True])
def test_openai_client_calls_a_tool(stream: bool) -> None:
    sampler = Lines(CALL, "It is 2.")

    async def talk(access: Access) -> None:
        client = of_openai(access)
        messages = list(QUESTION)
        if stream:
            chunks = await client.chat.completions.create(
                model="any",
                messages=messages,
                tools=OPENAI_TOOLS,
                tool_choice="required",
                stream=True,
                stream_options={"include_usage": True},
            )
            content, calls, reason, usage = "", [], None, None
            async for chunk in chunks:
                usage = chunk.usage
                for choice in chunk.choices:
                    content += choice.delta.content or ""
                    calls += choice.delta.tool_calls or []
                    reason = choice.finish_reason or reason
            message: Any = {"role": "assistant", "content": content, "tool_calls": [call.model_dump() for call in calls]}
        else:
            completion = await client.chat.completions.create(model="any", messages=messages, tools=OPENAI_TOOLS, max_tokens=90)
            choice = completion.choices[0]
            message, calls, content = choice.message, choice.message.tool_calls or [], choice.message.content  # type: ignore[attr-defined]
            reason, usage = choice.finish_reason, completion.usage
            assert message.reasoning == "Hm."
        assert (content, reason) == ("Let me see.", "tool_calls")
        assert usage is not None and usage.prompt_tokens == len(sampler.prompts[0])
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert (calls[0].function.name, json.loads(calls[0].function.arguments)) == ("add", {"a": 1})
        messages += [message, {"role": "tool", "tool_call_id": calls[0].id, "content": "2"}]
        completion = await client.chat.completions.create(model="any", messages=messages, tools=OPENAI_TOOLS)
        assert completion.choices[0].message.content == "It is 2."

    model = through_proxy(sampler, talk)
    assert texts_of(model) == [f"{CALL}<|im_end|>It is 2.<|im_end|>"]
    assert sampler.options[0][0] == (None if stream else 90)


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_client_calls_a_tool(stream: bool) -> None:
    sampler = Lines(CALL, "It is 2.")

    async def talk(access: Access) -> None:
        client = of_anthropic(access)
        options: Any = {"model": "any", "max_tokens": 90, "tools": ANTHROPIC_TOOLS, "system": "Be brief."}
        messages = list(QUESTION)
        if stream:
            async with client.messages.stream(**options, messages=messages) as events:
                message = await events.get_final_message()
        else:
            message = await client.messages.create(**options, messages=messages)
        text, call = message.content
        assert (text.text, call.name, call.input) == ("Let me see.", "add", {"a": 1})
        assert (message.stop_reason, message.usage.input_tokens) == ("tool_use", len(sampler.prompts[0]))
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "2"}]}
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        counted = await client.messages.count_tokens(model="any", messages=messages, tools=ANTHROPIC_TOOLS, system="Be brief.")
        message = await client.messages.create(**options, messages=messages)
        assert (message.content[0].text, message.stop_reason) == ("It is 2.", "end_turn")
        assert counted.input_tokens == message.usage.input_tokens

    assert texts_of(through_proxy(sampler, talk)) == [f"{CALL}<|im_end|>It is 2.<|im_end|>"]


def test_anthropic_client_gets_thinking_where_it_asks_for_it() -> None:
    async def talk(access: Access) -> None:
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        message = await of_anthropic(access).messages.create(model="any", max_tokens=2000, messages=QUESTION, thinking=thinking)
        assert [block.type for block in message.content] == ["thinking", "text"]

    through_proxy(Lines("<think>\nHm.\n</think>\n\n2."), talk)


def test_several_samples_are_branches_and_each_can_be_followed_up() -> None:
    async def talk(access: Access) -> None:
        client = of_openai(access)
        completion = await client.chat.completions.create(model="any", messages=QUESTION, n=3)
        assert sorted(choice.message.content or "" for choice in completion.choices) == ["One", "Three", "Two"]
        two = next(choice.message for choice in completion.choices if choice.message.content == "Two")
        again: Any = [*QUESTION, two, {"role": "user", "content": "Sure?"}]
        await client.chat.completions.create(model="any", messages=again)

    assert sorted(texts_of(through_proxy(Lines("One", "Two", "Three", "Yes"), talk))) == [
        *("One<|im_end|>", "Three<|im_end|>", "Two<|im_end|>Yes<|im_end|>")
    ]


def test_tools_that_are_not_to_be_called_are_not_offered() -> None:
    sampler = Lines(CALL, CALL)

    async def talk(access: Access) -> None:
        said = await of_openai(access).chat.completions.create(
            model="any", messages=QUESTION, tools=OPENAI_TOOLS, tool_choice="none"
        )
        assert said.choices[0].message.tool_calls is None and "<tool_call>" in (said.choices[0].message.content or "")
        message = await of_anthropic(access).messages.create(
            model="any", max_tokens=90, messages=QUESTION, tools=ANTHROPIC_TOOLS, tool_choice={"type": "none"}
        )
        assert [block.type for block in message.content] == ["text"]

    through_proxy(sampler, talk)
    assert all("<tools>" not in sampler.tokens.decode(prompt) for prompt in sampler.prompts)


def test_episodes_and_their_agents_side_by_side() -> None:
    """Each episode's answers are its own, whichever way its key comes; its agents fork from their common turn."""
    import openai

    async def run() -> list[Model]:
        proxy = await Proxy.start()
        models = [model_of(Lines(f"Start {number}", *[f"Task {number}"] * 4)) for number in range(8)]

        async def program(number: int) -> None:
            with proxy.episode(models[number]) as access:
                url = access.openai_url if number % 2 else f"{access.url}/v1"
                client = openai.AsyncOpenAI(base_url=url, api_key=access.key if not number % 2 else "unused")
                start = await client.chat.completions.create(model="any", messages=QUESTION)
                assert start.choices[0].message.content == f"Start {number}"
                history: Any = [*QUESTION, start.choices[0].message]
                tasks = [[*history, {"role": "user", "content": f"Task {task}"}] for task in range(4)]
                replies = await asyncio.gather(*(client.chat.completions.create(model="any", messages=task) for task in tasks))
                assert {reply.choices[0].message.content for reply in replies} == {f"Task {number}"}

        await asyncio.gather(*(program(number) for number in range(8)))
        await proxy.close()
        return models

    for number, model in enumerate(asyncio.run(run())):
        once, rest = f"Start {number}<|im_end|>Task {number}<|im_end|>", f"Task {number}<|im_end|>"
        assert sorted(texts_of(model)) == sorted([once, rest, rest, rest])


PROGRAM = """
import anthropic, openai
said = openai.OpenAI().chat.completions.create(model="gpt-x", messages=[{"role": "user", "content": "Hi"}])
message = anthropic.Anthropic().messages.create(model="claude-x", max_tokens=9, messages=[{"role": "user", "content": "Hello"}])
print(said.choices[0].message.content, message.content[0].text)
"""


def test_a_program_that_knows_nothing_of_the_proxy() -> None:
    async def talk(access: Access) -> None:
        environment = os.environ | access.environment()
        command = [sys.executable, "-c", PROGRAM]
        done = await asyncio.to_thread(subprocess.run, command, env=environment, capture_output=True, text=True, check=False)
        assert done.stdout.strip() == "One Two", done.stderr

    assert texts_of(through_proxy(Lines("One", "Two"), talk)) == ["One<|im_end|>", "Two<|im_end|>"]
