"""The error of a reward without a number: it names the reward, the reason and the sample, with the user's own traceback."""

from __future__ import annotations

from collections.abc import Sequence

from megasync.config.errors import explain
from megasync.rewards.functions import RewardInput
from megasync.workers.failure import Failure

SHOWN = 300  # characters of a text


class RewardError(RuntimeError):
    """A reward has no number for a sample, or no worker can be started."""


def describe(name: str, failure: Failure, samples: Sequence[RewardInput], remedy: str) -> str:
    """The error's text."""
    first = samples[0]
    headline = explain(
        f"the reward {name} {failure.what}",
        samples=f"{len(samples)} of one prompt; the first one is shown" if len(samples) > 1 else "",
        data_line=first.place.removeprefix("line ") or str(first.line or ""),
        prompt=shown(first.prompt),
        answer=shown(first.answer),
        response=shown(first.response),
        remedy=remedy,
    )
    return f"{headline}\n{failure.details}".strip()


def shown(text: str) -> str:
    """The text on one line; of a long one the beginning and the end."""
    if len(text) > SHOWN:
        half = SHOWN // 2
        return f"{text[:half]!r} ... {text[-half:]!r} ({len(text)} characters)"
    return repr(text)
