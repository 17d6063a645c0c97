"""All reward processes: who gets which sample, time limits, weights, and what happens where a reward fails. No torch in here.

    with RewardPool(config.rollout) as pool:                      # in the trainer; processes start with the first samples
        scored = await pool.score(RewardInput(...))               # many at a time; Scored(total, parts)
        scored = await pool.score_group([RewardInput(...), ...])  # all samples of a prompt, where `pool.takes_groups`

Leaves out the processes and who gets which sample (lane.py).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from megasync.config.schema import RolloutConfig
from megasync.rewards.functions import RewardInput
from megasync.rewards.lane import LIMIT_KEY, Lane, Pending
from megasync.rewards.resolve import Reward, identity, resolve_rewards
from megasync.rewards.wire import Call, Failure, RewardError, describe

logger = logging.getLogger(__name__)

NUM_NOTED = 3  # failures of a reward that are logged where they are worth 0, of each kind: raised, returned, took, had, ended
PARSERS = {"math_verify", "reasoning_gym"}  # what hangs or kills one is a model's output; what one raises is of the data
# what functions do that take a list, and do not say so, with a single sample
WANTS_LIST = re.compile(r"raised TypeError: ('RewardInput' object is not|object of type 'RewardInput' has no len)|returned \[")
GO_ON = "or write rollout.reward_on_failure=zero to go on with 0 for such samples"


@dataclass(frozen=True, slots=True)
class Scored:
    """What a sample is worth."""

    total: float  # the sum of weight x part
    parts: Mapping[str, float]  # of each reward, without its weight, by its name in the config
    failures: tuple[str, ...] = ()  # the rewards that failed and count as 0


class RewardPool:
    """At most `rollout.reward_processes` processes for plain functions, and as many for async ones."""

    def __init__(self, rollout: RolloutConfig) -> None:
        """ConfigError where `rollout.reward` cannot be imported."""
        self.rollout, self.rewards = rollout, resolve_rewards(rollout.reward)
        self.takes_groups = any(reward.takes_list for reward in self.rewards)
        self.identity = identity(self.rewards)
        names = [reward.name for reward in self.rewards]
        self.serial = Lane(names, rollout, self._fail, is_serial=True)
        self.concurrent = Lane(names, rollout, self._fail, is_serial=False)
        self._numbers, self._noted = itertools.count(1), Counter[tuple[str, str]]()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def score(self, sample: RewardInput) -> Scored:
        """What one sample is worth; functions that take a list get a list of one.

        Raises:
            RewardError: a reward failed, and `rollout.reward_on_failure` is stop.
        """
        return (await self.score_group([sample]))[0]

    async def score_group(self, samples: Sequence[RewardInput]) -> list[Scored]:
        """What each sample of a prompt is worth. Raises as `score` does."""
        calls = [self._begin(place, reward, list(samples)) for place, reward in enumerate(self.rewards)]
        await asyncio.gather(*(pending.values for pending in itertools.chain.from_iterable(calls)))
        columns = [[(value, each.failed) for each in column for value in each.values.result()] for column in calls]
        return [self._scored(row) for row in zip(*columns, strict=True)]

    def _scored(self, row: Sequence[tuple[float, bool]]) -> Scored:
        named = list(zip(self.rewards, row, strict=True))
        total = math.fsum(reward.weight * value for reward, (value, _) in named)  # 0.7 + 0.2 + 0.1 is to pass at 1
        failures = tuple(reward.name for reward, (_, failed) in named if failed)
        return Scored(total, {reward.name: value for reward, (value, _) in named}, failures)

    def _begin(self, place: int, reward: Reward, samples: list[RewardInput]) -> list[Pending]:
        lane, loop = self.concurrent if reward.is_async else self.serial, asyncio.get_running_loop()
        self._loop = self._loop or loop
        assert loop is self._loop, "a pool belongs to the event loop that it was first used in"
        parts = [samples] if reward.takes_list else [[sample] for sample in samples]
        pending = [Pending(reward, Call(next(self._numbers), place, part), loop.create_future()) for part in parts]
        lane.add(pending)
        return pending

    def _fail(self, pending: Pending, failure: Failure) -> None:
        """A call failed: it is worth 0, or ends the run with the sample."""
        name, samples = pending.reward.name, pending.call.samples
        is_of_output = name in PARSERS and not failure.what.startswith("raised")
        if self.rollout.reward_on_failure == "stop" and not is_of_output:
            remedy = f"raise {LIMIT_KEY}, {GO_ON}" if LIMIT_KEY in failure.what else f"mend the function, {GO_ON}"
            if not pending.reward.takes_list and WANTS_LIST.match(failure.what):
                remedy = "annotate its first parameter as list[RewardInput], and it gets all samples of a prompt"
            pending.values.set_exception(RewardError(describe(name, failure, samples, remedy)))
            return
        kind = name, failure.what.partition(" ")[0]
        self._noted[kind] += 1
        if self._noted[kind] <= NUM_NOTED:
            last = ", others of this kind are only counted" if self._noted[kind] == NUM_NOTED else ""
            logger.warning("worth 0%s: %s", last, describe(name, failure, samples, ""))
        pending.failed = True
        pending.values.set_result([0.0] * len(samples))

    def close(self) -> None:
        """End all processes. From any thread, more than once."""
        for process in [*self.concurrent.close(), *self.serial.close()]:
            process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def reward_metrics(scored: Sequence[Scored]) -> dict[str, float]:
    """`reward/NAME`, the mean of each reward where there are several, and how often one failed and counted as 0.

    Samples that were scored before a run was resumed are not among `scored`, which may be empty. What episodes say they are
    worth has no parts.
    """
    parts = [one.parts for one in scored if one.parts]
    names = list(parts[0]) if parts else []
    means = {f"reward/{name}": statistics.fmean(own[name] for own in parts) for name in names if len(names) > 1}
    return means | {"reward/failures": float(sum(len(one.failures) for one in scored))}
