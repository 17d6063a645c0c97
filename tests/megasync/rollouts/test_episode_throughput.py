"""What waiting on tools costs, in virtual time: beside replicas that are a formula (stream_model.py)."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from bridge.generation import GenerationRequest, GroupRequest
from megasync.episodes.segments import Turn
from megasync.episodes.task import Task
from megasync.episodes.exchange import Ask, EpisodeEnd
from megasync.rollouts.group import Group, StreamSettings
from megasync.rollouts.turns import EpisodeSettings
from tests.megasync.rollouts.stream_model import ModelPool, streaming

BATCH_SIZE, GROUP_SIZE, SLOTS, NUM_TURNS, NUM_STEPS = 16, 8, 64, 8, 6


@dataclass
class Tools:
    """Each turn waits on a tool for 0.2 to 2 seconds, or on none."""

    takes_time: bool

    async def run(self, task: Task, ask: Any, history: Any = None) -> tuple[EpisodeEnd, list[tuple[Any, Turn]]]:
        source, turns = random.Random(f"{task.seed}/{task.member}"), list[tuple[Any, Turn]]()
        ids = list(task.prompt_ids)
        for number in range(NUM_TURNS):
            seconds = source.uniform(0.2, 2.0)
            if number and self.takes_time:
                await asyncio.sleep(seconds)
            prompt = np.array(ids, np.int32)
            turns.append((prompt, await ask(Ask(0, number, prompt, None, ()))))
            ids += [*turns[-1][1].token_ids.tolist(), 9]
        return EpisodeEnd(tuple(range(NUM_TURNS)), 1.0), turns


def seconds_of_a_run(*, tools: bool) -> tuple[float, int]:
    """From the second batch to the last, and the most samples that a replica was given at a time."""

    def length(group: GroupRequest, sample: int) -> int:
        return 8 + group.request.seed % 23

    pool = ModelPool(2, length, max_num_seqs=SLOTS // 2, step_seconds=0.004, sample_seconds=0.0004)
    request, ends, most = GenerationRequest((1, 2, 3), num_samples=GROUP_SIZE, max_new_tokens=40), list[float](), [0]

    settings = StreamSettings(2, BATCH_SIZE, NUM_STEPS, SLOTS // 2 + GROUP_SIZE, 20.0, 60.0)
    episodes = Tools(tools), EpisodeSettings(NUM_TURNS, 1000)

    def make_group(ordinal: int) -> Group:
        return Group(ordinal, request, task=Task("", (1, 2, 3), "", seed=ordinal))

    with streaming(pool, settings, make_group, episodes=episodes) as stream:

        async def train() -> None:
            pool.sync(0)
            await stream.serve(0)
            for step in range(NUM_STEPS):
                await stream.admit(step)
                assert await stream.take(step) is not None
                ends.append(pool.loop.time())
                most[0] = max(most[0], *(slot.load.samples for slot in stream.dispatcher.slots.values()))
                pool.sync(step + 1)
                await stream.serve(step + 1)

        stream.run(train())
    return ends[-2] - ends[0], most[0]


def test_tools_leave_replicas_busy() -> None:
    """Turns of others fill the slots of an episode that waits: the same tokens take little longer than without tools."""
    (with_tools, most), (without, _) = seconds_of_a_run(tools=True), seconds_of_a_run(tools=False)
    print(with_tools, without, without / with_tools)
    assert most <= SLOTS // 2 + GROUP_SIZE
    assert without / with_tools > 0.85
