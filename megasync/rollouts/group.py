"""A prompt's samples on their way from request to batch, and what a run says of all of them. No torch in here.

A group of a checkpoint goes on where it would be asked the same question today and a step can still train it in time; all others
begin anew. Where only its answer or its reward has changed it is scored anew. Groups whose samples all have the same reward teach
nothing: TieWatch says so once it has been all for some steps. Leaves out the checkpoint's file (progress.py) and who generates
(stream.py).

    restored = restore_groups(progress, step, settings, make_group)
    fraction = tied_fraction([[1.0, 1.0], [0.0, 1.0]])     # 0.5
    hint = TieWatch().look(step=3, fraction=1.0, rewards=[0.0, 0.0])
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field

from bridge.generation import Completion, GenerationRequest
from engine.objective.advantages import is_group_worth_training
from megasync.data.data import PromptOrder
from megasync.episodes.task import Played, Task
from megasync.rewards.pool import Scored
from megasync.rollouts.progress import Progress, SavedGroup, SavedSample
from megasync.rollouts.scheduler import Candidate, trainable

PATIENCE = 3  # steps in a row


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


def tied_fraction(groups: Sequence[Sequence[float]]) -> float:
    """From 0 to 1, of groups of rewards as the advantages are made of them."""
    return statistics.fmean(not is_group_worth_training(rewards) for rewards in groups)


class TieWatch:
    """Over the steps of a run. `filters_groups`: whether it already takes other prompts for tied ones."""

    def __init__(self, *, filters_groups: bool = False) -> None:
        self._filters_groups = filters_groups
        self._in_a_row = 0

    def look(self, step: int, fraction: float, rewards: Sequence[float]) -> str:
        """What to tell the user after `step` steps, once all groups were tied PATIENCE times in a row; else, and later, empty."""
        self._in_a_row = self._in_a_row + 1 if fraction == 1 else 0
        if self._in_a_row != PATIENCE:
            return ""
        if max(rewards) == min(rewards):
            what = f"every reward of step {step} is {rewards[0]:g}"
            look = "Compare responses and answers in samples.jsonl: does the reward read what the model writes, is it cut off?"
        else:
            what = "within each group all samples have the same reward"
            look = "Raise rollout.temperature or rollout.group_size."
        told = f"nothing is learnt since step {step - PATIENCE + 1}: {what}, so that every advantage is 0"
        told += f" (groups/tied_fraction = 1). {look}"
        if self._filters_groups:
            return f"{told} algorithm.filter_groups found no other prompts: some of middling difficulty are needed"
        return f"{told} Prompts of middling difficulty teach most; algorithm.filter_groups=true replaces tied groups"


@dataclass(frozen=True)
class Restored:
    """`groups` go on, those of `anew` begin again; `notes`: what there is to say of it."""

    groups: list[Group]
    anew: list[int]  # ordinals
    notes: list[str]


def restore_groups(progress: Progress, step: int, settings: StreamSettings, make_group: Callable[[int], Group]) -> Restored:
    """The groups that had begun and were not trained, in order, when `step` is trained next."""
    own, anew, other, rescored = settings, list[int](), 0, set[int]()
    groups: dict[int, Group] = {}
    for saved in progress.groups:
        group = make_group(saved.key)
        if is_same := saved.request_digest == group.request_digest:
            group.restore(saved)
        if group.oldest is None:
            anew.append(saved.key)
            other += not is_same and bool(saved.samples)
            continue
        groups[saved.key] = group
        if saved.reward_digest != group.reward_digest:
            rescored.add(saved.key)
    candidates = [Candidate(key, group.oldest, group.is_done) for key, group in groups.items() if group.oldest is not None]
    kept = trainable(candidates, step, own.max_staleness, own.batch_size, own.num_steps)
    counts = other, len(groups) - len(kept), len(rescored & kept)
    anew = sorted([*anew, *(groups.keys() - kept)])
    return Restored([groups[key] for key in sorted(kept)], anew, _notes(len(progress.groups), own, *counts))


def order_notes(progress: Progress, order: PromptOrder) -> list[str]:
    """What there is to say where the prompts that are left come in another order than those that were trained. Pure."""
    then = progress.order
    if then is None or then == order or not progress.num_trained:
        return []
    keys = ("data.train has {} examples that fit, then {}", "run.seed is {}, then {}", "data.shuffle is {}, then {}")
    values = zip(keys, astuple(order), astuple(then), strict=True)
    changes = "; ".join(text.format(str(now).lower(), str(before).lower()) for text, now, before in values if now != before)
    told = "some of them are trained twice in this epoch, and others not at all"
    return [f"the prompts come in another order than before the checkpoint ({changes}): {told}"]


def _notes(num_groups: int, own: StreamSettings, num_other: int, num_late: int, num_rescored: int) -> list[str]:
    limits = f"rollout.max_staleness={own.max_staleness}, data.batch_size={own.batch_size} and run.steps={own.num_steps}"
    told = [f"{num_other} begin anew, since their prompt, how it is sampled or what is played has changed"] if num_other else []
    told += [f"{num_late} begin anew, since with {limits} no step could train them in time"] if num_late else []
    told += [f"{num_rescored} are scored anew, since their answer or rollout.reward has changed"] if num_rescored else []
    return [f"of {num_groups} prompts that had begun and were not trained " + "; ".join(told)] if told else []
