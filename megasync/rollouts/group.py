"""A prompt's samples on their way from request to batch, and what a run says of all of them. No torch in here."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from bridge.generation import Completion, GenerationRequest
from megasync.episodes.task import Played, Task
from megasync.rewards.pool import Scored
from megasync.rollouts.progress import SavedGroup, SavedSample


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
    request_digest: int = 0  # of what its responses depend on
    reward_digest: int = 0  # of what their rewards depend on, too
    oldest: int | None = None  # no token is of an earlier version; None: not handed out
    completions: list[Completion | Played | None] = field(default_factory=list)
    playing: dict[int, Played] = field(default_factory=dict)  # episodes that go on from a checkpoint, by member
    rewards: list[float | None] = field(default_factory=list)
    scored: list[Scored | None] = field(default_factory=list)  # `rewards` with their parts, but for those of a checkpoint
    in_scoring: set[int] = field(default_factory=set)
    is_wanted: bool = True  # whoever waited for it may have given up
    replica: int | None = None
    expected_tokens: float = 0.0  # of one sample
    num_held: int = 0  # tokens of its prompt that its replica has computed
    num_lost: int = 0  # replicas that were lost with it
    task: Task | None = None  # what its members play, where they are episodes
    place: int = 0  # what has a lower one is handed out before
    begun_seconds: float = 0.0
    ended_seconds: float = 0.0

    def __post_init__(self) -> None:
        num_samples, self.place = self.request.num_samples, self.key
        self.completions, self.rewards, self.scored = [None] * num_samples, [None] * num_samples, [None] * num_samples

    def begin(self, replica: int, version: int) -> None:
        """It is handed to `replica`, which serves `version`; not for the first time where another lost it."""
        self.replica = replica
        if self.oldest is None:
            self.oldest, self.begun_seconds = version, time.time()

    def complete(self, sample: int, completion: Completion | Played) -> None:
        """Once all samples are there, `oldest` is the version of their oldest token."""
        self.completions[sample] = completion
        if not self.missing:
            self.oldest = self._oldest_token

    def restore(self, saved: SavedGroup) -> None:
        """What a checkpoint has of it; with a smaller `rollout.group_size` than then, the first samples, and without rewards that
        depend on what has changed.
        """
        for sample in saved.samples:
            if not sample.is_over and sample.index < len(self.completions):
                assert isinstance(sample.completion, Played)
                self.playing[sample.index] = sample.completion
            elif sample.index < len(self.completions):
                self.complete(sample.index, sample.completion)
                has_reward = math.isfinite(sample.reward) and saved.reward_digest == self.reward_digest
                self.rewards[sample.index] = sample.reward if has_reward else None
        if len(self.missing) < len(self.completions) or self.playing:
            self.oldest = self._oldest_token
            self.begun_seconds = self.ended_seconds = time.time()

    @property
    def _oldest_token(self) -> int | None:
        """Its version; of the samples that have ended. `oldest` where these are episodes that failed before they had tokens."""
        playing = [one for member, one in self.playing.items() if self.completions[member] is None]
        versions = [oldest_of(completion) for completion in (*self.completions, *playing) if completion is not None]
        return min((version for version in versions if version is not None), default=self.oldest)

    def saved(self, playing: Mapping[int, Played] | None = None) -> SavedGroup:
        """Its samples that have ended, and those that are `playing`, by member."""
        pairs = enumerate(zip(self.completions, self.rewards, strict=True))
        samples = [SavedSample(index, done, math.nan if reward is None else reward) for index, (done, reward) in pairs if done]
        samples += [SavedSample(index, one, math.nan, is_over=False) for index, one in (playing or {}).items()]
        return SavedGroup(self.key, tuple(samples), self.request_digest, self.reward_digest)

    @property
    def can_be_refused(self) -> bool:
        """Whether a replica may find fault with the request, and the run goes on."""
        return False

    def refuse(self, error: Exception) -> None:
        """It did."""
        raise error

    def held(self, version: int) -> tuple[int | None, int]:
        """The replica that has computed the first tokens of its prompt with `version`, and how many; None: no one has."""
        return None, 0

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(index for index, completion in enumerate(self.completions) if completion is None)

    @property
    def unscored(self) -> list[int]:
        """Samples that have ended and have no reward."""
        pairs = enumerate(zip(self.completions, self.rewards, strict=True))
        return [index for index, (completion, reward) in pairs if completion is not None and reward is None]

    @property
    def own_rewards(self) -> list[float]:
        """Those that there are, of members that were not dropped."""
        pairs = zip(self.completions, self.rewards, strict=True)
        return [reward for done, reward in pairs if reward is not None and not (isinstance(done, Played) and done.is_dropped)]

    @property
    def is_done(self) -> bool:
        return None not in self.rewards


def oldest_of(completion: Completion | Played) -> int | None:
    """The version of its oldest token."""
    return completion.oldest if isinstance(completion, Played) else int(completion.weight_versions.min())
