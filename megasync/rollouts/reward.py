"""Rewards by name: what one response is worth. `rollout.reward` names one of these, or a function of your own.

Leaves out advantages, which the loss makes of the rewards of a group. No torch in here.

    reward = resolve_reward("exact_match")               # or "my_package.my_module:my_reward"
    reward(RewardInput(prompt="12+34=", response="46", answer="46", num_tokens=3, max_tokens=4))   # 1.0

A function of your own takes one RewardInput and returns a finite number.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megasync.config.errors import ConfigError, explain, nearest_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One finished response, as text, and what is known of its prompt."""

    prompt: str
    response: str  # without the end-of-sequence token
    answer: str
    num_tokens: int  # of the response, the end-of-sequence token included
    max_tokens: int  # rollout.max_new_tokens


RewardFunction = Callable[[RewardInput], float]


def exact_match(sample: RewardInput) -> float:
    """1 where response and answer are equal but for white space around them, else 0."""
    return float(sample.response.strip() == sample.answer.strip())


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


REWARDS: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "math_verify": math_verify,
    "token_count": token_count,
}
IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
PATH_REMEDY = "write rollout.reward=exact_match, or a function as rollout.reward=my_package.my_module:my_reward"


def resolve_reward(name: str) -> RewardFunction:
    """The function of that name, imported if need be; it raises ValueError where its result is no finite number.

    Raises:
        ConfigError: there is no such function, or it does not take one RewardInput.
    """
    function = REWARDS.get(name) or _import_function(name)

    def checked(sample: RewardInput) -> float:
        value = function(sample)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            message = f"the reward {name} returned {value!r}, a finite number is expected"
            raise ValueError(explain(message, prompt=f"{sample.prompt:.80}", response=f"{sample.response:.80}"))
        return number

    return checked


def _import_function(path: str) -> RewardFunction:
    headline = f"rollout.reward = {path!r}"
    if not IMPORT_PATH.fullmatch(path):
        choices = ", ".join([*REWARDS, "package.module:function"])
        near = nearest_name(path, REWARDS)
        raise ConfigError(f"{headline}: there is no such reward", choices=choices, nearest=near, remedy=PATH_REMEDY)
    module_name, _, function_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        remedy = "start where the module can be imported, or set PYTHONPATH"
        raise ConfigError(f"{headline}: cannot be imported: {type(error).__name__}: {error}", remedy=remedy) from error
    function: Any = getattr(module, function_name, None)
    if function is None:
        problem = f"is not in {module.__file__}"
    elif not callable(function) or inspect.isclass(function) or inspect.iscoroutinefunction(function):
        problem = "is no ordinary function"
    else:
        problem = _wrong_arguments(function)
    if problem:
        near = nearest_name(function_name, [name for name, value in vars(module).items() if inspect.isfunction(value)])
        remedy = "name a function that takes one RewardInput and returns a number"
        raise ConfigError(f"{headline}: {function_name} {problem}", nearest=near, remedy=remedy)
    return function  # type: ignore[no-any-return]


def _wrong_arguments(function: RewardFunction) -> str:
    try:
        inspect.signature(function).bind("a RewardInput")
    except TypeError as error:
        return f"cannot be called with one argument: {error}"
    except ValueError:  # a function of C that does not tell
        return ""
    return ""
