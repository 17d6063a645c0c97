"""A turn that a program begins, and the template's variables that it sets: the prompt, what is trained, what comes back."""

from __future__ import annotations

import asyncio
import json
from importlib.util import find_spec
from typing import Any

import aiohttp
import pytest

from megasync.episodes.chat import Model
from megasync.episodes.messages import MessageError
from megasync.episodes.proxy import WITHOUT_EFFECT, Access
from megasync.episodes.render import FamilyRenderer
from megasync.episodes.segments import Recorder
from megasync.episodes.template import TemplateRenderer
from tests.support.chat_families import FAMILIES
from tests.support.proxies import QUESTION, of_anthropic, of_openai, texts_of, through_proxy
from tests.support.samplers import Lines, model_of

BEGUN = {"role": "assistant", "content": "The answer is "}
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CONTINUED: Any = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("earlier", [0, 1])
def test_the_prompt_is_what_transformers_writes(name: str, earlier: int) -> None:
    family = FAMILIES[name]
    sampler = Lines("No.", "42.", "Bye.", family=family)
    model = Model(sampler, TemplateRenderer(sampler.tokens), Recorder())
    messages: list[dict[str, Any]] = [{"role": "user", "content": "1 + 1?"}]
    if earlier:
        messages += [asyncio.run(model.chat(messages)), {"role": "user", "content": "Sure?"}]
    else:
        sampler.lines.pop(0)
    messages.append(BEGUN)
    reply = asyncio.run(model.reply(messages, continue_final_message=True))
    assert reply.message.content.strip() == "42." and reply.num_sampled_tokens == len(sampler.tokens.encode("42.")) + 1
    written = sampler.tokens.tokenizer.apply_chat_template(
        [{name: each[name] for name in ("role", "content")} for each in messages], tokenize=False, continue_final_message=True
    )
    assert earlier or sampler.tokens.decode(sampler.prompts[-1]).split() == written.split()  # GLM's writes a thought before "No."
    whole = {"role": "assistant", "content": BEGUN["content"] + reply.message.content}
    messages[-1:] = [whole, {"role": "user", "content": "Bye"}]
    reply = asyncio.run(model.reply(messages))
    assert reply.continues
    (branch,) = model.recorder.branches()
    said = ["No."] * earlier + ["42.", "Bye."]
    stop = sampler.tokens.decode(sampler.stops)
    assert sampler.tokens.decode(branch.token_ids[branch.is_sampled]).replace(" ", "").split(stop)[:-1] == said


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_continues_a_last_message_of_the_assistants(stream: bool) -> None:
    sampler = Lines("42 STOP", "It is.")

    async def talk(access: Access) -> None:
        client, options = of_anthropic(access), {"model": "any", "max_tokens": 90}
        asked: Any = {**options, "messages": [*QUESTION, BEGUN], "stop_sequences": [" STOP", "answer"]}
        counted = await client.messages.count_tokens(model="any", messages=asked["messages"])
        if stream:
            async with client.messages.stream(**asked) as events:
                message = await events.get_final_message()
        else:
            message = await client.messages.create(**asked)
        assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("42", "stop_sequence", " STOP")
        assert counted.input_tokens == message.usage.input_tokens == len(sampler.prompts[0])
        history = [*QUESTION, BEGUN, {"role": "assistant", "content": message.content}, {"role": "user", "content": "Sure?"}]
        message = await client.messages.create(messages=history, **options)
        assert message.content[0].text == "It is."

    assert texts_of(through_proxy(sampler, talk)) == ["42 STOP<|im_end|>It is.<|im_end|>"]
    assert sampler.tokens.decode(sampler.prompts[0]).endswith("assistant\n<think>\n\n</think>\n\nThe answer is ")


def test_openai_continues_where_it_is_said_as_vllm_has_it() -> None:
    sampler = Lines("42.", "42.", "New.", "2.")

    async def talk(access: Access) -> None:
        create, messages = of_openai(access).chat.completions.create, [*QUESTION, BEGUN]
        said = await create(model="any", messages=messages, extra_body=CONTINUED)
        assert said.choices[0].message.content == "42."
        said = await create(model="any", messages=[*QUESTION, {**BEGUN, "prefix": True}])
        assert said.choices[0].message.content == "42."
        said = await create(model="any", messages=messages)  # a turn of its own, as vLLM's server takes it
        assert said.choices[0].message.content == "New."
        without = {"chat_template_kwargs": {"enable_thinking": False}}
        await create(model="any", messages=QUESTION, extra_body=without)

    through_proxy(sampler, talk)
    first, same, second, third = (sampler.tokens.decode(prompt) for prompt in sampler.prompts)
    assert first == same and first.endswith("The answer is ")
    assert second.endswith("The answer is <|im_end|>\n<|im_start|>assistant\n")
    assert third.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("line", ["Thought: one two three four.", "<think>\nHm, hm.\n</think>\n\nTwo or three or four."])
@pytest.mark.parametrize("by_family", [False, True])
def test_an_answer_that_was_cut_off_goes_on_by_its_tokens(line: str, by_family: bool) -> None:
    if by_family and find_spec("renderers") is None:
        pytest.skip("the package renderers of the locks is not installed")
    tokens = Lines().tokens
    limit = len(tokens.encode(line)) - 4
    sampler = Lines(line, " And so on.", "Bye.")
    renderer = FamilyRenderer(tokens, "qwen3") if by_family else TemplateRenderer(tokens)
    model = Model(sampler, renderer, Recorder())
    messages: list[dict[str, Any]] = [{"role": "user", "content": "1 + 1?"}]
    cut = asyncio.run(model.chat(messages, max_tokens=limit))
    assert cut.finish_reason == "length"
    reply = asyncio.run(model.reply([*messages, cut], continue_final_message=True))
    assert reply.message.content == " And so on." and reply.continues
    assert sampler.prompts[1] == [*sampler.prompts[0], *tokens.encode(line)[:limit]]
    messages += [{"role": "assistant", "content": cut.content + reply.message.content}, {"role": "user", "content": "Bye"}]
    asyncio.run(model.chat(messages))
    branches = model.recorder.branches()
    num_sampled = limit + sum(len(tokens.encode(text)) + 1 for text in (" And so on.", "Bye."))
    assert sum(int(branch.is_sampled.sum()) for branch in branches) == num_sampled
    assert len(branches) == 1 + ("<think>" in line)  # the template drops it, once the user speaks again


def test_an_answer_that_a_text_stopped_goes_on_from_what_the_program_has() -> None:
    sampler = Lines("Thought: 0\nObservation:", "12, so 3.")

    async def talk(access: Access) -> None:
        create = of_openai(access).chat.completions.create
        said = await create(model="any", messages=QUESTION, stop=["Observation:"])
        begun = {"role": "assistant", "content": said.choices[0].message.content}
        more = await create(model="any", messages=[*QUESTION, begun], extra_body=CONTINUED)
        assert more.choices[0].message.content == "12, so 3."

    through_proxy(sampler, talk)
    assert sampler.tokens.decode(sampler.prompts[1]).endswith("<|im_start|>assistant\nThought: 0")


def test_a_turn_that_is_begun_may_call_a_tool_and_think() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    sampler = Lines(f" let me see.\n{call}", "2.", "Hm.\n</think>\n\nThree.", '"add", "arguments": {}}\n</tool_call>')

    async def talk() -> Model:
        model, messages = model_of(sampler), [{"role": "user", "content": "1 + 1?"}]
        begun = {"role": "assistant", "content": "Well,"}
        message = await model.chat([*messages, begun], [TOOL], continue_final_message=True)
        assert (message.content, message.tool_calls[0].function.name) == (" let me see.", "add")
        messages += [{**message, "content": f"Well,{message.content}"}]
        messages += [{"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"}]
        assert (await model.reply(messages, [TOOL])).continues
        thought = {"role": "assistant", "content": "<think>\nWell, "}
        message = await model.chat([*messages[:1], thought], continue_final_message=True)
        assert (message.reasoning, message.content) == (" Hm.", "Three.")
        half = {"role": "assistant", "content": 'So <tool_call>\n{"name": '}
        message = await model.chat([*messages[:1], half], [TOOL], continue_final_message=True)
        assert (message.content, message.tool_calls[0].function.name) == ("", "add")
        return model

    model = asyncio.run(talk())
    assert texts_of(model)[0] == f" let me see.\n{call}<|im_end|>2.<|im_end|>"
    assert sampler.tokens.decode(sampler.prompts[2]).endswith("<|im_start|>assistant\n<think>\nWell, ")


@pytest.mark.parametrize("by_family", [False, True])
def test_variables_of_the_template_are_set_or_refused(by_family: bool) -> None:
    if by_family and find_spec("renderers") is None:
        pytest.skip("the package renderers of the locks is not installed")
    sampler = Lines(*["Yes."] * 3)
    renderer = FamilyRenderer(sampler.tokens, "qwen3", model_type="qwen3") if by_family else TemplateRenderer(sampler.tokens)
    model = Model(sampler, renderer, Recorder())
    for value in (False, True, False):
        asyncio.run(model.chat(QUESTION, chat_template_kwargs={"enable_thinking": value}))
    assert [sampler.tokens.decode(prompt).endswith("</think>\n\n") for prompt in sampler.prompts] == [True, False, True]
    for name in ("no_such", "messages", "add_generation_prompt", "bos_token", "function"):
        with pytest.raises(MessageError, match=f"chat_template_kwargs: .*'{name}'"):
            asyncio.run(model.chat(QUESTION, chat_template_kwargs={name: 1}))


CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
USER: Any = {"role": "user", "content": "x"}
NAMED: Any = {"type": "function", "function": {"name": "other"}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"continue_final_message": True}, "the last message is to be continued"),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message and add_generation_prompt"),
    (CHAT, {"add_generation_prompt": False}, "add_generation_prompt"),
    (CHAT, {"continue_final_message": "yes"}, "continue_final_message = 'yes'"),
    (CHAT, {"chat_template_kwargs": {"no_such": 1}}, "chat_template_kwargs: the chat template has no variable 'no_such'"),
    (CHAT, {"chat_template_kwargs": [1]}, "chat_template_kwargs = [1]"),
    (CHAT, {"reasoning_effort": "high"}, "'reasoning_effort'"),
    (CHAT, {"tool_choice": NAMED, "tools": [TOOL]}, "tool_choice: tools has none of the name 'other'"),
    (CHAT, {"tool_choice": "always"}, "tool_choice = 'always'"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions: "),
    *((CHAT, {name: value}, f"{name}: the policy's server has no such thing") for name, value in {
        "parallel_tool_calls": False, "presence_penalty": 0.5, "frequency_penalty": -1, "logit_bias": {"1": 1}, "top_logprobs": 2,
        "modalities": ["text", "audio"], "audio": {"voice": "x"}, "prediction": {"type": "x"}, "web_search_options": {"a": 1},
        "verbosity": "low", "moderation": {"a": 1}, "guided_json": {"type": "object"}, "structured_outputs": {"regex": "a"},
        "include_reasoning": False, "min_tokens": 5, "ignore_eos": True, "echo": True, "chat_template": "x", "unheard_of": False,
    }.items()),
    *((MESSAGES, {name: value}, f"{name}: the policy's server has no such thing") for name, value in {
        "container": "x", "mcp_servers": [{}], "context_management": {"edits": []}, "output_config": {"effort": "low"},
        "output_format": {"type": "x"}, "speed": "fast", "compaction": {"a": 1}, "fallbacks": ["x"], "thread": "x", "n": 2,
    }.items()),
    (MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "disable_parallel_tool_use"),
    (MESSAGES, {"tool_choice": {"type": "tool", "name": "other"}}, "tool_choice: tools has none"),
    (MESSAGES, {"chat_template_kwargs": {"no_such": 1}}, "'no_such'"),
    (MESSAGES, {"thinking": {"type": "long"}}, "thinking: type = 'long'"),
    (MESSAGES, {"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "add"}]}]},
     "without tool_calls"),
    (CHAT, {"messages": [USER, {"role": "assistant", "function_call": {"name": "add", "arguments": "{}"}}]}, "function_call"),
]  # fmt: skip
TAKEN: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"temperature": 0, "top_p": 1.0, "seed": 3, "user": "x", "metadata": {"a": "b"}, "store": False},
     "seed, temperature, top_p"),
    (CHAT, {"tool_choice": "required", "tools": [TOOL], "parallel_tool_calls": True, "presence_penalty": 0.0}, "tool_choice"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "add"}}, "tools": [TOOL]}, "tool_choice"),
    (CHAT, {"logprobs": False, "logit_bias": None, "response_format": {"type": "text"}, "modalities": ["text"], "stop": []}, ""),
    (MESSAGES, {"max_tokens": 9, "top_k": 5, "metadata": {"user_id": "x"}, "service_tier": "auto"}, "top_k"),
    (MESSAGES, {"max_tokens": 9, "tool_choice": {"type": "any"}, "tools": [TOOL["function"]]}, "tool_choice"),
    (MESSAGES, {"max_tokens": 9, "thinking": {"type": "disabled"}, "speed": "standard"}, ""),
    (MESSAGES, {"max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
]  # fmt: skip


def test_each_field_is_taken_or_refused_by_its_name() -> None:
    """What is the run's, and not the program's, is named in the answer's headers."""

    async def talk(access: Access) -> None:
        async with aiohttp.ClientSession(headers={"x-api-key": access.key}) as session:
            for path, fields, said in REFUSED:
                async with session.post(access.url + path, json={"messages": [USER], **fields}) as response:
                    assert response.status == 400, fields
                    assert said in (await response.json())["error"]["message"], fields
            for path, fields, of_run in TAKEN:
                async with session.post(access.url + path, json={"messages": [USER], **fields}) as response:
                    assert response.status == 200, (fields, await response.json())
                    assert response.headers.get(WITHOUT_EFFECT, "") == of_run

    through_proxy(Lines(*["Yes."] * len(TAKEN)), talk)


def test_no_field_of_the_official_clients_is_unknown_here() -> None:
    """A field of a client that the tables do not name is refused; each that there is now was looked at."""
    from anthropic.types.beta.message_create_params import MessageCreateParamsBase
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase

    from megasync.episodes import anthropic_form, openai_form

    refused = {
        openai_form: {"audio", "functions", "logit_bias", "moderation", "prediction", "web_search_options"},
        anthropic_form: {"compaction", "container", "context_management", "fallback_credit_token", "fallbacks", "mcp_servers"}
        | {"output_config", "thread"},
    }
    for form, fields in ((openai_form, CompletionCreateParamsBase), (anthropic_form, MessageCreateParamsBase)):
        rules = form.FIELDS
        known = rules.taken | rules.harmless | rules.of_run | rules.neutral.keys()
        assert fields.__annotations__.keys() - known == refused[form]


def test_a_call_that_cannot_be_read_is_in_the_answer_of_both_protocols() -> None:
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "a": 2}}\n</tool_call>'
    sampler = Lines(broken, "2.", broken, "3.")

    async def talk(access: Access) -> None:
        create, messages = of_openai(access).chat.completions.create, list(QUESTION)
        choice = (await create(model="any", messages=messages, tools=[TOOL])).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (broken, None, "stop")
        (call,) = choice.message.invalid_tool_calls  # type: ignore[attr-defined]
        messages += [choice.message, {"role": "tool", "tool_call_id": call["id"], "content": call["error"]}]
        await create(model="any", messages=messages, tools=[TOOL])
        other, tools, messages = (
            of_anthropic(access).messages,
            [{"name": "add", "input_schema": {"type": "object"}}],
            list(QUESTION),
        )
        options: Any = {"model": "any", "max_tokens": 90, "tools": tools}
        message = await other.create(messages=messages, **options)
        (call,) = message.invalid_tool_calls
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": call["error"]}
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        await other.create(messages=messages, **options)

    assert texts_of(through_proxy(sampler, talk)) == [f"{broken}<|im_end|>{number}.<|im_end|>" for number in (2, 3)]
    assert "occurs twice" in sampler.tokens.decode(sampler.prompts[1]) and json.dumps(broken)
