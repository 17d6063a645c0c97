"""Examples answered by replicas and scored by rewards, just as a run's own evaluations are (rollouts/evaluation.py).

Leaves out which examples there are, and the replicas (replicas.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from megasync.config.errors import ConfigError
from megasync.config.schema import Config
from megasync.episodes.task import EpisodeResult
from megasync.rewards.judges.judge import Judges
from megasync.rewards.pool import RewardPool
from megasync.rollouts.evaluation import Evaluation
from megasync.rollouts.requests import begins_thinking, reward_inputs, sample_line

if TYPE_CHECKING:
    from bridge.generation import Completion
    from megasync.data.prompts import Prompts
    from megasync.rewards.functions import RewardInput

Answers = Sequence[Sequence["Completion | EpisodeResult"]]


def score(config: Config, evaluation: Evaluation, prompts: Prompts, answers: Answers) -> list[list[float]]:
    """By `rollout.reward`; an episode's own reward comes first.

    Raises:
        RewardError: a reward failed, and rollout.reward_on_failure is stop.
    """
    limit, inputs = evaluation.sampling.max_new_tokens, list[list["RewardInput"]]()
    for example, group in zip(evaluation.examples, answers, strict=True):
        asked = [one for one in group if own_reward(one) is None]
        ids = [np.array(one.final_ids, np.int32) if isinstance(one, EpisodeResult) else one.token_ids for one in asked]
        thinking = begins_thinking(prompts, example)
        inputs.append(reward_inputs(example, asked, prompts.texts(ids), limit, thinking=thinking) if asked else [])
    scored: list[list[float]] = asyncio.run(_score_all(config, inputs)) if any(inputs) else [[] for _ in inputs]
    rewards = [iter(of_group) for of_group in scored]
    pairs = zip(answers, rewards, strict=True)
    return [[next(found) if (own := own_reward(one)) is None else own for one in group] for group, found in pairs]


def own_reward(done: Completion | EpisodeResult) -> float | None:
    """The reward that an episode gave itself."""
    return done.reward if isinstance(done, EpisodeResult) else None


async def _score_all(config: Config, groups: list[list[RewardInput]]) -> list[list[float]]:
    with RewardPool(config.rollout, Judges(config.judges)) as rewards:
        try:
            scored = iter(await asyncio.gather(*map(rewards.score_group, filter(None, groups))))
        finally:
            await rewards.judges.close()
    return [[each.total for each in next(scored)] if group else [] for group in groups]


def lines(
    evaluation: Evaluation, prompts: Prompts, answers: Answers, rewards: Sequence[Sequence[float]] | None
) -> Iterator[dict[str, Any]]:
    """One for each response, as in samples.jsonl; without rewards where there are none."""
    for place, (example, group) in enumerate(zip(evaluation.examples, answers, strict=True)):
        for sample, completion in enumerate(group):
            reward = rewards[place][sample] if rewards is not None else 0.0
            line = {**sample_line(prompts, example, completion, reward, evaluation.name), "sample": sample}
            left_out = ("versions", *(("reward", "set") if rewards is None else ()))
            yield {name: value for name, value in line.items() if name not in left_out}


def write(file: TextIO, found: Iterator[dict[str, Any]], *, empties: bool) -> None:
    """`empties`: of former answers, if it is a file (and no pipe). OSError where the disk is full, or nobody reads any more."""
    if empties and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.truncate(0)
    file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in found)
    file.flush()


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """Refused before anything starts where it cannot be written. Its content stays until there are answers."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--to {path}: cannot be written: {error.strerror}", remedy="name a file of yours") from error
    try:
        yield file
    finally:
        with suppress(OSError):  # an error of `write` has been reported
            file.close()
