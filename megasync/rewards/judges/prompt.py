"""A sample becomes the messages that a judge gets. No torch in here."""

from __future__ import annotations

from jinja2 import TemplateError

from megasync.config.judge_section import JudgeConfig, compiled
from megasync.rewards.functions import RewardInput

Messages = list[dict[str, str]]


class PromptError(ValueError):
    """A template has no text for a sample, such as one that reads a column that the data's line does not have."""


def messages(judge: JudgeConfig, sample: RewardInput) -> Messages:
    """The turn of the system, if there is one, and that of the user.

    Raises:
        PromptError: the template raised, or read a column that is not there.
    """
    values = {"prompt": sample.prompt, "response": sample.response, "answer": sample.answer, "extra": sample.extra}
    templates = {"system": judge.system, "user": judge.prompt}
    try:
        return [{"role": role, "content": compiled(text).render(values)} for role, text in templates.items() if text]
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise PromptError(f"{type(error).__name__}: {error}") from error
