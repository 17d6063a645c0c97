"""A calculator for SmolLM2-135M-Instruct: products of two-digit numbers, which it cannot compute, by calls of a tool.

An example conversation of two turns precedes each question: the model writes CALC(12 * 31), gets 372, and answers 372. Untrained
it writes about one correct call in five, and nearly always answers correctly after one. No torch in here. Leaves out the model's
folder (megasync/tools/assets/command.py).

    python -m examples.smollm2_calculator --to FOLDER        # products.jsonl, products_held_out.jsonl
    rollout: {episode: examples.smollm2_calculator:episode, episode_max_turns: 2}
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

from examples.calculator import pairs_of, write_files

MIN_FACTOR = 10  # the largest factor is 99
CALL = re.compile(r"CALC\((\d{1,4}) \* (\d{1,4})\)")
EXAMPLE = ((12, 31),)


async def episode(task: Any, model: Any) -> float:
    """Reward 1 if the turn after the call is the product, else 0."""
    messages: list[Any] = [{"role": role, "content": content} for role, content in task.turns]
    asked = await model.chat(messages)
    call = CALL.fullmatch(asked.content)
    if call is None:
        return 0.0
    messages += [asked, {"role": "user", "content": str(int(call[1]) * int(call[2]))}]
    answer = await model.chat(messages)
    return float(answer.content == task.answer)


def conversation(left: int, right: int) -> list[dict[str, str]]:
    """The prompt: the example conversation, and the question."""
    turns: list[tuple[str, str]] = []
    for one, other in EXAMPLE:
        product = str(one * other)
        turns += [("user", _question(one, other)), ("assistant", f"CALC({one} * {other})")]
        turns += [("user", product), ("assistant", product)]
    turns.append(("user", _question(left, right)))
    return [{"role": role, "content": content} for role, content in turns]


def _question(left: int, right: int) -> str:
    return f"What is {left} * {right}?"


def lines(seed: int) -> dict[str, list[dict[str, Any]]]:
    """The lines of each file; held-out products are not in the other file, and the example is in none."""
    found: dict[str, list[dict[str, Any]]] = {"products": [], "products_held_out": []}
    for left, right, is_held_out in pairs_of(seed):
        if min(left, right) >= MIN_FACTOR and (left, right) not in EXAMPLE:
            line = {"question": conversation(left, right), "answer": str(left * right)}
            found["products_held_out" if is_held_out else "products"].append(line)
    return found


def main(arguments: Sequence[str]) -> int:
    return write_files("examples.smollm2_calculator", lines, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
