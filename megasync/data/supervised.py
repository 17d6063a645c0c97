"""A conversation as pieces of text. The assistant's turns are trained, each behind the prompt that a rollout would get.

For each assistant turn the template renders the messages before it as a prompt; the text that it adds for the turn, up to the
end token, is trained. The next turn continues the same sequence if its prompt begins with the text so far. If not, because the
template drops earlier thinking or renders the last turn differently, a new sequence (branch) begins, as in episodes, with the
earlier turns in its prompt. So each turn is trained once.

Leaves out tokens (prompts.py). No torch in here.

    branches(render, messages, completion, Form(template.turn, ("<|im_end|>",)), place="line 3")
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from megasync.config.errors import ConfigError, refuse_if
from megasync.data.conversations import RENDERED, Message
from megasync.data.template import TurnForm


class Render(Protocol):
    """Renders messages with the chat template; `generate`: with the beginning of the assistant's next turn."""

    def __call__(self, turns: Sequence[Message], *, generate: bool) -> str: ...


class Form(NamedTuple):
    """The template's form of a turn, and the texts of all tokens that end one."""

    turn: TurnForm
    ends: tuple[str, ...]


class Piece(NamedTuple):
    """A text, and whether it is trained; `needs_end`: the template writes no end token, so that the caller must add one."""

    text: str
    is_trained: bool
    needs_end: bool = False


def branches(
    render: Render, messages: Sequence[Message], completion: Sequence[Message], form: Form, place: str
) -> list[list[Piece]]:
    """One list of pieces per training sequence; the first piece is the prompt. `messages`: the messages before the completion.

    Raises:
        ConfigError: the text of a turn does not begin with the prompt that the template renders for it.
    """
    found, so_far, history = list[list[Piece]](), "", list(messages)
    for message in completion:
        if message["role"] == "assistant":
            prompt = render(history, generate=True)
            rest = prompt[len(so_far) :] if found and prompt.startswith(so_far) else ""
            if rest and found[-1][-1].needs_end:  # GLM's turns end with the token that begins the next one
                end = next((each for each in form.ends if rest.startswith(each)), "")
                found[-1][-1] = Piece(found[-1][-1].text + end, is_trained=True, needs_end=not end)
                rest = rest[len(end) :] if end else ""
            answer, is_closed = _answer(render, history, message, prompt, form, place)
            if not is_closed and message.get("tool_calls"):
                end = _end_of_calls(render, [*history, message], prompt + answer, form.ends)
                answer, is_closed = answer + end, bool(end)
            if rest:
                found[-1].append(Piece(rest, is_trained=False))
            else:
                found.append([Piece(prompt, is_trained=False)])
            found[-1].append(Piece(answer, is_trained=True, needs_end=not is_closed))
            so_far = prompt + answer
        history.append(message)
    return found


def _end_of_calls(render: Render, history: Sequence[Message], so_far: str, ends: Sequence[str]) -> str:
    """The token that ends a turn with calls, if the template writes it as the beginning of their results, as GLM's does."""
    call = history[-1]["tool_calls"][-1]
    result = {"role": "tool", "content": "0"} | ({"tool_call_id": call["id"]} if call.get("id") else {})
    with contextlib.suppress(ConfigError):  # of a template that wants another form of results
        behind = render([*history, result], generate=True)
        return next((end for end in ends if behind.startswith(so_far + end)), "")
    return ""


def _answer(
    render: Render, history: Sequence[Message], message: Message, prompt: str, form: Form, place: str
) -> tuple[str, bool]:
    """The text that the model would sample, and whether it ends with an end token."""
    turn, whole = form.turn, render([*history, message], generate=False)
    if whole.startswith(prompt):
        text = whole[len(prompt) :]
        for end in form.ends:
            before, found, behind = text.rpartition(end)
            if found and not behind.strip():
                return before + found, True
        return text.removesuffix(turn.close), False
    more = next((name for name in RENDERED if message.get(name)), "")
    remedy = "remove the line, or use a template whose generation prompt begins an assistant's turn as the template renders it"
    problem = f"{place}: the model's chat template begins an answer with other text than it writes for an assistant's turn with "
    refuse_if(more, problem + repr(more), begins=repr(prompt[-60:]), writes=repr(whole[-60:]), remedy=remedy)
    return f"{turn.lead}{message['content']}{turn.trained_close}", bool(turn.end)
