"""A prompt's samples on their way from request to batch. No torch in here.

Leaves out who generates and scores them (dispatch.py, turns.py, scoring.py), and what a resumed run keeps of them (restore.py).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from bridge.generation import Completion, GenerationRequest
from engine.objective.advantages import is_group_worth_training
from megasync.episodes.task import EpisodeResult, Task
from megasync.rewards.pool import Scored
from megasync.rollouts.progress import SavedGroup, SavedSample


@dataclass(frozen=True)
class StreamSettings:
    """A run's settings of the stream."""

    max_staleness: int
    batch_size: int
    num_steps: int
    slots: int | None  # samples that a replica is given at a time; None: no limit
    expected_tokens: float  # of a response, before any has ended
    answer_seconds: float  # a replica that gives no answer for so long counts as dead
    min_replicas: int = 1
    scores_groups: bool = False  # whether rewards look at all samples of a group together
    filters_groups: bool = False  # whether groups that `is_worth_training` refuses are replaced
    filter_factor: int = 1  # at most so many times as many prompts as a batch has
    oversample: float = 1.0  # above 1, without staleness: so many times a batch's groups begin, and those done last are aborted

    @property
    def num_together(self) -> int:
        """Groups that begin for one batch."""
        return math.ceil(self.batch_size * self.oversample)


@dataclass(eq=False)
class Group:
    """A prompt's samples on their way; `completions` and `scored` fill up.

    A turn of an episode is a group of one sample, too: it has an `answer`, `episode` is the group whose member plays, and
    `before` the turn before it.
    """

    key: int  # the ordinal; below 0 for evaluations; of a turn a number of its own
    request: GenerationRequest
    request_digest: int = 0  # of what its responses depend on
    reward_digest: int = 0  # of what their rewards depend on, too
    oldest: int | None = None  # no token is of an earlier version; None: not handed out
    task: Task | None = None  # what its members play, where they are episodes
    part_names: tuple[str, ...] = ()  # of rewards, where the advantage needs each; not in checkpoints: a resumed run scores again
    completions: list[Completion | EpisodeResult | None] = field(default_factory=list)
    playing: dict[int, EpisodeResult] = field(default_factory=dict)  # unfinished episodes of a checkpoint, by member
    scored: list[Scored | None] = field(default_factory=list)
    credits_turns: bool = False  # algorithm.credit=turn
    has_teacher: bool = False  # its samples need a teacher's scores, which checkpoints leave out
    rewarded: dict[int, Scored] = field(default_factory=dict)  # samples of a checkpoint that still need them
    in_scoring: set[int] = field(default_factory=set)
    is_refused: bool = False  # by `rollout.filter`: not trained even where no other group takes its place
    is_wanted: bool = True  # false: nobody waits for it any more; samples that run are not stopped
    replica: int | None = None
    expected_tokens: float = 0.0  # of one sample
    num_held: int = 0  # tokens of its prompt that its replica has computed
    num_lost: int = 0  # replicas that were lost with it
    place: int = 0  # groups with a lower one are handed out before
    begun_seconds: float = 0.0
    ended_seconds: float = 0.0
    episode: Group | None = None
    before: Group | None = None
    answer: asyncio.Future[Completion] | None = None

    def __post_init__(self) -> None:
        self.place = self.key if self.episode is None else self.episode.key
        self.completions = [None] * self.request.num_samples
        self.scored = [None] * self.request.num_samples

    # ------------------------------------------------------------------------------------------------ generated

    def begin(self, replica: int, version: int, num_held: int) -> None:
        """It is handed to `replica`, which serves `version`; not for the first time where another lost it."""
        self.num_held = num_held
        for group in (self,) if self.episode is None else (self, self.episode):
            group.replica = replica
            if group.oldest is None:
                group.oldest, group.begun_seconds = version, time.time()

    def complete(self, sample: int, completion: Completion | EpisodeResult) -> None:
        """Once all samples are there, `oldest` is the version of their oldest token."""
        self.completions[sample] = completion
        if not self.missing:
            self.oldest = self._oldest_token

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(index for index, completion in enumerate(self.completions) if completion is None)

    @property
    def _oldest_token(self) -> int | None:
        """Its version; of the samples that have ended. `oldest` where these are episodes that failed before they had tokens."""
        playing = [one for member, one in self.playing.items() if self.completions[member] is None]
        versions = [oldest_of(completion) for completion in (*self.completions, *playing) if completion is not None]
        return min((version for version in versions if version is not None), default=self.oldest)

    # ------------------------------------------------------------------------------------------------ turns

    @property
    def is_turn(self) -> bool:
        return self.answer is not None

    def held(self, version: int) -> tuple[int | None, int]:
        """The replica that has computed the first tokens of its prompt with `version`, and how many; None: no one has.

        Of a turn the replica of the turn before it, or of the first turn of another member.
        """
        former = self.before or self.episode
        if former is None or former.oldest != version:
            return None, 0
        sampled = former.completions[0] if former.is_turn else None
        held = len(former.request.prompt_ids) + (len(sampled.token_ids) if isinstance(sampled, Completion) else 0)
        return former.replica, min(held, len(self.request.prompt_ids))

    def answer_turn(self) -> None:
        """Its sample has ended; the episode continues."""
        (completion,) = self.completions
        assert self.answer is not None
        assert isinstance(completion, Completion)
        if not self.answer.done():
            self.answer.set_result(completion)

    def refuse(self, error: Exception) -> None:
        """The replica refuses the turn; the episode gets a ValueError."""
        assert self.answer is not None
        if not self.answer.done():
            self.answer.set_exception(ValueError(str(error)))

    # ------------------------------------------------------------------------------------------------ scored

    @property
    def rewards(self) -> list[float | None]:
        return [None if scored is None else scored.total for scored in self.scored]

    @property
    def unscored(self) -> list[int]:
        """Samples that have ended, have no reward, and are not being scored."""
        pairs = enumerate(zip(self.completions, self.scored, strict=True))
        return [index for index, (done, scored) in pairs if done and scored is None and index not in self.in_scoring]

    @property
    def num_greedy(self) -> int:
        """How many of its samples, the first ones, are greedy: a baseline, which is not trained."""
        return int(self.request.first_is_greedy)

    @property
    def trained_members(self) -> list[int]:
        """Members that were not dropped, without the greedy one."""
        pairs = list(enumerate(self.completions))[self.num_greedy :]
        return [index for index, done in pairs if not (isinstance(done, EpisodeResult) and done.is_dropped)]

    def parts(self, index: int) -> tuple[float, ...]:
        """The member's rewards, where the advantage needs each; NaN for one that does not score it, or where an episode gave the
        sum.
        """
        scored = self.scored[index]
        known = scored.parts if scored is not None else {}
        return tuple(known.get(name, math.nan) for name in self.part_names)

    def turn_returns(self, index: int) -> tuple[float, ...]:
        """Returns of the turns of a scored member, as in EpisodeResult; empty with algorithm.credit=episode."""
        done, scored = self.completions[index], self.scored[index]
        if not self.credits_turns or not isinstance(done, EpisodeResult) or scored is None:
            return ()
        return done.turn_returns(scored.total)

    @property
    def is_worth_training(self) -> bool:
        """Whether any advantage is not 0."""
        if not self.credits_turns:
            return is_group_worth_training([[reward] for reward in self.own_rewards])
        return is_group_worth_training([self.turn_returns(index) for index in self.trained_members])

    @property
    def own_rewards(self) -> list[float]:
        """Rewards of the members that are trained."""
        return [reward for index in self.trained_members if (reward := self.rewards[index]) is not None]

    @property
    def is_done(self) -> bool:
        return None not in self.scored

    # ------------------------------------------------------------------------------------------------ in checkpoints

    def restore(self, saved: SavedGroup) -> None:
        """Take what a checkpoint has of it; with a smaller `rollout.group_size` than then, the first samples, and without rewards
        that depend on what has changed.
        """
        for sample in saved.samples:
            if not sample.is_over and sample.index < len(self.completions):
                assert isinstance(sample.completion, EpisodeResult)
                self.playing[sample.index] = sample.completion
            elif sample.index < len(self.completions):
                self.complete(sample.index, sample.completion)
                has_reward = math.isfinite(sample.reward) and saved.reward_digest == self.reward_digest and not self.part_names
                if has_reward and self.has_teacher:
                    self.rewarded[sample.index] = Scored(sample.reward, {})
                elif has_reward:
                    self.scored[sample.index] = Scored(sample.reward, {})
        if len(self.missing) < len(self.completions) or self.playing:
            self.oldest = self._oldest_token
            self.begun_seconds = self.ended_seconds = time.time()

    def saved(self, playing: Mapping[int, EpisodeResult] | None = None) -> SavedGroup:
        """Its samples that have ended, and the episodes that are `playing`, by member."""
        known = [self.rewarded.get(index) if scored is None else scored for index, scored in enumerate(self.scored)]
        pairs = enumerate(zip(self.completions, known, strict=True))
        samples = [SavedSample(index, done, math.nan if own is None else own.total) for index, (done, own) in pairs if done]
        samples += [SavedSample(index, one, math.nan, is_over=False) for index, one in (playing or {}).items()]
        return SavedGroup(self.key, tuple(samples), self.request_digest, self.reward_digest)


def oldest_of(completion: Completion | EpisodeResult) -> int | None:
    """The version of its oldest token."""
    return completion.oldest if isinstance(completion, EpisodeResult) else int(completion.weight_versions.min())
