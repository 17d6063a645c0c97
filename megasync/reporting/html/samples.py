"""Samples for the report: prompt, response and reward, and each token with the log-probs of both sides and its version.

An episode is its branches as turns, each with whose it is, read off the headers of the common chat templates; what was given is
shown as not trained. Leaves out how tokens are drawn and coloured (script.py).
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megasync.config.data_section import TRAIN_SET, TURN_REWARDS
from megasync.reporting.html.record import Record

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
TOOL_RESPONSE = "<tool_response>"  # of templates that know no tools: within a message of the user
LEGEND = (
    "<p class='legend'>Colour tokens by "
    "<button data-by='gap' aria-pressed='true'>log-prob gap</button>"
    "<button data-by='version' aria-pressed='false'>version</button>"
    "<button data-by='probability' aria-pressed='false'>probability</button>"
    "<button data-by='' aria-pressed='false'>nothing</button> <span class='scale'></span></p>"
    "<p class='token-told' aria-live='polite'>Point at a token, or tap it, for its figures.</p>"
)


def samples(record: Record, data: list[dict[str, Any]], *, is_compared: bool = False) -> str:
    """HTML; to `data` come the tokens of those samples in it that have them: its n-th is of `data-tokens` n.

    `is_compared`: of the last step alone.
    """
    lines = _of_training(record.samples, 1 if is_compared else SHOWN_STEPS)
    trained = [_card(line, data, f"step {line['step']}") for line in lines]
    has_tokens = any("data-tokens" in card for card in trained)
    legend = LEGEND if has_tokens else ""
    cards = f"<div class='samples'>{''.join(trained)}</div>"
    heading = "Sampled in training" if any("reward" in line for line in lines) else "Trained on"
    parts = [f"<h3>{heading}</h3>{legend}{cards}"] if trained else []
    for name, pairs in _before_and_after(record.samples).items():
        cards = "".join(_card(line, data, f"after {line['step']} steps") for pair in pairs for line in pair)
        title = "Held out" if name == "held_out" else f"Held out: {html.escape(name)}"
        parts.append(f"<h3>{title}, first and last evaluation</h3><div class='samples pairs'>{cards}</div>")
    return "".join(parts)


def _of_training(lines: Sequence[Mapping[str, Any]], num_steps: int) -> list[Mapping[str, Any]]:
    """The last steps first: what the policy writes now is looked at most."""
    own = [line for line in lines if line.get("set") == TRAIN_SET]
    steps = sorted({line["step"] for line in own})
    chosen = dict.fromkeys(steps[place] for place in (-1, len(steps) // 2, 0)[:num_steps]) if steps else {}
    return [line for step in chosen for line in [line for line in own if line["step"] == step][:MAX_OF_STEP]]


def _before_and_after(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[list[Mapping[str, Any]]]]:
    """For each evaluation set the first prompts with their first and their last response."""
    of_sets: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for line in lines:
        if line.get("set") not in (None, TRAIN_SET):
            of_sets.setdefault(line["set"], {}).setdefault(line["prompt"], []).append(line)
    return {
        name: [[found[0], found[-1]] if len(found) > 1 else found for found in list(prompts.values())[:MAX_PAIRS]]
        for name, prompts in of_sets.items()
    }


def _card(line: Mapping[str, Any], data: list[dict[str, Any]], when: str) -> str:
    reward = line.get("reward")
    chips = [f"<span class='chip'>{html.escape(when)}</span>"]
    if reward is not None:
        kind = "good" if reward > 0 else "bad"
        chips.append(f"<span class='chip {kind}'>reward {reward:.3g}</span>")
    chips += [f"<span class='chip'>{line['tokens']} tokens</span>"] if "tokens" in line else []
    chips += ["<span class='chip bad'>cut off</span>"] if line.get("finish_reason") == "length" else []
    if versions := line.get("versions"):
        first, last = versions
        chips.append(f"<span class='chip'>version {first if first == last else f'{first} to {last}'}</span>")
    if "branches" in line:
        chips += _episode_chips(line)
        body = branches(line, data)
    else:
        body = _response(line, data)
    return (
        f"<article class='sample'><header>{''.join(chips)}</header>{body}"
        f"<footer>answer <code>{_text(line.get('answer'))}</code></footer></article>"
    )


def _response(line: Mapping[str, Any], data: list[dict[str, Any]]) -> str:
    return (
        f"<h4>prompt</h4><pre class='prompt'>{_text(line.get('prompt'))}</pre>"
        f"<h4>response</h4><pre class='response'{_with_tokens(line, data)}>{_text(line.get('response')) or '<i>empty</i>'}</pre>"
    )


def _with_tokens(piece: Mapping[str, Any], data: list[dict[str, Any]], **more: Any) -> str:
    """The attribute that leads to its tokens, which come to `data`; empty where it has none."""
    if not piece.get("token_texts"):
        return ""
    data.append({name: piece[name] for name in DATA if name in piece} | more)
    return f" data-tokens='{len(data) - 1}'"


def _episode_chips(line: Mapping[str, Any]) -> list[str]:
    number = line.get("turns", 0)
    chips = [f"<span class='chip'>{number} turn{'s' * (number != 1)}</span>"]
    own = {name: value for name, value in line.get("metrics", {}).items() if isinstance(value, int | float)}
    chips += [f"<span class='chip'>{html.escape(str(name))} {value:.3g}</span>" for name, value in own.items()]
    rewards = line.get("info", {}).get(TURN_REWARDS)  # which an episode may have filled with anything
    if isinstance(rewards, list) and len(rewards) > 1 and all(isinstance(each, int | float) for each in rewards):
        chips.append(f"<span class='chip'>rewards of turns {' + '.join(f'{each:.3g}' for each in rewards)}</span>")
    failures = line.get("failures")
    return chips + ([f"<span class='chip bad'>{failures} failed before</span>"] if failures else [])


def _text(value: object) -> str:
    text = "" if value is None else str(value)
    return html.escape(text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} …")


def branches(line: Mapping[str, Any], data: list[dict[str, Any]]) -> str:
    """HTML; to `data` come the tokens of sampled turns."""
    found = line["branches"]
    runs = [run for pieces in found for piece in pieces for run in piece.get("version_runs", ())]
    span = [min(version for version, _ in runs), max(version for version, _ in runs)] if runs else []
    parts = []
    for number, pieces in enumerate(found, 1):
        head = f"<h4>branch {number} of {len(found)}</h4>" if len(found) > 1 else ""
        parts.append(head + "".join(turn for piece in pieces for turn in _turns(piece, data, span)))
    return "".join(parts) or "<p class='prompt'><i>it failed before it had tokens</i></p>"


def _turns(piece: Mapping[str, Any], data: list[dict[str, Any]], span: Sequence[int]) -> Iterator[str]:
    """Several of a given piece: one for each message in it."""
    if not piece["sampled"]:
        for role, text in given_turns(piece["text"]):
            yield f"<h4>{role} <i>given, not trained</i></h4><pre class='given'>{_text(text)}</pre>"
        return
    tokens = _with_tokens(piece, data, version_span=list(span))
    yield f"<h4>assistant <i>sampled, {piece['tokens']} tokens</i></h4>"
    yield f"<pre class='response'{tokens}>{_text(piece['text']) or '<i>empty</i>'}</pre>"


def given_turns(text: str) -> list[tuple[str, str]]:
    """Role and text of each message of a given text, joined they are the text.

    What comes before the first header, such as the end of a sampled turn, belongs to the first message. Without any header it is
    one text whose role is unknown.
    """
    starts = [(found.start(), found[found.lastgroup or 0].lower()) for found in HEADER.finditer(text)]
    if not starts:
        return [("context", text)] if text else []
    ends = [place for place, _ in starts[1:]] + [len(text)]
    begins = [0, *ends[:-1]]
    turns = [(NAMES.get(role, role), text[begin:end]) for (_, role), begin, end in zip(starts, begins, ends, strict=True)]
    *turns, (role, last) = [("tool", each) if TOOL_RESPONSE in each else (role, each) for role, each in turns]
    if role == "assistant" and turns:  # the header of what is sampled next
        turns[-1] = turns[-1][0], turns[-1][1] + last
        return turns
    return [*turns, (role, last)]
