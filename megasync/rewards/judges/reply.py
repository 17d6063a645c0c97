"""The score in a judge's reply. Pure.

    read_score("Right, but long. Score: 7", JudgeConfig(scale=(0, 10)))                       # 0.7
    read_score('It is {"score": 7}.', JudgeConfig(score="json:score", scale=(0, 10)))         # 0.7

What a model thinks before its reply, between <think> and </think>, does not count.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from megasync.config.judge_section import JSON_FIELD, JudgeConfig
from megasync.rewards.answers.read import after_thinking


class UnparsedError(ValueError):
    """A reply without a score."""


def read_score(reply: str, judge: JudgeConfig) -> float:
    """The reward: the score itself, or with a scale its place on it, from 0 to 1.

    Raises:
        UnparsedError: there is no score, it is not finite, or it is outside of the scale.
    """
    text = after_thinking(reply)
    if text is None:
        raise UnparsedError("its thinking does not end")
    field = JSON_FIELD.fullmatch(judge.score)
    score = _number(_field(text, field[1]) if field else _last_match(text, judge.score))
    if judge.scale is None:
        return score
    low, high = judge.scale
    if not low <= score <= high:
        raise UnparsedError(f"its score {score:g} is outside of [{low:g}, {high:g}]")
    return (score - low) / (high - low)


def _last_match(text: str, pattern: str) -> str:
    found = [match[1] for match in re.finditer(pattern, text) if match[1] is not None]
    if not found:
        raise UnparsedError("nothing in it matches judges.NAME.score")
    return found[-1]


def _field(text: str, name: str) -> Any:
    found = [value[name] for value in _objects(text) if name in value]
    if not found:
        raise UnparsedError(f"it holds no JSON object with the field {name}")
    return found[-1]


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects in the text, without those inside of others."""
    decoder, begin = json.JSONDecoder(), text.find("{")
    while begin >= 0:
        try:
            value, end = decoder.raw_decode(text, begin)
            yield value
        except (ValueError, RecursionError):
            end = begin + 1
        begin = text.find("{", end)


def _number(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UnparsedError(f"its score {value!r} is no finite number")
    return number
