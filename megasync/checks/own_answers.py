"""Scores the data's own answers as responses by the rewards, before anything starts. No torch in here.

A reward that does not give its best to a reference answer trains a wrong model, and no metric of the run shows it: it reads the
answer wrongly, or the data hold it in a form that no response has. Answers go through the tokenizer and back, as responses do.

    for scores in score_own_answers(config, data):     # ConfigError where a reward raises or returns no number
        print(scores.lines())
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.sample import IntArray
from megasync.checks.judges import ask_judges
from megasync.config.errors import ConfigError
from megasync.config.schema import Config, RolloutConfig
from megasync.data.data import Example
from megasync.data.load import RunData
from megasync.data.prompts import Prompts
from megasync.launch.scope import FOR_CLUSTER
from megasync.rewards.failures import RewardError, shown
from megasync.rewards.functions import RewardInput
from megasync.rewards.pool import RewardPool, Scored
from megasync.rewards.resolve import JUDGE, REWARDS, weights

MAX_ANSWERS = 64  # of each data set
MAX_LISTED = 3
MAX_PROCESSES = 2  # one for rewards of ours, which are fast: each process imports what they need
SECONDS = 10.0  # for the answers of a data set: a function may ask a model
IGNORE_TEXT = {"token_count"}  # rewards that do not depend on the text of a response


@dataclass(frozen=True)
class OwnScores:
    """The scores that one reward gives to the answers of one data set."""

    key: str  # data.train, data.eval or data.eval.NAME
    reward: str  # as the config names it
    inputs: Sequence[RewardInput]
    values: Sequence[float | None]  # without the weight; None where the time was over

    @property
    def best(self) -> float:
        """Built-in rewards give 1 to a right answer. The scale of others is unknown: the highest value counts as the best."""
        return 1.0 if self.reward in REWARDS else max((value for value in self.values if value is not None), default=0.0)

    @property
    def below(self) -> list[tuple[float, RewardInput]]:
        """Answers below the best, the least first; all where the best is not above 0."""
        pairs = [(value, given) for value, given in zip(self.values, self.inputs, strict=True) if value is not None]
        return sorted((pair for pair in pairs if pair[0] < self.best or self.best <= 0), key=lambda pair: pair[0])

    @property
    def is_wrong(self) -> bool:
        """Whether a reward whose scale is known does not give its best, or another one gives nothing to any answer."""
        return bool(self.below) and (self.reward in REWARDS or self.best <= 0)

    def lines(self) -> list[str]:
        """The counts, and some of the answers below the best."""
        done, below = [value for value in self.values if value is not None], self.below
        num_best, mean = len(done) - len(below), sum(done) / max(len(done), 1)
        counts = f"{self.best:g} to {num_best} of the" if self.best > 0 else f"at most {self.best:g} to the"
        message = f"{self.key}: {self.reward} gives {counts} {len(done)} answers of the data, {mean:.3g} on average"
        if len(done) < len(self.values):
            message += f"; {len(self.values) - len(done)} had no score within {SECONDS:g} s"
        if too_long := sum(given.num_tokens > given.max_tokens for given in self.inputs):
            message += f"; {too_long} have more than the {self.inputs[0].max_tokens} tokens that a response may have"
        return [message, *(f"  {_described(*pair)}" for pair in below[:MAX_LISTED])]


def _described(value: float, given: RewardInput) -> str:
    seen = "the same text" if given.response == given.answer else shown(given.response)
    return f"data {given.place}: {value:g} for the answer {shown(given.answer)}, as a response {seen}"


def score_own_answers(config: Config, data: RunData, most: int = MAX_ANSWERS) -> list[OwnScores]:
    """Scores by each reward of positive weight that reads the response, for up to `most` answers of each data set.

    Raises:
        ConfigError: a reward raised, or returned no finite number for each sample, where rollout.reward_on_failure is stop.
    """
    functions = {name: weight for name, weight in weights(config.rollout.reward).items() if not name.startswith(JUDGE)}
    names = [name for name, weight in functions.items() if weight > 0 and name not in IGNORE_TEXT]
    if not names or FOR_CLUSTER in os.environ:  # whose nodes may have packages of a reward that are not here
        return []
    sets = own_inputs(config, data, most)
    inputs = {key: given for key, given in sets.items() if any(given[0].is_scored_by(name) for name in functions)}
    try:
        scored = asyncio.run(_score(config.rollout.model_copy(update={"reward": functions}), list(inputs.values())))
    except RewardError as error:
        text = str(error)
        raise ConfigError(text if text.startswith("rollout.reward") else f"rollout.reward: {text}") from error
    return [
        OwnScores(key, name, given, [None if each is None else each.parts[name] for each in found])
        for (key, given), found in zip(inputs.items(), scored, strict=True)
        for name in names
        if given[0].is_scored_by(name)
    ]


def try_judges(config: Config, data: RunData, most: int = MAX_ANSWERS) -> list[str]:
    """Ask each judge's endpoint about an answer of the data; lines for the user. ConfigError as checks/judges.py raises it."""
    if FOR_CLUSTER in os.environ:
        return []
    return ask_judges(config, [given for of_set in own_inputs(config, data, most).values() for given in of_set])


def own_inputs(config: Config, data: RunData, most: int) -> dict[str, list[RewardInput]]:
    """Inputs of rewards: up to `most` answers of each data set, by its key."""
    own = config.rollout
    sets = {**data.by_source, "data.eval": data.held_out}
    sets |= {f"data.eval.{name}": examples for name, examples in data.eval_sets.items()}
    limits = {f"data.eval.{name}": each.max_new_tokens for name, each in config.data.eval_sets.items()}
    return {
        key: [reward_input(each, data.prompts, own.stop, limits.get(key) or own.max_new_tokens) for each in examples[:most]]
        for key, examples in sets.items()
        if examples
    }


def reward_input(example: Example, prompts: Prompts, stop: Sequence[str], max_tokens: int) -> RewardInput:
    """The answer of an example as the reward gets a response with that text."""
    ids = as_sampled(prompts, prompts.supervised(example).response_ids, stop)
    given = RewardInput(example.prompt, prompts.text(ids), example.answer, len(ids), max_tokens, example.extra, example.line)
    return replace(given, place=example.place, source=example.source, rewards=example.rewards)


def as_sampled(prompts: Prompts, ids: IntArray, stop: Sequence[str]) -> IntArray:
    """Up to the token that completes a text of `rollout.stop`, which ends a response."""
    if not any(text in prompts.text(ids) for text in stop):
        return ids
    return next(ids[:end] for end in range(1, len(ids) + 1) if any(text in prompts.text(ids[:end]) for text in stop))


async def _score(rollout: RolloutConfig, sets: Sequence[Sequence[RewardInput]]) -> list[list[Scored | None]]:
    """RewardError as the pool raises it. A reward that takes a list gets a group of the same response."""
    most = 1 if set(weights(rollout.reward)) <= set(REWARDS) else MAX_PROCESSES
    rollout = rollout.model_copy(update={"reward_processes": min(rollout.reward_processes, most)})
    with RewardPool(rollout) as pool:
        size = rollout.group_size if pool.takes_groups else 1
        tasks = [[asyncio.ensure_future(pool.score_group([given] * size)) for given in inputs] for inputs in sets]
        every = [task for of_set in tasks for task in of_set]
        await asyncio.wait(every, timeout=SECONDS, return_when=asyncio.FIRST_EXCEPTION)
        try:
            return [[task.result()[0] if task.done() else None for task in of_set] for of_set in tasks]
        finally:
            for task in every:
                task.cancel()
