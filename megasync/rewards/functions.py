"""What a reward is given, and the rewards that have a name. `rollout.reward` names one of these, or functions of your own.

Leaves out advantages, which the loss makes of the rewards of a group. No torch in here.

    exact_match(RewardInput(prompt="12+34=", response="46", answer="46", num_tokens=3, max_tokens=4))   # 1.0

A function of your own, plain or `async def`, takes one RewardInput and returns a finite number. One whose parameter is annotated
as a list (`list[RewardInput]`, `Sequence[RewardInput]`) takes all samples of a prompt and returns as many numbers.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megasync.examples.tasks import score

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One finished response, as text, and what is known of its prompt."""

    prompt: str
    response: str  # without the end-of-sequence token
    answer: str
    num_tokens: int  # of the response, of an episode its last turn, the end-of-sequence token included
    max_tokens: int  # rollout.max_new_tokens
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)  # the other fields of the data file's line
    line: int = 0  # of the data file, from 1; 0: unknown


def exact_match(sample: RewardInput) -> float:
    """1 where response and answer are equal but for white space around them, else 0; nothing but white space equals nothing."""
    return float(sample.response.strip() == sample.answer.strip() != "")


def token_count(sample: RewardInput) -> float:
    """The share of the allowed tokens that the response used: something to learn with random weights."""
    return sample.num_tokens / sample.max_tokens


MATH = re.compile(r"(?<!\\)\$[^$]+\$|\\\(|\\\[|\\boxed")  # what math-verify takes for the delimiters of LaTeX
COMMAND = re.compile(r"\\(?:text|mbox|mathrm|operatorname|begin|end)\w*\s*\{[^}]*\}|\\[A-Za-z]+")
PROSE = re.compile(r"[A-Za-z]{2,}\s+[A-Za-z]{2,}|[A-Za-z]{3,}[:\s]|\n")
FINAL_LINE = re.compile(r"(?:\A|\n)####([^\n]*)\s*\Z")
ARITHMETIC = re.compile(r"[-+*/=.%$\d\s]*")


def _delimited(text: str) -> str:
    r"""The final answer in `text`; LaTeX without delimiters, in which math-verify finds a number at best, is put into \boxed.

    Where the last line begins with ####, as in GSM8K, it is what follows. Prose and plain numbers stay as they are.
    """
    final = FINAL_LINE.search(text)
    text = (final[1] if final else text).strip()
    is_bare = not (MATH.search(text) or PROSE.search(COMMAND.sub("", text)) or ARITHMETIC.fullmatch(text))
    return f"\\boxed{{{text}}}" if is_bare else text


def math_verify(sample: RewardInput) -> float:
    """1 where the package math-verify finds the response's expression equal to the answer's, else 0.

    Answers may be bare LaTeX, as in MATH's and AIME's answer columns. Where the parser fails, the reward is 0 and the reason is
    logged. Its time limits use signals: outside of the main thread there are none.
    """
    import math_verify as package  # type: ignore[import-untyped]
    from math_verify.errors import TimeoutException  # type: ignore[import-untyped]

    timeout_seconds = 5 if threading.current_thread() is threading.main_thread() else None
    try:
        gold, found = (
            package.parse(_delimited(text), parsing_timeout=timeout_seconds, raise_on_error=True)
            for text in (sample.answer, sample.response)
        )
        return float(package.verify(gold, found, timeout_seconds=timeout_seconds, raise_on_error=True))
    except (Exception, TimeoutException) as error:  # noqa: BLE001 - sympy raises anything on a model's output
        logger.warning("math_verify: 0 for %.80r: %s: %s", sample.response, type(error).__name__, error)
        return 0.0


def reasoning_gym(sample: RewardInput) -> float:
    """From 0 to 1: what the generator of reasoning-gym that made the question says of the answer (megasync/examples/tasks.py).

    The data's lines hold `entry`, as `python -m megasync.assets --task NAME` writes them.
    """
    return score(sample.response, json.loads(sample.extra["entry"]))
