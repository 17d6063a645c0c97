"""The input of a reward, and the rewards that have a name. `rollout.reward` names one of these, or functions of your own.

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
from operator import attrgetter
from typing import Any

from megasync.data.reasoning_gym import score
from megasync.rewards.answers.equal import equal, same_text
from megasync.rewards.answers.read import after_thinking, opens_thinking, read_answer

logger = logging.getLogger(__name__)

MATH_SECONDS = 5  # for one sample
WORKED = re.compile(r"\n|\\boxed|####|answer", re.IGNORECASE)  # in a solution; a bare answer has none of these


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One finished response, as text, with its prompt's fields."""

    prompt: str
    response: str  # without the end-of-sequence token
    answer: str
    num_tokens: int  # of the response, of an episode its last turn, the end-of-sequence token included
    max_tokens: int  # rollout.max_new_tokens
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)  # the other fields of the data file's line
    line: int = 0  # of the data file, from 1; 0: unknown
    thinking: bool = False  # the prompt, as the template renders it, ends within the thinking: <think>
    source: str = ""  # the name of the prompt's source in data.train, where there are several
    place: str = ""  # of the line, in words: with its file, where the data have several
    rewards: tuple[str, ...] = ()  # names of rollout.reward that score it; empty: all

    def is_scored_by(self, reward: str) -> bool:
        """Whether a reward of `rollout.reward` scores it."""
        return not self.rewards or reward in self.rewards

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as a call: twice as fast as the fields by name, which dataclasses write for frozen classes with slots."""
        return RewardInput, FIELDS(self)


FIELDS = attrgetter(*RewardInput.__slots__)


def exact_match(sample: RewardInput) -> float:
    """1 where response and answer are equal but for white space around them, else 0; nothing but white space equals nothing."""
    return float(sample.response.strip() == sample.answer.strip() != "")


def token_count(sample: RewardInput) -> float:
    """The share of the allowed tokens that the response used: something to learn with random weights."""
    return sample.num_tokens / sample.max_tokens


def math_verify(sample: RewardInput) -> float:
    """1 where the answer in the response (answers/read.py) is equal to the data's (answers/equal.py), else 0.

    The data's answer is bare, as in MATH's and AIME's answer columns, or a worked solution, in which it is read as in a response.
    math-verify judges formulas. Where it fails, the reward is 0 and the reason is logged. The time limit uses a signal: outside
    of the main thread there is none.
    """
    found = read_answer(sample.response, in_thinking=sample.thinking or opens_thinking(sample.prompt))
    if found is None:
        return 0.0
    gold = read_answer(sample.answer) or sample.answer
    if same_text(sample.answer, found) or (gold == found and sample.answer.strip() in sample.response):
        return 1.0
    gold = gold if WORKED.search(sample.answer) else sample.answer
    if same_text(gold, found):
        return 1.0
    from math_verify.errors import TimeoutException  # type: ignore[import-untyped] # takes half a second
    from math_verify.utils import timeout  # type: ignore[import-untyped]

    limit = MATH_SECONDS if threading.current_thread() is threading.main_thread() else None
    try:
        return float(timeout(limit)(equal)(gold, found))
    except (Exception, TimeoutException) as error:  # noqa: BLE001 - sympy raises anything on a model's output
        logger.warning("math_verify: 0 for %.80r: %s: %s", sample.response, type(error).__name__, error)
        return 0.0


def reasoning_gym(sample: RewardInput) -> float:
    """The score, 0 to 1, of the answer by the question's generator of reasoning-gym (data/reasoning_gym.py).

    What answers/read.py reads counts, and what follows the thinking as a whole, since some generators take more than a value.

    The data's lines hold `entry`, as `python -m megasync assets --task NAME` writes them.
    """
    is_open, entry = sample.thinking or opens_thinking(sample.prompt), json.loads(sample.extra["entry"])
    found = read_answer(sample.response, in_thinking=is_open)
    if found is None:
        return 0.0
    return max(
        score(f"<answer>{found}</answer>", entry), score(after_thinking(sample.response, in_thinking=is_open) or "", entry)
    )
