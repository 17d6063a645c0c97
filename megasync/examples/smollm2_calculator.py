"""A calculator for SmolLM2-135M-Instruct: products of two-digit numbers, which it cannot do, by calls that it seldom gets right.

A conversation of two turns comes before each question, as an example: the model writes CALC(12 * 31), is told 372, and answers
372. Untrained it gets about one call in five right, and nearly every answer after a right call. No torch in here. Leaves out the
model's folder (megasync/assets.py).

    python -m megasync.examples.smollm2_calculator --to FOLDER        # products.jsonl, products_held_out.jsonl
    rollout: {episode: megasync.examples.smollm2_calculator:episode, episode_max_turns: 2}
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megasync.examples.calculator import pairs_of

LEAST = 10  # of both factors; the most is 99
CALL = re.compile(r"CALC\((\d{1,4}) \* (\d{1,4})\)")
EXAMPLE = ((12, 31),)


async def episode(task: Any, model: Any) -> float:
    """1 where the turn after the call is the product, else 0."""
    messages: list[Any] = [{"role": role, "content": content} for role, content in task.turns]
    asked = await model.chat(messages)
    call = CALL.fullmatch(asked.content)
    if call is None:
        return 0.0
    messages += [asked, {"role": "user", "content": str(int(call[1]) * int(call[2]))}]
    answer = await model.chat(messages)
    return float(answer.content == task.answer)


def conversation(left: int, right: int) -> list[dict[str, str]]:
    """The prompt: what an example looks like, and the question."""
    told: list[tuple[str, str]] = []
    for one, other in EXAMPLE:
        product = str(one * other)
        told += [("user", _question(one, other)), ("assistant", f"CALC({one} * {other})")]
        told += [("user", product), ("assistant", product)]
    told.append(("user", _question(left, right)))
    return [{"role": role, "content": content} for role, content in told]


def _question(left: int, right: int) -> str:
    return f"What is {left} * {right}?"


def lines(seed: int) -> dict[str, list[dict[str, Any]]]:
    """Of each file; what is held out is not in the other one, nor is the example in any."""
    found: dict[str, list[dict[str, Any]]] = {"products": [], "products_held_out": []}
    for left, right, is_held_out in pairs_of(seed):
        if min(left, right) >= LEAST and (left, right) not in EXAMPLE:
            line = {"question": conversation(left, right), "answer": str(left * right)}
            found["products_held_out" if is_held_out else "products"].append(line)
    return found


def main(arguments: Sequence[str]) -> int:
    """Write the files."""
    parser = argparse.ArgumentParser(prog="python -m megasync.examples.smollm2_calculator", description="Write the data.")
    parser.add_argument("--to", required=True, type=Path, metavar="FOLDER")
    parser.add_argument("--seed", default=0, type=int)
    given = parser.parse_args(arguments)
    given.to.mkdir(parents=True, exist_ok=True)
    for name, rows in lines(given.seed).items():
        (given.to / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
