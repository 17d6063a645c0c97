"""Random conversations of a model that writes answers in its family's form, cut into tokens as no tokenizer would cut them.

Whoever tokenises an answer again gets other tokens. Each answer holds a word of its own, so that a look at what was tokenised
finds it.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megasync.episodes.chat import Model
from megasync.episodes.render import FamilyRenderer, renderer_of
from megasync.episodes.segments import Recorder, Turn
from megasync.episodes.template import TemplateRenderer
from megasync.episodes.tokens import Tokens
from tests.support.chat_families import Family

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "text": {"type": "string"}}},
        },
    }
]
WORDS = ("sum", "42", "Brücke", "東京", "🙂", "false", "\n", "\n\n", " ", "'quoted'", "{", "}")


class CountingTokens(Tokens):
    """Keeps all texts that were tokenised."""

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int]) -> None:
        super().__init__(tokenizer, stop_token_ids)
        self.texts: list[str] = []

    def _encode(self, text: str) -> list[int]:
        self.texts.append(text)
        return super()._encode(text)


@dataclass
class Written:
    """A sampled answer: what a reader should find in it."""

    word: str
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    cut: bool = False


class Writer:
    """A sampler that writes random answers in the family's own form."""

    def __init__(self, family: Family, tokens: Tokens, rng: random.Random) -> None:
        self.family, self.tokens, self.rng = family, tokens, rng
        self.wanted_calls = 0
        self.written: list[Written] = []
        self.requests: list[tuple[list[int], list[int]]] = []

    async def __call__(self, prompt_ids: Sequence[int], *, max_new_tokens: int | None = None, stop: Sequence[str] = ()) -> Turn:
        number = len(self.written)
        written = Written(f"w{number}q{self.rng.randrange(10**6)}")
        ids = self.cut_up(self.text(written))
        ending = self.family.stops[-1 if written.calls else self.rng.randrange(max(len(self.family.stops) - 1, 1))]
        written.cut = written.cut and bool(ids)
        if written.cut:
            ids = ids[: self.rng.randrange(1, len(ids) + 1)]
        else:
            ids.append(self.tokens.tokenizer.convert_tokens_to_ids(ending))
        self.written.append(written)
        self.requests.append((list(prompt_ids), ids))
        return Turn(ids, -np.arange(len(ids)) - 1000 * number, [number] * len(ids), "length" if written.cut else "stop")

    def text(self, written: Written) -> str:
        rng, name = self.rng, self.family.name
        said = "".join(rng.choice(WORDS) + " " for _ in range(rng.randrange(6)))
        thought = f"hm {written.word}r {said}" if self.family.thinks and rng.random() < 0.7 else ""
        arguments = {"a": rng.randrange(99), "text": f'{written.word}a é"\n.'}
        written.calls = [("add", arguments)] * self.wanted_calls
        written.content = "" if rng.random() < 0.2 else f"{written.word}c {said}".strip()
        if self.wanted_calls and name in ("llama3", "mistral"):
            written.content = ""  # these write calls alone
        written.reasoning, written.cut = thought.strip(), not self.wanted_calls and rng.random() < 0.15
        text = f"<think>\n{thought}\n</think>\n\n" if thought else ""
        if name == "glm4":
            text = f"\n<think>{thought}</think>\n"  # of which its reader expects one always
        return text + written.content + self.calls_text(written.calls)

    def calls_text(self, calls: list[tuple[str, dict[str, Any]]]) -> str:
        texts = [json.dumps({"name": tool, "arguments": arguments}, ensure_ascii=False) for tool, arguments in calls]
        if not calls:
            return ""
        if self.family.name == "mistral":
            return "[TOOL_CALLS] [" + ", ".join(text[:-1] + ', "id": "abcdefghi"}' for text in texts) + "]"
        if self.family.name == "llama3":
            return json.dumps({"name": calls[0][0], "parameters": calls[0][1]}, ensure_ascii=False)
        if self.family.name == "glm4":
            pair = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
            values = [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in calls[0][1].items()]
            one = f"\n<tool_call>{calls[0][0]}\n" + "".join(pair.format(*value) for value in values) + "</tool_call>"
            return one * len(calls)
        return "".join(f"\n<tool_call>\n{text}\n</tool_call>" for text in texts)

    def cut_up(self, text: str) -> list[int]:
        ids, place = [], 0
        while place < len(text):
            special = next((each for each in self.family.specials if text.startswith(each, place)), None)
            end = place + (len(special) if special else self.rng.randrange(1, 4))
            following = [text.find(each, place + 1) for each in self.family.specials]
            end = min([end, *(at for at in following if at > place)])
            ids += self.tokens.encode(self.family.specials[0] + text[place:end])[1:]  # as in the middle of a text
            place = end
        return ids


@dataclass
class Talk:
    writer: Writer
    tokens: CountingTokens
    model: Model
    tools: list[dict[str, Any]] | None
    messages: list[dict[str, Any]]


def conversation(family: Family, seed: int, *, by_family: bool = False) -> Talk:
    """Turns of user, tools and model, as an episode would make them; what the client sends back has been through JSON."""
    rng = random.Random(seed)
    tokenizer, stops = family.tokenizer(), family.stop_token_ids()
    tokens, writer = CountingTokens(tokenizer, stops), Writer(family, Tokens(tokenizer, stops), rng)
    renderer = renderer_of(tokens, family.model_type) if by_family else TemplateRenderer(tokens)
    assert isinstance(renderer, FamilyRenderer) == by_family
    model = Model(writer, renderer, Recorder())
    tools = TOOLS if rng.random() < 0.7 else None
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief. 東"}] if rng.random() < 0.5 else []

    async def talk() -> None:
        for _ in range(rng.randrange(1, 5)):
            messages.append({"role": "user", "content": rng.choice(["", "Hi 🙂", "1 + 1?\n\n", "<b> é"])})
            for _ in range(rng.randrange(1, 4)):
                writer.wanted_calls = rng.choice([0, 1, 1, 2]) if tools and family.name != "llama3" else int(bool(tools))
                reply = await model.chat(messages, tools)
                check_reply(reply, writer.written[-1], tools)
                messages.append(json.loads(json.dumps(reply)))
                if rng.random() < 0.5:
                    messages[-1].pop("reasoning", None)  # clients leave it out
                messages.extend(
                    {"role": "tool", "tool_call_id": call.id, "content": rng.choice(["42", "", "é\n🙂"])}
                    for call in reply.tool_calls or ()
                )
                if not reply.tool_calls:
                    break
            else:
                writer.wanted_calls = 0
                messages.append(json.loads(json.dumps(await model.chat(messages, tools))))

    asyncio.run(talk())
    return Talk(writer, tokens, model, tools, messages)


def check_reply(reply: Any, written: Written, tools: Any) -> None:
    if written.cut:
        return
    assert reply.content.strip() == written.content.strip()
    assert (reply.reasoning or "") == written.reasoning
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in reply.tool_calls or ()]
    assert calls == written.calls


def sampled_and_trained(family: Family, seeds: Iterable[int], *, by_family: bool = False) -> tuple[int, int]:
    """How many prompts continued a former one, and how many began a branch."""
    continued = begun = 0
    for seed in seeds:
        talk = conversation(family, seed, by_family=by_family)
        writer, branches = talk.writer, talk.model.recorder.branches()
        sampled = sorted(
            (-1000 * turn - at, token) for turn, (_, ids) in enumerate(writer.requests) for at, token in enumerate(ids)
        )
        trained = [
            pair
            for branch in branches
            for pair in zip(
                branch.log_probs[branch.is_sampled].tolist(), branch.token_ids[branch.is_sampled].tolist(), strict=True
            )
        ]
        assert sorted(trained) == sorted(sampled), seed
        begun += len(branches)
        continued += len(writer.requests) - len(branches)
        former: list[list[int]] = []
        for prompt, ids in writer.requests:  # a prompt begins with all of a former one and its answer, or has a branch of its own
            own = [branch for branch in branches if branch.token_ids[: branch.prompt_length].tolist() == prompt]
            assert own or any(prompt[: len(each)] == each for each in former), seed
            former.append([*prompt, *ids])
        tokenised = "\n".join(talk.tokens.texts)
        assert not [each.word for each in writer.written if each.word in tokenised], seed
    return continued, begun
