"""Rewards of responses and episodes: their texts are decoded together, then RewardPool judges them.

Leaves out when samples are scored (stream.py) and what a reward function is (rewards/).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megasync.data.data import Example
from megasync.episodes.task import EpisodeResult
from megasync.rewards.pool import RewardPool, Scored
from megasync.rollouts.requests import begins_thinking, reward_inputs

if TYPE_CHECKING:
    from bridge.generation import Completion
    from megasync.data.prompts import Prompts


class Scorer:
    """Scores one run's samples; methods are called on the event loop."""

    def __init__(self, prompts: Prompts, rewards: RewardPool) -> None:
        self.prompts, self.rewards = prompts, rewards
        self._undecoded: list[npt.NDArray[np.int32]] = []
        self._decoding: asyncio.Future[list[str]]

    async def score(self, example: Example, done: Sequence[Completion | EpisodeResult], limit: int) -> list[Scored]:
        """The reward that an episode returned, else that of `rollout.reward` for its last turn. `limit`: of tokens."""
        own = [one.reward if isinstance(one, EpisodeResult) else None for one in done]
        asked = [one for one, reward in zip(done, own, strict=True) if reward is None]
        found: Iterator[Scored] = iter(())
        if asked:
            ids = [np.array(one.final_ids, np.int32) if isinstance(one, EpisodeResult) else one.token_ids for one in asked]
            thinking, texts = begins_thinking(self.prompts, example), await self._texts(ids)
            found = iter(await self.rewards.score_group(reward_inputs(example, asked, texts, limit, thinking=thinking)))
        return [next(found) if reward is None else Scored(reward, {}) for reward in own]

    async def _texts(self, responses: Sequence[npt.NDArray[np.int32]]) -> list[str]:
        """Decodes all responses of one event-loop iteration together, in a thread."""
        if not self._undecoded:
            self._decoding = asyncio.ensure_future(self._decode())
        place = len(self._undecoded)
        self._undecoded += responses
        return (await self._decoding)[place : place + len(responses)]

    async def _decode(self) -> list[str]:
        responses, self._undecoded = self._undecoded, []
        return await asyncio.to_thread(self.prompts.texts, responses)

    async def totals(
        self, examples: Sequence[Example], groups: Sequence[Sequence[Completion | EpisodeResult]], limit: int
    ) -> list[list[float]]:
        pairs = zip(examples, groups, strict=True)
        scored = await asyncio.gather(*(self.score(example, group, limit) for example, group in pairs))
        return [[each.total for each in group] for group in scored]
