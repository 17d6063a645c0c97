"""Prompts whose answers are long, and a reward that tells the answers of one prompt apart: docs/bench/stories.py FILE [NUMBER]

Of a small instruction-tuned model nearly all answers go on to a limit of 500 tokens. With this file's folder on PYTHONPATH the
reward is `rollout.reward=stories:variety`.
"""

from __future__ import annotations

import json
import random
import sys
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megasync.rewards.functions import RewardInput

WHO = ("a lighthouse keeper", "two sisters", "an old engineer", "a young cook", "a travelling judge", "the last librarian", "a retired pilot", "a clockmaker")
WHERE = ("on a frozen lake", "in a city of canals", "at the edge of a desert", "on a night train", "in a mountain village", "below the sea")
WHAT = ("finds a letter", "loses a bet", "hears a strange song", "has to repair a bridge", "meets a stranger", "hides a secret", "builds a machine")
HOW = ("Write a long and detailed story about", "Tell in at least ten paragraphs what happens when", "Write the first chapter of a novel in which")


def variety(sample: RewardInput) -> float:
    """The share of different words."""
    words = sample.response.lower().split()
    return len(set(words)) / len(words) if words else 0.0


def main() -> None:
    number = int(sys.argv[2]) if len(sys.argv) > 2 else 400
    lines = [f"{how} {who} {where} {what}." for how, who, where, what in product(HOW, WHO, WHERE, WHAT)]
    random.Random(0).shuffle(lines)
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"question": line, "answer": ""}) + "\n" for line in lines[:number]), encoding="utf-8")


if __name__ == "__main__":
    main()
