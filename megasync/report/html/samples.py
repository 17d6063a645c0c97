"""Samples for the report: prompt, response and reward, and each token with both log-probs and its version.

An episode is shown as turns with their roles, which are read from the headers of common chat templates; given text is marked as
not trained. Leaves out HTML (page.html) and drawing tokens (report.js).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megasync.config.data_section import TRAIN_SET, TURN_REWARDS
from megasync.report.html.record import Record

MAX_TEXT = 3000  # characters of a prompt, a response or a turn
SHOWN_STEPS = 3  # the first, the last and one between them
MAX_OF_STEP = 2
MAX_PAIRS = 3  # prompts of an evaluation that are shown before and after
DATA = ("token_texts", "rollout_log_probs", "trainer_log_probs", "version_runs")
HEADER = re.compile(
    r"<\|im_start\|>(?P<chatml>\w+)\n?"
    r"|<\|start_header_id\|>(?P<llama>\w+)<\|end_header_id\|>\n*"
    r"|<start_of_turn>(?P<gemma>\w+)\n?"
    r"|<\|(?P<glm>system|user|assistant|tool|tools|observation)\|>\n?"
    r"|\[(?P<mistral>SYSTEM_PROMPT|AVAILABLE_TOOLS|INST|TOOL_RESULTS)\]"
)
NAMES = {
    "model": "assistant",
    "observation": "tool",
    "ipython": "tool",
    "inst": "user",
    "tool_results": "tool",
    "system_prompt": "system",
    "available_tools": "tools",
}
TOOL_RESPONSE = "<tool_response>"  # in user messages of templates without a tool role


@dataclass
class Part:
    """A text with a heading; `tokens`: index of its tokens in the page's data, or None."""

    heading: str
    kind: str  # a CSS class: prompt, response, given
    text: str
    remark: str = ""
    tokens: int | None = None


@dataclass
class Card:
    """One sample. `chips`: (CSS class, text)."""

    chips: list[tuple[str, str]]
    parts: list[Part]
    answer: str


@dataclass
class Section:
    """Cards under a heading; `is_paired`: first and last response to each prompt side by side."""

    heading: str
    cards: list[Card] = field(default_factory=list)
    is_paired: bool = False

    @property
    def has_tokens(self) -> bool:
        return any(part.tokens is not None for card in self.cards for part in card.parts)


def samples(record: Record, data: list[dict[str, Any]], *, is_compared: bool = False) -> list[Section]:
    """Sections of samples. Appends the tokens of the shown samples to `data`. `is_compared`: only samples of the last step."""
    lines = _of_training(record.samples, 1 if is_compared else SHOWN_STEPS)
    heading = "Sampled in training" if any("reward" in line for line in lines) else "Trained on"
    found = [Section(heading, [_card(line, data, f"step {line['step']}") for line in lines])] if lines else []
    for name, pairs in _before_and_after(record.samples).items():
        cards = [_card(line, data, f"after {line['step']} steps") for pair in pairs for line in pair]
        title = "Held out" if name == "held_out" else f"Held out: {name}"
        found.append(Section(f"{title}, first and last evaluation", cards, is_paired=True))
    return found


def _of_training(lines: Sequence[Mapping[str, Any]], num_steps: int) -> list[Mapping[str, Any]]:
    """Lines of training samples of the last, a middle and the first step, in this order; `num_steps` of them."""
    own = [line for line in lines if line.get("set") == TRAIN_SET]
    steps = sorted({line["step"] for line in own})
    chosen = dict.fromkeys(steps[place] for place in (-1, len(steps) // 2, 0)[:num_steps]) if steps else {}
    return [line for step in chosen for line in [line for line in own if line["step"] == step][:MAX_OF_STEP]]


def _before_and_after(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[list[Mapping[str, Any]]]]:
    """First and last response to the first prompts of each evaluation set."""
    of_sets: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for line in lines:
        if line.get("set") not in (None, TRAIN_SET):
            of_sets.setdefault(line["set"], {}).setdefault(line["prompt"], []).append(line)
    return {
        name: [[found[0], found[-1]] if len(found) > 1 else found for found in list(prompts.values())[:MAX_PAIRS]]
        for name, prompts in of_sets.items()
    }


def _card(line: Mapping[str, Any], data: list[dict[str, Any]], when: str) -> Card:
    chips = [("", when)]
    if (reward := line.get("reward")) is not None:
        chips.append(("good" if reward > 0 else "bad", f"reward {reward:.3g}"))
    chips += [("", f"{line['tokens']} tokens")] if "tokens" in line else []
    chips += [("bad", "cut off")] if line.get("finish_reason") == "length" else []
    if versions := line.get("versions"):
        first, last = versions
        chips.append(("", f"version {first if first == last else f'{first} to {last}'}"))
    if "branches" in line:
        return Card([*chips, *_episode_chips(line)], list(branches(line, data)), _cut(line.get("answer")))
    prompt = Part("prompt", "prompt", _cut(line.get("prompt")))
    response = Part("response", "response", _cut(line.get("response")), tokens=_add_tokens(line, data))
    return Card(chips, [prompt, response], _cut(line.get("answer")))


def _add_tokens(piece: Mapping[str, Any], data: list[dict[str, Any]], **more: Any) -> int | None:
    """Appends the piece's tokens to `data`; returns their index, or None if the piece has no tokens."""
    if not piece.get("token_texts"):
        return None
    data.append({name: piece[name] for name in DATA if name in piece} | more)
    return len(data) - 1


def _episode_chips(line: Mapping[str, Any]) -> list[tuple[str, str]]:
    number = line.get("turns", 0)
    chips = [("", f"{number} turn{'s' * (number != 1)}")]
    own = {name: value for name, value in line.get("metrics", {}).items() if isinstance(value, int | float)}
    chips += [("", f"{name} {value:.3g}") for name, value in own.items()]
    rewards = line.get("info", {}).get(TURN_REWARDS)  # an episode may write any value
    if isinstance(rewards, list) and len(rewards) > 1 and all(isinstance(each, int | float) for each in rewards):
        chips.append(("", f"rewards of turns {' + '.join(f'{each:.3g}' for each in rewards)}"))
    failures = line.get("failures")
    return chips + ([("bad", f"{failures} failed before")] if failures else [])


def _cut(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} …"


def branches(line: Mapping[str, Any], data: list[dict[str, Any]]) -> Iterator[Part]:
    """Parts of an episode's branches. Appends the tokens of sampled turns to `data`."""
    found = line["branches"]
    if not any(found):
        yield Part("", "prompt", "it failed before it had tokens")
    versions = [version for pieces in found for piece in pieces for version, _ in piece.get("version_runs", ())]
    span = [min(versions), max(versions)] if versions else []
    for number, pieces in enumerate(found, 1):
        if len(found) > 1:
            yield Part(f"branch {number} of {len(found)}", "", "")
        for piece in pieces:
            if piece["sampled"]:
                tokens = _add_tokens(piece, data, version_span=span)
                yield Part("assistant", "response", _cut(piece["text"]), f"sampled, {piece['tokens']} tokens", tokens)
            else:
                for role, text in given_turns(piece["text"]):
                    yield Part(role, "given", _cut(text), "given, not trained")


def given_turns(text: str) -> list[tuple[str, str]]:
    """(role, text) of each message in a given text; the texts joined are the whole text.

    Text before the first header, such as the end of a sampled turn, belongs to the first message. Without a header the whole text
    has the role `context`.
    """
    starts = [(found.start(), found[found.lastgroup or 0].lower()) for found in HEADER.finditer(text)]
    if not starts:
        return [("context", text)] if text else []
    ends = [place for place, _ in starts[1:]] + [len(text)]
    begins = [0, *ends[:-1]]
    turns = [(NAMES.get(role, role), text[begin:end]) for (_, role), begin, end in zip(starts, begins, ends, strict=True)]
    *turns, (role, last) = [("tool", each) if TOOL_RESPONSE in each else (role, each) for role, each in turns]
    if role == "assistant" and turns:  # the header of the next sampled turn
        turns[-1] = turns[-1][0], turns[-1][1] + last
        return turns
    return [*turns, (role, last)]
