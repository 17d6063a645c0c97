"""Unchanged environments: skyrl-gym's multi-turn GSM8K, and questions of reasoning-gym with several attempts.

Writes data for both, and a small chat model, which after a warm-up solves about half of them: sums, answered as `#### 46` for
skyrl-gym, and reasoning-gym's basic_arithmetic. attempts.py has the episode of the second. Episodes need skyrl-gym (pip install
skyrl-gym); pip installs reasoning-gym when the data is written (data/packages.py).

    python -m examples.gyms --to FOLDER      # model, warm_up*.jsonl, skyrl*.jsonl, reasoning*.jsonl
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.attempts import WRONG
from examples.calculator import write_lines
from examples.chat_calculator import ASSISTANT, USER, build_tokenizer, vocabulary_of
from megasync.data.reasoning_gym import generate_task
from megasync.tools.assets.small_qwen3 import EOS, write_small_qwen3

NUM_HELD_OUT, NUM_TRAIN, NUM_OPERANDS = 60, 1000, 20  # sums of two numbers from 0 to 19
OPTIONS = {"min_terms": 2, "max_terms": 2, "max_digits": 1, "operators": ["+", "-"], "format_style": "simple"}
ENVIRONMENT, MAX_TURNS = "gsm8k_multi_turn", 3
FORM = "#### "  # of an answer to skyrl-gym
TENTATIVE = "include a tentative numeric answer at the end in the exact format: '#### ANSWER'."
AGAIN = f"Please provide your step-by-step reasoning, and also {TENTATIVE}"  # skyrl-gym's message after a wrong answer
AT_LAST = "Now provide only the final numeric answer in the exact format: '#### ANSWER'."  # before the last turn
WORDS = (FORM, WRONG, AGAIN, AT_LAST)  # single tokens


class Skyrl:
    """skyrl-gym's environment for one task."""

    def __init__(self, task: Any) -> None:
        extras = {"reward_spec": {"ground_truth": task.answer}, "max_turns": MAX_TURNS}
        self.environment = importlib.import_module("skyrl_gym").make(ENVIRONMENT, extras=extras)

    def init(self, messages: list[Any]) -> Any:
        return self.environment.init(messages)

    def step(self, action: str) -> Any:
        return self.environment.step(action)

    def get_metrics(self) -> Any:
        return self.environment.get_metrics()


def lines(seed: int) -> dict[str, list[dict[str, str]]]:
    """The lines of each file; held-out questions are in no other file."""
    sums = [(left, right) for left in range(NUM_OPERANDS) for right in range(NUM_OPERANDS)]
    random.Random(seed).shuffle(sums)
    skyrl_lines = [{"question": f"{left}+{right}", "answer": str(left + right)} for left, right in sums]
    train, held_out = generate_task("basic_arithmetic", OPTIONS, NUM_TRAIN, NUM_HELD_OUT, seed)
    found = {"skyrl": skyrl_lines[NUM_HELD_OUT:], "skyrl_held_out": skyrl_lines[:NUM_HELD_OUT]}
    found |= {"reasoning": train, "reasoning_held_out": held_out}
    draw = random.Random(seed)
    for name in ("", "_held_out"):
        own = [turn for line in found[f"skyrl{name}"] for turn in _supervised(line, FORM, AGAIN, draw)]
        found[f"warm_up{name}"] = own + [
            turn for line in found[f"reasoning{name}"] for turn in _supervised(line, "", WRONG, draw)
        ]
    return found


def _supervised(line: dict[str, str], form: str, again: str, draw: random.Random) -> Iterator[dict[str, str]]:
    """Rendered prompts and answers of the first turn, and of a second turn after a random answer."""
    asked, right = f"{USER}{line['question']}{EOS}{ASSISTANT}", form + line["answer"]
    yield {"question": asked, "answer": right}
    other = f"{form}{draw.randrange(2 * NUM_OPERANDS)}"
    yield {"question": f"{asked}{other}{EOS}{USER}{again}{EOS}{ASSISTANT}", "answer": right}


def main(arguments: Sequence[str]) -> int:
    """Write model and data."""
    parser = argparse.ArgumentParser(prog="python -m examples.gyms", description="A model and data for two gyms.")
    parser.add_argument("--to", required=True, type=Path, metavar="FOLDER")
    parser.add_argument("--seed", default=0, type=int)
    given = parser.parse_args(arguments)
    write_small_qwen3(given.to / "model", vocabulary_of(WORDS), given.seed, "float32", max_position_embeddings=512)
    build_tokenizer(WORDS).save_pretrained(given.to / "model")
    write_lines(given.to, lines(given.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
