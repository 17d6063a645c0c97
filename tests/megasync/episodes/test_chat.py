"""Model: what an episode gets from it, calls side by side, calls that are cancelled or refused."""

from __future__ import annotations

import asyncio
import copy
import enum

import pytest

from megasync.episodes.chat import Model
from megasync.episodes.messages import MessageError
from megasync.episodes.segments import Recorder
from megasync.episodes.template import TemplateRenderer
from megasync.episodes.tokens import Tokens
from tests.support.chat_families import FAMILIES
from tests.support.samplers import FAMILY, Lines, model_of

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("arguments", "written"),
    [({"a": "\ud83d"}, '"a": "?"'), ('{"a": "\\ud83d"}', '"a": "?"'), ("[" * 10**5, "[" * 10**5)],
)
def test_a_call_may_have_what_a_tokenizer_does_not_take(arguments: object, written: str) -> None:
    """Half a character, as a model writes it with an escape, and brackets without an end."""
    call = {"id": "call_one1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "call_one1", "content": "2"})
    sampler = Lines("It is 2.")
    assert asyncio.run(model_of(sampler).chat(messages, [TOOL])).content == "It is 2."
    assert written in sampler.tokens.decode(sampler.prompts[0])


def test_a_conversation_goes_on_by_tokens() -> None:
    call = '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    sampler = Lines(call, "It is 2.", "Bye.")

    async def talk() -> Model:
        model = model_of(sampler)
        messages = [{"role": "user", "content": "1 + 1?"}]
        message = await model.chat(messages, [TOOL], max_tokens=90, stop=["\n\n\n"])
        assert (message.content, message.reasoning, message.finish_reason) == ("", "Hm.", "tool_calls")
        assert message["tool_calls"][0].function.name == "add" and message.tool_calls[0].function.arguments == '{"a": 1}'
        messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"}]
        reply = await model.reply(messages, [TOOL])
        assert (reply.message.content, reply.message.tool_calls, reply.finish_reason) == ("It is 2.", None, "stop")
        assert reply.continues and reply.num_prompt_tokens == len(sampler.prompts[1])
        messages += [reply.message, {"role": "user", "content": "Bye"}]
        assert not (await model.reply(messages, [TOOL])).continues  # the template drops the thinking now
        return model

    model = asyncio.run(talk())
    assert sampler.options[0] == (90, ("\n\n\n",))
    one, two = model.recorder.branches()
    assert one.is_sampled.sum() + two.is_sampled.sum() == len(one.log_probs.nonzero()[0]) + len(two.log_probs.nonzero()[0])
    text = sampler.tokens.decode(one.token_ids)
    result = "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    assert text.endswith(f"{call}<|im_end|>\n{result}<|im_start|>assistant\nIt is 2.<|im_end|>")
    assert "<think>" not in sampler.tokens.decode(two.token_ids)


def test_agents_side_by_side_fork_from_one_turn() -> None:
    async def talk() -> Model:
        model = model_of(Lines("Two tasks.", "One done.", "Two done."))
        messages = [{"role": "user", "content": "Go"}]
        messages.append(await model.chat(messages))
        asked = [[*copy.deepcopy(messages), {"role": "user", "content": f"Task {number}"}] for number in (1, 2)]
        replies = await asyncio.gather(*(model.reply(each) for each in asked))
        assert all(reply.continues for reply in replies)
        return model

    one, two = asyncio.run(talk()).recorder.branches()
    tokens = Lines().tokens
    assert tokens.decode(one.token_ids[one.is_sampled]) == "Two tasks.<|im_end|>One done.<|im_end|>"
    assert tokens.decode(two.token_ids[two.is_sampled]) == "Two done.<|im_end|>"


class End(enum.StrEnum):
    OF_LINE = "\n"


def test_completions_of_token_ids() -> None:
    """A stop text is a plain one for replicas, which cannot import the enumerations of an episode."""
    sampler = Lines("Hello there", "again")

    async def talk() -> Model:
        model = model_of(sampler)
        start = model.renderer.tokens.encode("Say: ")
        said = await model.complete(start, max_new_tokens=4, stop=[End.OF_LINE])
        assert (said.finish_reason, len(said.token_ids)) == ("length", 4)
        more = await model.complete([*start, *said.token_ids])
        assert (more.text, more.finish_reason) == ("again", "stop")
        return model

    (branch,) = asyncio.run(talk()).recorder.branches()
    assert branch.weight_versions.tolist() == [3] * len(branch.token_ids)
    assert [type(text) for text in sampler.options[0][1]] == [str] and sampler.options[0] == (4, ("\n",))


def test_a_cancelled_call_leaves_no_trace() -> None:
    async def talk() -> Model:
        model = model_of(Lines("", "Yes."))
        call = asyncio.create_task(model.chat([{"role": "user", "content": "?"}]))
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not model.recorder.branches()
        assert (await model.chat([{"role": "user", "content": "?"}])).content == "Yes."
        return model

    assert len(asyncio.run(talk()).recorder.branches()) == 1


def test_what_the_template_refuses_is_said() -> None:
    async def ask(messages: list[dict[str, str]]) -> None:
        sampler = Lines("x")
        await Model(sampler, TemplateRenderer(Tokens(FAMILIES["mistral"].tokenizer(), [1])), Recorder()).chat(messages)

    with pytest.raises(MessageError, match=r"roles must alternate.*their roles: user, user"):
        asyncio.run(ask([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]))
    with pytest.raises(MessageError, match="there are no messages"):
        asyncio.run(ask([]))


def test_a_model_without_a_template_is_refused() -> None:
    tokenizer = copy.deepcopy(FAMILY.tokenizer())
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        TemplateRenderer(Tokens(tokenizer, FAMILY.stop_token_ids()))
    tokenizer.chat_template = "{% for message in messages %}{{ message.role }}{% endfor %}"
    with pytest.raises(ValueError, match="does not write an assistant's content"):
        TemplateRenderer(Tokens(tokenizer, FAMILY.stop_token_ids()))


BROKEN = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "a": 2}}\n</tool_call>'


CUT = {"qwen3": BROKEN, "gemma3": BROKEN, "glm4": "<tool_call>add<arg_key>a", "mistral": '[TOOL_CALLS] [{"name": "add"'}


@pytest.mark.parametrize(("name", "line"), CUT.items())
@pytest.mark.parametrize("by_user", [False, True])
def test_a_call_that_cannot_be_read_is_answered_with_why(name: str, line: str, by_user: bool) -> None:
    """Each template takes the answer to it, as a tool's result or in the user's words, and the branch goes on."""
    sampler = Lines(line, "It is 2.", family=FAMILIES[name])

    async def talk() -> None:
        model = Model(sampler, TemplateRenderer(sampler.tokens), Recorder())
        messages = [{"role": "user", "content": "1 + 1?"}]
        message = await model.chat(messages, [TOOL])
        assert (message.tool_calls, message.finish_reason) == (None, "stop")
        (call,) = message.invalid_tool_calls
        assert call.text in line and call.text in message.content
        assert call.error.startswith("The tool call could not be read, and no tool was called: ")
        answer = {"role": "user"} if by_user else {"role": "tool", "tool_call_id": call.id}
        messages += [message, {**answer, "content": call.error}]
        reply = await model.reply(messages, [TOOL])
        assert reply.continues != (name == "mistral" and by_user)  # which describes tools in the user's last message
        assert reply.message.content.strip() == "It is 2."
        assert call.error in sampler.tokens.decode(sampler.prompts[1])

    asyncio.run(talk())


def test_calls_that_can_be_read_are_made_beside_one_that_cannot() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

    async def talk() -> None:
        message = await model_of(Lines(call + BROKEN)).chat([{"role": "user", "content": "?"}], [TOOL])
        assert [each.function.arguments for each in message.tool_calls] == ['{"a": 1}']
        assert [each.text for each in message.invalid_tool_calls] == [BROKEN]
        assert message.finish_reason == "tool_calls" and message.tool_calls[0].id != message.invalid_tool_calls[0].id

    asyncio.run(talk())
