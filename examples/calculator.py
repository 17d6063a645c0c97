"""A calculator as a tool, with which the quickstart's model can answer products. No torch in here.

Two turns: for 57*68= the model writes <57*68>, gets :3876; and should answer 3876. It has to learn to ask for the right product
and to copy the result. Leaves out the model's folder, which megasync/tools/assets/command.py writes.

    python -m examples.calculator --to FOLDER        # warm_up.jsonl, warm_up_held_out.jsonl, train.jsonl, held_out.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

NUM_OPERANDS, NUM_HELD_OUT = 100, 200
CALL = re.compile(r"<(\d{1,4})\*(\d{1,4})>")
END = "<eos>"  # ends a turn


def calculator(asked: str) -> str:
    """The tool's answer to the text of a turn."""
    call = CALL.fullmatch(asked)
    return f":{int(call[1]) * int(call[2])};" if call else ":?;"


async def episode(task: Any, model: Any) -> float:
    """Reward 1 if the second turn is the product, else 0."""
    asked = await model.complete(task.prompt_ids)
    ids = [*task.prompt_ids, *asked.token_ids, *model.encode(calculator(asked.text))]
    answer = await model.complete(ids)
    return float(answer.text == task.answer)


def pairs_of(seed: int) -> Iterator[tuple[int, int, bool]]:
    """(left, right, is held out) for all pairs of factors, in an order drawn from the seed."""
    pairs = [(left, right) for left in range(NUM_OPERANDS) for right in range(NUM_OPERANDS)]
    random.Random(seed).shuffle(pairs)
    return ((*pair, place < NUM_HELD_OUT) for place, pair in enumerate(pairs))


def lines(seed: int) -> dict[str, list[dict[str, str]]]:
    """The lines of each file; held-out products are in no other file."""
    found: dict[str, list[dict[str, str]]] = {name: [] for name in ("warm_up", "warm_up_held_out", "train", "held_out")}
    for left, right, is_held_out in pairs_of(seed):
        question, call, product = f"{left}*{right}=", f"<{left}*{right}>", str(left * right)
        found["held_out" if is_held_out else "train"].append({"question": question, "answer": product})
        turns = found["warm_up_held_out" if is_held_out else "warm_up"]
        turns.append({"question": question, "answer": call})
        turns.append({"question": f"{question}{call}{END}:{product};", "answer": product})
    return found


def main(arguments: Sequence[str]) -> int:
    return write_files("examples.calculator", lines, arguments)


def write_files(module: str, made: Callable[[int], Mapping[str, Sequence[object]]], arguments: Sequence[str]) -> int:
    """The command line of `module`: writes a JSONL file for each name in the result of `made`, a function of the seed."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="Write the data.")
    parser.add_argument("--to", required=True, type=Path, metavar="FOLDER")
    parser.add_argument("--seed", default=0, type=int)
    given = parser.parse_args(arguments)
    write_lines(given.to, made(given.seed))
    return 0


def write_lines(folder: Path, files: Mapping[str, Sequence[object]]) -> None:
    """Writes a JSONL file for each name, and prints its path and number of lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} lines")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
