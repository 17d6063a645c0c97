"""math_verify beside math-verify alone, on the pairs of answers.jsonl.

python -m tests.megasync.rewards.compare_answers      # a table: wrong accepted, right rejected, milliseconds of CPU a pair
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megasync.rewards.answers import formulas
from megasync.rewards.functions import RewardInput, math_verify


class Pair(NamedTuple):
    """An answer as a data set has it, a response, and whether it is right."""

    origin: str  # development: written along with the code; held out: written before the code was first run on it
    shape: str  # the data set whose answers have this shape
    gold: str
    response: str
    is_right: bool


def pairs() -> list[Pair]:
    lines = (Path(__file__).parent / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    return [Pair(*json.loads(line)) for line in lines]


def ours(gold: str, response: str) -> bool:
    return math_verify(RewardInput("1+1=", response, gold, 2, 8)) == 1


def alone(gold: str, response: str) -> bool:
    """As its README has it."""
    from math_verify import parse, verify  # type: ignore[import-untyped]

    return bool(verify(parse(gold), parse(response)))


def wrong(judge: Callable[[str, str], bool], given: list[Pair]) -> tuple[list[Pair], list[Pair]]:
    """The pairs that are accepted though they are wrong, and those that are rejected though they are right."""
    judged = [(pair, judge(pair.gold, pair.response)) for pair in given]
    accepted = [pair for pair, is_accepted in judged if is_accepted and not pair.is_right]
    return accepted, [pair for pair, is_accepted in judged if not is_accepted and pair.is_right]


def main() -> None:
    logging.disable(logging.CRITICAL)
    given = pairs()
    print("| pairs | | right, wrong | math_verify: accepted, rejected, ms | math-verify alone: accepted, rejected, ms |")
    print("|---|---|---|---|---|")
    for judge in (ours, alone):  # imports, and what the parser learns of its grammar
        wrong(judge, given)
    groups = [(pair.origin, "all") for pair in given] + [("all", pair.shape) for pair in given if pair.shape] + [("all", "all")]
    for origin, shape in dict.fromkeys(groups):
        of = [pair for pair in given if origin in {"all", pair.origin} and shape in {"all", pair.shape}]
        cells = []
        for judge in (ours, alone):
            formulas._parsed.cache_clear()
            begin = time.process_time()
            accepted, rejected = wrong(judge, of)
            cells.append(f"{len(accepted)}, {len(rejected)}, {(time.process_time() - begin) / len(of) * 1e3:.1f}")
        num_right = sum(pair.is_right for pair in of)
        print(f"| {origin} | {shape} | {num_right}, {len(of) - num_right} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
