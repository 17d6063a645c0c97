"""A prompt's samples on their way from request to batch, and what a run says of all of them. No torch in here."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from bridge.generation import Completion, GenerationRequest
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
    """A prompt's samples on their way; `completions` and `scored` fill up."""

    key: int  # the ordinal; below 0 for what is generated outside of the stream
    request: GenerationRequest
    oldest: int | None = None  # no token is of an earlier version; None: not handed out
    completions: list[Completion | None] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    scored: list[Scored | None] = field(default_factory=list)  # `rewards` with their parts, but for those of a checkpoint
    in_scoring: set[int] = field(default_factory=set)
    replica: int | None = None
    expected_tokens: float = 0.0  # of one sample
    begun_seconds: float = 0.0
    ended_seconds: float = 0.0

    def __post_init__(self) -> None:
        num_samples = self.request.num_samples
        self.completions, self.rewards, self.scored = [None] * num_samples, [None] * num_samples, [None] * num_samples

    def begin(self, replica: int, version: int) -> None:
        """It is handed to `replica`, which serves `version`; not for the first time where another lost it."""
        self.replica = replica
        if self.oldest is None:
            self.oldest, self.begun_seconds = version, time.time()

    def complete(self, sample: int, completion: Completion) -> None:
        """Once all samples are there, `oldest` is the version of their oldest token."""
        self.completions[sample] = completion
        if not self.missing:
            self.oldest = self._oldest_token

    def restore(self, samples: Iterable[SavedSample]) -> None:
        """What a checkpoint has of it; with a smaller `rollout.group_size` than then, the first of them."""
        for saved in samples:
            if saved.index < len(self.completions):
                self.complete(saved.index, saved.completion)
                self.rewards[saved.index] = saved.reward if math.isfinite(saved.reward) else None
        if len(self.missing) < len(self.completions):
            self.oldest = self._oldest_token
            self.begun_seconds = self.ended_seconds = time.time()

    @property
    def _oldest_token(self) -> int:
        """Its version; of the samples that have ended."""
        return min(int(completion.weight_versions.min()) for completion in self.completions if completion is not None)

    def ended_samples(self) -> Iterator[SavedSample]:
        for index, (completion, reward) in enumerate(zip(self.completions, self.rewards, strict=True)):
            if completion is not None:
                yield SavedSample(index, completion, math.nan if reward is None else reward)

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(index for index, completion in enumerate(self.completions) if completion is None)

    @property
    def unscored(self) -> list[int]:
        """Samples that have ended and have no reward."""
        pairs = enumerate(zip(self.completions, self.rewards, strict=True))
        return [index for index, (completion, reward) in pairs if completion is not None and reward is None]

    @property
    def is_done(self) -> bool:
        return None not in self.rewards
