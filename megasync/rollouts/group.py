"""A prompt's samples on their way from request to batch, and what a run says of all of them. No torch in here."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from bridge.messages import Completion, GenerationRequest
from megasync.rollouts.progress import SavedSample
from megasync.rollouts.rewards.pool import Scored


@dataclass(frozen=True)
class StreamSettings:
    """Of a run. `slots`: samples that a replica is given at a time; None: as many as there are."""

    max_staleness: int
    batch_size: int
    num_steps: int
    slots: int | None
    expected_tokens: float  # of a response, until there are some
    answer_seconds: float  # a replica that gives no answer for so long counts as dead
    min_replicas: int = 1
    scores_groups: bool = False  # whether rewards look at all samples of a group together
    filters_groups: bool = False  # whether groups whose rewards are all equal are replaced
    filter_factor: int = 1  # at most so many times as many prompts as a batch has


@dataclass
class Group:
    """A prompt's samples on their way; `completions` and `rewards` fill up."""

    key: int  # the ordinal; below 0 for what is generated outside of the stream
    request: GenerationRequest
    version: int = 0  # no token is older
    completions: list[Completion | None] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    scored: list[Scored | None] = field(default_factory=list)  # as `rewards`, with their parts
    replica: int | None = None
    expected_tokens: float = 0.0  # of one sample
    begun_seconds: float = 0.0
    ended_seconds: float = 0.0
    whole: asyncio.Future[None] | None = None  # of what is generated outside of the stream

    def __post_init__(self) -> None:
        self.completions = self.completions or [None] * self.request.num_samples
        self.rewards = self.rewards or [None] * self.request.num_samples
        self.scored = self.scored or [None] * self.request.num_samples

    def note_versions(self) -> None:
        """Of the samples that have ended, once some have."""
        if done := [completion for completion in self.completions if completion is not None]:
            self.version = min(int(completion.weight_versions.min()) for completion in done)
            self.begun_seconds = self.begun_seconds or time.time()
            self.ended_seconds = time.time()

    def ended_samples(self) -> Iterator[SavedSample]:
        for index, (completion, reward) in enumerate(zip(self.completions, self.rewards, strict=True)):
            if completion is not None:
                yield SavedSample(index, completion, math.nan if reward is None else reward)

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(index for index, completion in enumerate(self.completions) if completion is None)

    @property
    def is_done(self) -> bool:
        return None not in self.rewards
