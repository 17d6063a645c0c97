"""An episode for the report: its branches as turns, each with whose it is; what was given is shown as not trained.

Whose a given text is, is read off the headers of the common chat templates. Leaves out how tokens are coloured (script.py).
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MAX_TEXT = 3000  # characters of a turn
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
    tokens = ""
    if piece.get("token_texts"):
        tokens = f" data-tokens='{len(data)}'"
        data.append({**{name: piece[name] for name in DATA if name in piece}, "version_span": list(span)})
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


def _text(text: str) -> str:
    return html.escape(text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} …")
