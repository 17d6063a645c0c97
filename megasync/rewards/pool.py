"""All rewards of a run: scores of samples, weights, and the effect of a reward that fails. No torch in here.

    with RewardPool(config.rollout, judges) as pool:              # in the trainer; workers start with the first samples
        scored = await pool.score(RewardInput(...))               # many at a time; Scored(total, parts)
        scored = await pool.score_group([RewardInput(...), ...])  # all samples of a prompt, where `pool.takes_groups`

Leaves out the processes, time limits and blame (workers/), and how a judge is asked (judges/).
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

from bridge.generation import TokenScores
from megasync.config.schema import RolloutConfig
from megasync.rewards.failures import RewardError, describe
from megasync.rewards.functions import RewardInput
from megasync.rewards.judges.judge import JudgeError, Judges
from megasync.rewards.program import Call
from megasync.rewards.resolve import JUDGE, Reward, identity, named_judges, resolve_rewards, weights
from megasync.workers.failure import Failure
from megasync.workers.job import Job, Outcome
from megasync.workers.pool import WorkerPool
from megasync.workers.protocol import Start
from megasync.workers.settings import PoolSettings, WorkersError

logger = logging.getLogger(__name__)

MAX_LOGGED = 3  # failures of a reward that count as 0 and are logged, of each kind: raised, returned, took, had, ended
# Rewards that parse the model's output: a hang or crash is the output's fault and counts as 0; an exception is the data's fault.
PARSERS = {"math_verify", "reasoning_gym"}
# Failures, with a single sample, of functions that take a list and are not annotated so.
WANTS_LIST = re.compile(r"raised TypeError: ('RewardInput' object is not|object of type 'RewardInput' has no len)|returned \[")
LIMIT_KEY = "rollout.reward_timeout_seconds"
CONTINUE = "or write rollout.reward_on_failure=zero to continue with 0 for such samples"


Result = asyncio.Future[list[tuple[float, bool]]]  # of a call: the value of each sample, and whether it failed and counts as 0


@dataclass(frozen=True, slots=True)
class Scored:
    """The rewards of a sample."""

    total: float  # the sum of weight x part
    parts: Mapping[str, float]  # of each reward, without its weight, by its name in the config
    failures: tuple[str, ...] = ()  # the rewards that failed and count as 0
    teacher: tuple[TokenScores, ...] = ()  # of its tokens, one a branch, where a teacher is asked in the rollout


class ScoreJob(Job):
    """One call of a reward. The result: one value a sample, and whether the call failed and counts as 0."""

    def __init__(self, pool: RewardPool, reward: Reward, call: Call) -> None:
        super().__init__(call)
        self.pool, self.reward, self.call = pool, reward, call

    def finish(self, outcome: Outcome) -> None:
        if outcome.failure is None:
            self.result.set_result([(value, False) for value in outcome.value])
        elif error := self.pool.on_failure(self.reward, self.call.samples, outcome.failure):
            self.result.set_exception(error)
        else:
            self.result.set_result([(0.0, True)] * len(self.call.samples))


class RewardPool:
    """At most `rollout.reward_processes` workers for plain functions, and as many for async ones."""

    def __init__(self, rollout: RolloutConfig, judges: Judges | None = None) -> None:
        """ConfigError where `rollout.reward` cannot be imported. `judges`: those of the run, which this pool closes."""
        self.rollout, self.rewards, self.judges = rollout, resolve_rewards(rollout.reward), judges or Judges()
        asked = named_judges(rollout.reward, self.judges.configs)
        self.functions = {reward.name: (place, reward) for place, reward in enumerate(self.rewards)}
        self.weights = weights(rollout.reward)
        self.takes_groups = any(reward.takes_list for reward in self.rewards)
        of_judges = [(name, self.weights[JUDGE + name], self.judges.configs[name].identity) for name in asked]
        self.identity = identity(self.rewards) + (repr(of_judges) if of_judges else "")
        self.plain = self._workers("plain_rewards", 1)
        self.concurrent = self._workers("async_rewards", rollout.reward_concurrency)
        self._num_failures = Counter[tuple[str, str]]()

    def _workers(self, factory: str, concurrency: int) -> WorkerPool:
        names = [reward.name for reward in self.rewards]
        start = Start(f"megasync.rewards.program:{factory}", (names,), factory == "plain_rewards", False)
        limit, num = self.rollout.reward_timeout_seconds, self.rollout.reward_processes
        return WorkerPool(PoolSettings("rollout.reward: a process for rewards", start, LIMIT_KEY, limit, num, concurrency))

    async def score(self, sample: RewardInput) -> Scored:
        """The rewards of one sample; functions that take a list get a list of one.

        Raises:
            RewardError: a reward failed, and `rollout.reward_on_failure` is stop.
        """
        return (await self.score_group([sample]))[0]

    async def score_group(self, samples: Sequence[RewardInput]) -> list[Scored]:
        """The rewards of each sample of a prompt, by the functions that its data chooses. Raises as `score` does."""
        names = [name for name in self.weights if samples[0].is_scored_by(name)]
        columns = [self._submit(name, samples) if name in self.functions else self._ask(name, samples) for name in names]
        results = list(itertools.chain.from_iterable(columns))
        try:
            if len(results) == 1:  # gather takes as long as a short reward
                await results[0]
            else:
                await asyncio.gather(*results)
        except WorkersError as error:
            raise RewardError(str(error)) from error
        rows = zip(*(itertools.chain.from_iterable(result.result() for result in column) for column in columns), strict=True)
        return [self._scored(names, row) for row in rows]

    def _submit(self, name: str, samples: Sequence[RewardInput]) -> list[Result]:
        place, reward = self.functions[name]
        workers = self.concurrent if reward.is_async else self.plain
        parts = [list(samples)] if reward.takes_list else [[sample] for sample in samples]
        return [workers.submit(ScoreJob(self, reward, Call(place, part))) for part in parts]

    def _ask(self, name: str, samples: Sequence[RewardInput]) -> list[Result]:
        return [asyncio.ensure_future(self._judged(name, sample)) for sample in samples]

    async def _judged(self, name: str, sample: RewardInput) -> list[tuple[float, bool]]:
        try:
            return [(await self.judges.score(name.removeprefix(JUDGE), sample), False)]
        except JudgeError as error:
            stops = self.rollout.reward_on_failure == "stop" if error.stops is None else error.stops
            remedy = error.remedy + (f", {CONTINUE}" if error.stops is None else "")
            if stops:
                raise RewardError(describe(name, error.failure, [sample], remedy)) from error
            self._count(name, [sample], error.failure)
            return [(0.0, True)]

    def _scored(self, names: Sequence[str], row: Sequence[tuple[float, bool]]) -> Scored:
        named = list(zip(names, row, strict=True))
        total = math.fsum(self.weights[name] * value for name, (value, _) in named)  # 0.7 + 0.2 + 0.1 is to pass at 1
        failures = tuple(name for name, (_, failed) in named if failed)
        return Scored(total, {name: value for name, (value, _) in named}, failures)

    def on_failure(self, reward: Reward, samples: Sequence[RewardInput], failure: Failure) -> RewardError | None:
        """The error that ends the run with the sample; None: the call counts as 0."""
        is_of_output = reward.name in PARSERS and not failure.what.startswith("raised")
        if self.rollout.reward_on_failure == "stop" and not is_of_output:
            remedy = f"raise {LIMIT_KEY}, {CONTINUE}" if LIMIT_KEY in failure.what else f"mend the function, {CONTINUE}"
            if not reward.takes_list and WANTS_LIST.match(failure.what):
                remedy = "annotate its first parameter as list[RewardInput], and it gets all samples of a prompt"
            return RewardError(describe(reward.name, failure, samples, remedy))
        self._count(reward.name, samples, failure)
        return None

    def _count(self, name: str, samples: Sequence[RewardInput], failure: Failure) -> None:
        """A call that counts as 0."""
        kind = name, failure.what.partition(" ")[0]
        self._num_failures[kind] += 1
        if self._num_failures[kind] <= MAX_LOGGED:
            last = ", others of this kind are only counted" if self._num_failures[kind] == MAX_LOGGED else ""
            logger.warning("counts as 0%s: %s", last, describe(name, failure, samples, ""))

    def close(self) -> None:
        """End all workers. From any thread, more than once."""
        self.concurrent.close()
        self.plain.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def reward_metrics(scored: Sequence[Scored]) -> dict[str, float]:
    """`reward/NAME`, the mean of each reward where there are several, and how often one failed and counted as 0.

    Samples that were scored before a run was resumed are not among `scored`, which may be empty. Rewards that episodes return
    have no parts.
    """
    parts = [one.parts for one in scored if one.parts]
    names = dict.fromkeys(name for own in parts for name in own)
    means = {f"reward/{name}": statistics.fmean(own[name] for own in parts if name in own) for name in names if len(names) > 1}
    return means | {"reward/failures": float(sum(len(one.failures) for one in scored))}
