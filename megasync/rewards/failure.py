"""What is said of a reward that fails: what the user's function did, with the sample that it was given.

the reward my.module:my_reward raised ZeroDivisionError: division by zero
  data line: 17
  prompt:    '1+1='
  ...
"""

from __future__ import annotations

from collections.abc import Sequence

from megasync.config.errors import explain
from megasync.rewards.functions import RewardInput
from megasync.rewards.wire import Failure

SHOWN = 300  # characters of a text


class RewardError(RuntimeError):
    """A reward has no number for a sample; the text names reward, reason and sample, with the user's own traceback."""


def describe(name: str, failure: Failure, samples: Sequence[RewardInput], remedy: str) -> str:
    """The error's text."""
    first = samples[0]
    headline = explain(
        f"the reward {name} {failure.what}",
        samples=f"{len(samples)} of one prompt, of which this is the first" if len(samples) > 1 else "",
        data_line=str(first.line or ""),
        prompt=shown(first.prompt),
        answer=shown(first.answer),
        response=shown(first.response),
        remedy=remedy,
    )
    return f"{headline}\n{failure.details}".strip()


def shown(text: str) -> str:
    """The text on one line; of a long one beginning and end."""
    if len(text) > SHOWN:
        half = SHOWN // 2
        return f"{text[:half]!r} ... {text[-half:]!r} ({len(text)} characters)"
    return repr(text)
