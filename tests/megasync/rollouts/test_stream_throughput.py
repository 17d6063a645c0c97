"""How long steps take in virtual time, with replicas that decode more slowly the more samples they have (stream_model.py).

The figures of the model are those of a small model on one GPU: a training of a second, batches of 128 samples, 64 of which run at
a time, whose tokens take 4 ms, and 0.2 ms more for each sample that runs. Before groups were held back the steps of such a run
took 3.3 and 1.0 seconds in turns, 2.1 on average, in which the replica idled for 0.15 seconds.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
import pytest

from bridge.generation import GenerationRequest, GroupRequest
from megasync.rollouts.group import Group, StreamSettings
from tests.megasync.rollouts.stream_model import ModelPool, streaming

BATCH_SIZE, GROUP_SIZE, SLOTS, MEAN_TOKENS, MAX_TOKENS = 16, 8, 64, 54, 160
EVALUATED_AT, SAVED_AT, LOST_AT, NUM_STEPS = 20, 30, 40, 50
SAVE_SECONDS = 12.0  # of a checkpoint that is written while nothing is trained


@dataclass
class Step:
    seconds: float
    idle_seconds: float  # of the replicas, since the run began
    oldest: int  # by how many versions its oldest token was behind


def length(group: GroupRequest, sample: int) -> int:
    source = random.Random(f"{group.key}/{sample}")
    return min(MAX_TOKENS, 1 + int(source.expovariate(1 / MEAN_TOKENS)))


def run(staleness: int, training_seconds: float, num_replicas: int = 1) -> list[Step]:
    """An evaluation after EVALUATED_AT steps, a checkpoint after SAVED_AT; after LOST_AT a replica is lost until a publish."""
    pool = ModelPool(
        num_replicas, length, max_num_seqs=SLOTS // num_replicas, step_seconds=0.004, sample_seconds=0.0002 * num_replicas
    )
    request = GenerationRequest((1,), num_samples=GROUP_SIZE, max_new_tokens=MAX_TOKENS)

    settings = StreamSettings(staleness, BATCH_SIZE, NUM_STEPS, SLOTS // num_replicas + GROUP_SIZE, MEAN_TOKENS, 60.0)
    steps: list[Step] = []

    with streaming(pool, settings, lambda ordinal: Group(ordinal, request)) as stream:

        async def publish(version: int) -> None:
            pool.sync(version)
            await stream.serve(version)

        async def train() -> None:
            await publish(0)
            for step in range(NUM_STEPS):
                begin = pool.loop.time()
                await stream.admit(step)
                while (groups := await stream.take(step)) is None:
                    await publish(step)
                oldest = min(int(one.weight_versions.min()) for group in groups for one in group.completions if one is not None)
                await asyncio.sleep(training_seconds)
                await publish(step + 1)
                idle = sum(replica.idle_seconds for replica in pool.replicas.values())
                steps.append(Step(pool.loop.time() - begin, idle, step - oldest))
                if step + 1 == EVALUATED_AT:
                    await stream.generate([request] * BATCH_SIZE)
                if step + 1 == SAVED_AT:
                    await asyncio.sleep(SAVE_SECONDS)
                if step + 1 == LOST_AT:
                    pool.kill(0)

        stream.run(train())
    return steps


def mean(steps: Sequence[Step]) -> float:
    return statistics.fmean(step.seconds for step in steps)


@pytest.mark.parametrize(
    ("training_seconds", "num_replicas", "most_seconds"),
    [(0.5, 1, 2.0), (1.0, 1, 2.02), (1.5, 2, 2.12), (3.0, 1, 3.0)],
)
def test_batches_do_not_end_in_pairs(training_seconds: float, num_replicas: int, most_seconds: float) -> None:
    """Steps take the same time each, replicas do not wait for the trainer, and five steps after an evaluation, a checkpoint or
    the loss of a replica all is as before.
    """
    steps = run(1, training_seconds, num_replicas)
    before, evaluated = steps[10:EVALUATED_AT], steps[EVALUATED_AT + 5 : SAVED_AT]
    after = (evaluated, steps[SAVED_AT + 5 : LOST_AT], steps[LOST_AT + 5 :])
    print([round(mean(each), 3) for each in (before, *after)])
    assert mean(before) < most_seconds * 1.001
    assert all(abs(mean(each) / mean(before) - 1) < 0.1 for each in after)
    assert all(step.seconds < 1.4 * mean(before) for each in (before, *after) for step in each)
    assert all(step.oldest <= 1 for step in steps)
    if training_seconds < 2:  # the replicas are what takes time
        assert before[-1].idle_seconds - before[0].idle_seconds < 0.02 * mean(before) * len(before)
