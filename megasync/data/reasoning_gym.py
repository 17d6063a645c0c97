"""Tasks of reasoning-gym: over 100 generators of questions, each with a function that scores answers.

The package is installed on first use (packages.py), with a pinned version, so that a seed gives the same questions everywhere.
Leaves out curricula. No torch in here.

    train, held_out = generate_task("chain_sum", {"max_terms": 4, "max_digits": 2}, num_train=4000, num_held_out=256, seed=0)
    score("<answer>12</answer>", entry)      # the reward `reasoning_gym` calls this
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megasync.config.errors import ConfigError, nearest_name
from megasync.data.packages import add_packages

logger = logging.getLogger(__name__)


def reasoning_gym() -> Any:
    """The package, installed by pip if need be.

    Raises:
        ConfigError: pip cannot install it.
    """
    add_packages("reasoning_gym")
    return importlib.import_module("reasoning_gym")


def generate_task(
    task: str, options: Mapping[str, Any], num_train: int, num_held_out: int, seed: int
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """(training lines, held-out lines), each line with question, answer and `entry`, the whole entry as JSON.

    Held-out questions are removed from the training lines, so that these may be fewer than `num_train`.

    Raises:
        ConfigError: the task or one of its options does not exist.
    """
    lines = list(map(_line, _entries(task, {**options, "size": num_held_out + num_train, "seed": seed})))
    held_out = lines[:num_held_out]
    questions = {line["question"] for line in held_out}
    return [line for line in lines[num_held_out:] if line["question"] not in questions], held_out


def _line(entry: Mapping[str, Any]) -> dict[str, str]:
    """`entry` is a JSON text, since its fields differ from task to task; values that JSON lacks become texts."""
    return {"question": entry["question"], "answer": str(entry["answer"]), "entry": json.dumps(entry, default=str)}


def _entries(task: str, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    known = reasoning_gym().factory.DATASETS
    if task not in known:
        near = nearest_name(task, known)
        raise ConfigError(f"--task {task}: reasoning-gym has no such generator", nearest=near, choices=", ".join(sorted(known)))
    try:
        return list(reasoning_gym().create_dataset(task, **options))
    except (TypeError, ValueError, AssertionError) as error:
        choices = ", ".join(field.name for field in fields(known[task][1]))
        remedy = "write --task-options name=value ... with values that the generator takes"
        raise ConfigError(f"--task {task}: {error}", choices=choices, remedy=remedy) from error


@functools.cache
def _scorer(task: str) -> Any:
    return reasoning_gym().get_score_answer_fn(task)


def score(response: str, entry: Mapping[str, Any]) -> float:
    """Score from 0 to 1, by the generator's own `score_answer`. The answer is the text in the last <answer></answer>.

    Without these tags the whole response and its last word, as in "So 7 + 5 is 12.", are both scored, and the better score
    counts. If `score_answer` raises, the score is 0.
    """
    tagged = reasoning_gym().utils.extract_answer(response)
    answers = [tagged] if tagged is not None else [response.strip(), (response.split() or [""])[-1].strip(".,:;!?*$")]
    return max(_score_of(entry["metadata"]["source_dataset"], answer, entry) for answer in answers)


def _score_of(task: str, answer: str, entry: Mapping[str, Any]) -> float:
    scorer = _scorer(task)
    try:
        return float(scorer(answer, entry))
    except Exception as error:  # noqa: BLE001 - some generators read a model's output as if it were in their form
        logger.debug("reasoning_gym: 0 for %.80r of %s: %s: %s", answer, task, type(error).__name__, error)
        return 0.0
