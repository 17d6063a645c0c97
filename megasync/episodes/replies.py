"""The message of a sampled answer, as a program gets it. Leaves out sampling, and the model's memory of it (chat.py)."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from megasync.episodes.messages import Fields
from megasync.episodes.parse import Parsed
from megasync.episodes.sampled import Answer
from megasync.episodes.tokens import Tokens

UNREADABLE = "The tool call could not be read, and no tool was called"


def call_id(prompt_ids: Sequence[int], token_ids: Sequence[int], place: int) -> str:
    """Nine characters, as mistral's templates want them; the same where an episode is played again, since prompts have them."""
    key = array("q", [*prompt_ids, -1, *token_ids, -1, place]).tobytes()
    return hashlib.blake2b(key, digest_size=5).hexdigest()[:9]


def tokens_shown(tokens: Tokens, answer: Answer, content: str) -> list[int]:
    """The tokens of a sampled answer up to the end of the content that a program got: it may end before a stop text."""
    ids = tokens.without_stop(answer.token_ids)
    num_hidden = len(answer.parsed.content.rstrip()) - len(content.rstrip())
    if num_hidden <= 0:
        return ids
    text = tokens.decode(ids).rstrip()[:-num_hidden]
    count = next(count for count in range(len(ids), -1, -1) if text.startswith(tokens.decode(ids[:count])))
    return [*ids[:count], *tokens.encode(text[len(tokens.decode(ids[:count])) :])]


def behind(whole: Parsed, begun: Parsed) -> Parsed:
    """The rest of a message after its given begin."""

    def rest(text: str, before: str) -> str:
        before = before if text.startswith(before) else before.strip()
        same = takewhile(lambda pair: pair[0] == pair[1], zip(text, before, strict=False))
        return text[sum(1 for _ in same) :]

    return replace(whole, content=rest(whole.content, begun.content), reasoning=rest(whole.reasoning, begun.reasoning))


def before_stop(parsed: Parsed, stop: Sequence[str]) -> tuple[Parsed, str]:
    """Up to the text that ended the content, or reasoning that is all there is; and that text, or "" where there is none."""
    is_thought = not parsed.content and bool(parsed.reasoning)
    text = parsed.reasoning if is_thought else parsed.content
    place, found = min(((place, each) for each in stop if (place := text.find(each)) >= 0), default=(-1, ""))
    if not found:
        return parsed, ""
    return replace(parsed, reasoning=text[:place]) if is_thought else replace(parsed, content=text[:place]), found


def message_of(parsed: Parsed, call_ids: Sequence[str], finish_reason: str) -> Fields:
    """The message for a program, with readable and unreadable calls."""
    calls = [
        Fields(id=call_id, type="function", function=Fields(name=name, arguments=json.dumps(arguments, ensure_ascii=False)))
        for call_id, (name, arguments) in zip(call_ids, parsed.calls, strict=False)
    ]
    broken = [
        Fields(id=call_id, text=each.text, error=f"{UNREADABLE}: {each.why}")
        for call_id, each in zip(call_ids[len(calls) :], parsed.broken, strict=True)
    ]
    reason = "tool_calls" if calls and finish_reason == "stop" else finish_reason
    made = Fields(role="assistant", content=parsed.content, finish_reason=reason)
    optional = {"reasoning": parsed.reasoning, "tool_calls": calls, "invalid_tool_calls": broken}
    return Fields(made | {name: value for name, value in optional.items() if value})
