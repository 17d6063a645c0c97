"""A conversation as pieces of text. The assistant's turns are trained, each behind the prompt that a rollout would get.

For each of these turns the template renders the messages before it as a prompt; what it writes behind that for it, up to the
token that ends it, is trained. The next turn goes on in the same sequence where its prompt begins with the text so far. Where it
does not, because the template drops earlier thinking or writes the last turn in its own way, a branch begins, as in episodes: the
earlier turns are a part of its prompt. So each turn is trained once.

Leaves out tokens (prompts.py). No torch in here.

    branches(render, messages, completion, Form(template.turn, ("<|im_end|>",)), line=3)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from megasync.config.errors import refuse_if
from megasync.data.conversations import RENDERED, Message
from megasync.data.template import TurnForm


class Render(Protocol):
    """Messages by the chat template; `generate`: with the beginning of the assistant's next turn."""

    def __call__(self, turns: Sequence[Message], *, generate: bool) -> str: ...


class Form(NamedTuple):
    """How the template writes a turn, and the texts of all tokens that end one."""

    turn: TurnForm
    ends: tuple[str, ...]


class Piece(NamedTuple):
    """A text, and whether it is trained; `needs_end`: the template ends no turn, and the end of the sequence is to follow."""

    text: str
    is_trained: bool
    needs_end: bool = False


def branches(
    render: Render, messages: Sequence[Message], completion: Sequence[Message], form: Form, line: int
) -> list[list[Piece]]:
    """One list of pieces a sequence, its prompt the first. `messages`: those before the completion; their turns are trained.

    Raises:
        ConfigError: the template does not write a turn behind the prompt that the model would answer.
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
            said, is_closed = _answer(render, history, message, prompt, form, line)
            if rest:
                found[-1].append(Piece(rest, is_trained=False))
            else:
                found.append([Piece(prompt, is_trained=False)])
            found[-1].append(Piece(said, is_trained=True, needs_end=not is_closed))
            so_far = prompt + said
        history.append(message)
    return found


def _answer(render: Render, history: Sequence[Message], message: Message, prompt: str, form: Form, line: int) -> tuple[str, bool]:
    """What the model would sample, and whether the template ends it with a token."""
    turn, whole = form.turn, render([*history, message], generate=False)
    if whole.startswith(prompt):
        said = whole[len(prompt) :]
        for end in form.ends:
            before, found, behind = said.rpartition(end)
            if found and not behind.strip():
                return before + found, True
        return said.removesuffix(turn.close), False
    more = next((name for name in RENDERED if message.get(name)), "")
    remedy = "take the line out, or give the tokenizer a template that begins an answer as it writes one"
    text = f"line {line}: the model's chat template begins an answer with other text than it writes for an assistant's turn with "
    refuse_if(more, text + repr(more), begins=repr(prompt[-60:]), writes=repr(whole[-60:]), remedy=remedy)
    return f"{turn.lead}{message['content']}{turn.trained_close}", bool(turn.end)
