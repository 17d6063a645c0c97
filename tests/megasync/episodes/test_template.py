"""Random conversations over five families' templates: the tokens trained are the tokens sampled, and none is made from text."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from importlib.util import find_spec
from typing import Any

import pytest

from megasync.episodes.chat import Model
from megasync.episodes.render import FamilyRenderer, renderer_of
from megasync.episodes.folding import fold
from megasync.episodes.template import TemplateRenderer
from megasync.episodes.segments import Recorder
from megasync.episodes.tokens import Tokens
from tests.support.chat_families import FAMILIES
from tests.support.conversations import TOOLS, conversation, sampled_and_trained
from tests.support.samplers import Lines

SEEDS = [range(30), pytest.param(range(30, 400), marks=pytest.mark.long)]
PACKAGE = pytest.mark.skipif(find_spec("renderers") is None, reason="the package renderers of the locks is not installed")
CASES = [
    *(pytest.param(name, False, id=name) for name in FAMILIES),
    *(pytest.param(name, True, id=f"{name} of renderers", marks=PACKAGE) for name in FAMILIES if FAMILIES[name].model_type),
]


@pytest.mark.parametrize("seeds", SEEDS, ids=["few", "many"])
@pytest.mark.parametrize(("name", "by_family"), CASES)
def test_the_tokens_trained_are_the_tokens_sampled(name: str, by_family: bool, seeds: range) -> None:
    continued, begun = sampled_and_trained(FAMILIES[name], seeds, by_family=by_family)
    assert continued > begun * {"llama3": 0.9, "gemma3": 0.9, "qwen3": 0.3, "glm4": 0.3, "mistral": 0.3}[name]


@pytest.mark.parametrize(("name", "by_family"), CASES)
def test_a_changed_history_is_written_as_the_template_does_with_the_tokens_sampled(name: str, by_family: bool) -> None:
    """Another system message: nothing is continued, and all answers stand in it by their tokens. White space may differ."""
    family, num_messages = FAMILIES[name], 0
    for seed in range(25):
        talk = conversation(family, seed, by_family=by_family)
        changed = [{"role": "system", "content": "Other."}, *(each for each in talk.messages if each["role"] != "system")]
        changed.append({"role": "user", "content": "Bye."})
        num_texts = len(talk.tokens.texts)
        talk.writer.wanted_calls = 0
        asyncio.run(talk.model.chat(changed, talk.tools))
        plain = [of_template(message) for message in changed]
        plain, tools = fold(plain, TOOLS if talk.tools else [], with_tools=name == "gemma3", with_system=False)
        written = talk.tokens.tokenizer.apply_chat_template(
            plain, tools=list(tools) or None, tokenize=False, add_generation_prompt=True
        )
        prompt, _ = talk.writer.requests[-1]
        assert reduced(talk.tokens.decode(prompt)) == reduced(written), seed
        tokenised = "\n".join(talk.tokens.texts[num_texts:])
        assert not [each.word for each in talk.writer.written if each.word in tokenised], seed
        num_messages += len(changed)
    assert num_messages > 100


def of_template(message: dict[str, Any]) -> dict[str, Any]:
    """Calls as objects; thinking before the last question is dropped by all of the templates."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    made = {name: message[name] for name in ("role", "content", "tool_call_id") if name in message}
    return {**made, "tool_calls": calls} if calls else made


def reduced(text: str) -> str:
    return re.sub(r'\s+|"(call_)?id":\s*"\w{9}"', "", text)


@PACKAGE
def test_a_family_is_taken_where_it_writes_what_the_folders_template_writes() -> None:
    family = FAMILIES["qwen3"]
    tokenizer = copy.deepcopy(family.tokenizer())
    tokens = Tokens(tokenizer, family.stop_token_ids())
    assert isinstance(renderer_of(tokens, "qwen3"), FamilyRenderer)
    assert isinstance(
        renderer_of(tokens, "qwen3", {"enable_thinking": False}), TemplateRenderer
    )  # it keeps tags that the template drops
    assert isinstance(renderer_of(tokens, "qwen3", {"unknown": 1}), TemplateRenderer)
    assert isinstance(renderer_of(tokens, "llama"), TemplateRenderer)  # lacks its tokens
    assert isinstance(renderer_of(tokens, "bloom"), TemplateRenderer)
    tokenizer.chat_template = family.template.replace("You may call one or more functions", "There are functions")
    assert isinstance(renderer_of(tokens, "qwen3"), TemplateRenderer)


@pytest.mark.parametrize("by_family", [False, pytest.param(True, marks=PACKAGE)])
def test_without_thinking_the_prompt_closes_it_and_goes_on(by_family: bool) -> None:
    """The tags that the prompt of a turn had stay where they are, though the template would not write them again."""
    family = FAMILIES["qwen3"]
    tokens = Tokens(family.tokenizer(), family.stop_token_ids())
    arguments = {"enable_thinking": False}
    renderer = FamilyRenderer(tokens, "qwen3", arguments) if by_family else TemplateRenderer(tokens, arguments)
    sampler = Lines("Two.", "Yes.")
    model = Model(sampler, renderer, Recorder())
    messages: list[dict[str, Any]] = [{"role": "user", "content": "1 + 1?"}]
    messages += [asyncio.run(model.chat(messages)), {"role": "user", "content": "Sure?"}]
    reply = asyncio.run(model.reply(messages))
    assert reply.continues
    assert tokens.decode(sampler.prompts[1]).count("<think>\n\n</think>\n\n") == 2
