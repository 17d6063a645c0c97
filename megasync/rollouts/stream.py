"""The stream of groups on rank 0: lets them begin, scores samples as they end, and makes batches of groups that are done.

It runs in a thread with an event loop of its own, beside the trainer. Leaves out that thread (loop_thread.py), the way to the
replicas and back (dispatch.py), the decisions (scheduler.py), and prompts, rewards and metrics (rollout.py).

    stream = RolloutStream(pool, settings, make_group, score, note)
    stream.serve(version=0)           # after each publish
    stream.admit(step=0)
    groups = stream.take(step=0)      # None: too few replicas are left; publish again
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from bridge.generation import Completion, GenerationRequest
from engine.objective.advantages import is_group_worth_training
from megasync.episodes.task import Played, Task
from megasync.rewards.pool import Scored
from megasync.rollouts.attempt import TurnGroup, take_in
from megasync.rollouts.dispatch import Dispatcher
from megasync.rollouts.group import Group, StreamSettings, restore_groups
from megasync.rollouts.loop_thread import LoopThread, Result
from megasync.rollouts.progress import Progress, SavedGroup
from megasync.rollouts.scheduler import Candidate, PrefetchController, choose_batch, num_admissible
from megasync.rollouts.turns import Episodes, EpisodeSettings, Player

if TYPE_CHECKING:
    from bridge.replicas.pool import ReplicaPool


class RolloutStream(LoopThread):
    """The public methods are for the trainer's thread, others for the stream's own. `close` leaves alone what is generated."""

    def __init__(
        self,
        pool: ReplicaPool,
        settings: StreamSettings,
        make_group: Callable[[int], Group],
        score: Callable[[Group, Sequence[int]], Awaitable[list[Scored]]],
        note: Callable[[str], None],
        loop: asyncio.AbstractEventLoop | None = None,
        episodes: tuple[Player, EpisodeSettings] | None = None,
    ) -> None:
        """`make_group` makes that of an ordinal, `score` gives what samples are worth, `note` says something to the user.

        `loop`: with a clock of its own; None: a plain one. `episodes`: who plays those of the groups' members, which have tasks.
        """
        super().__init__(loop)
        self.settings, self.make_group, self.score, self.note = settings, make_group, score, note
        self.step = 0  # the next to be trained
        self.num_begun = self.num_trained = 0  # the first ordinal that was never admitted; how many groups were taken
        self.num_filtered = 0
        self.lead = PrefetchController(settings.max_staleness + 1)
        self._taken_seconds: float | None = None  # when the last batch was
        self._groups: dict[int, Group] = {}  # admitted, neither taken nor discarded
        self._done: set[int] = set()  # of these, those whose samples all have their rewards
        self._anew: list[int] = []  # ordinals below `num_begun` that are to be admitted again
        self._uniform_groups: dict[int, Group] = {}  # discarded since the last batch: all of their rewards are equal
        self._num_scoring = 0
        self._num_outside = 0
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._dispatcher = Dispatcher(pool, settings, self._start, self._take_in, self._fail, self._changed.set, note)
        self._episodes = None
        if episodes is not None:
            own = self._dispatcher
            self._episodes = Episodes(*episodes, own.add, own.drop, self._start, self._take_in_member)
        self._begin_thread("rollouts")

    def serve(self, version: int) -> None:
        """The pool's members serve `version` from now on."""
        self.run(self._serve(version))

    def let_go(self) -> set[int]:
        """Forget replicas that the pool wants no more and that have nothing to do; those that still have something."""
        return self.run(self._let_go())

    def admit(self, step: int) -> None:
        """Let groups begin that `step`, the next to be trained, makes room for."""
        self.run(self._admit(step))

    def take(self, step: int) -> list[Group] | None:
        """The groups that `step` trains on, in order; None once there are fewer than `min_replicas` replicas.

        Raises:
            RuntimeError, or what a reward raised: the stream cannot go on. A step for which nothing runs and no batch can be
                chosen is told with its numbers.
        """
        return self.run(self._take(step))

    def generate(
        self, requests: Sequence[GenerationRequest], tasks: Sequence[Task] = ()
    ) -> list[list[Completion | Played]] | None:
        """Completions, or episodes of these tasks, outside of the stream, ahead of what waits in it; None as for `take`."""
        return self.run(self._generate(requests, tasks))

    def progress(self) -> Progress:
        """What a run that is resumed here needs to know."""
        return self.run(self._progress())

    def begun(self) -> Progress:
        """As `progress`, without samples."""
        return self.run(self._begun())

    def restore(self, progress: Progress, step: int) -> None:
        """Go on from there with `step`, before the first `admit`. Samples that had not ended begin anew, and groups that this
        config asks or scores in another way, or cannot train in time.
        """
        self.run(self._restore(progress, step))

    # ------------------------------------------------------------------------------------------------ what the trainer asks

    async def _serve(self, version: int) -> None:
        self._dispatcher.serve(version)
        self._changed.set()

    async def _let_go(self) -> set[int]:
        return self._dispatcher.let_go()

    async def _admit(self, step: int) -> None:
        self.step = step
        self._fill()

    def _fill(self) -> None:
        """Let groups begin for which there is room; the first of those that have to begin anew come first."""
        own, version = self.settings, self._dispatcher.version
        most = self.lead.batches * own.batch_size
        if self.step == version and (held := self.lead.num_held(own.batch_size)) and self._batch(self.step) is None:
            most -= held
        num_kept = len(self._groups) + self._num_unreplaced
        room = num_admissible(num_kept, self.step, version, most, own.batch_size, own.num_steps)
        again, self._anew = self._anew[:room], self._anew[room:]
        first, self.num_begun = self.num_begun, self.num_begun + room - len(again)
        admitted = {ordinal: self.make_group(ordinal) for ordinal in (*again, *range(first, self.num_begun))}
        self._groups |= admitted
        self._begin(list(admitted.values()))

    def _begin(self, groups: list[Group]) -> None:
        if self._episodes is None:
            self._dispatcher.add(groups)
        else:
            self._episodes.begin(groups)

    @property
    def _is_busy(self) -> bool:
        """Whether samples wait or run, or are scored."""
        is_playing = self._episodes is not None and self._episodes.is_busy
        return self._dispatcher.is_busy or is_playing or self._num_scoring > 0

    @property
    def _num_unreplaced(self) -> int:
        """Groups that were discarded beyond those that others may replace: the next batch may lack them."""
        return max(0, len(self._uniform_groups) - (self.settings.filter_factor - 1) * self.settings.batch_size)

    async def _take(self, step: int) -> list[Group] | None:
        begin_seconds = self._loop.time()
        batch = await self._wait_for(lambda: self._choose(step))
        if batch is None:
            return None
        self.step = step + 1
        self.num_trained += len(batch)
        before, self._taken_seconds = self._taken_seconds, self._loop.time()
        if before is not None:  # nothing could be ready for the first
            wait_share = (self._taken_seconds - begin_seconds) / (self._taken_seconds - before)
            self.lead.observe(wait_share, len(self._done) / self.settings.batch_size)
        self._fill()
        return batch

    async def _wait_for(self, look: Callable[[], Result | None]) -> Result | None:
        """What `look` finds once it is not None; None once there are fewer than `min_replicas` replicas."""
        while (found := look()) is None:
            if self._failure is not None:
                raise self._failure
            if not self._is_busy:
                told = f"step {self.step + 1} waits for a batch, and nothing runs that could be in it"
                raise RuntimeError(f"{told}: {self._numbers()}")
            if self._dispatcher.num_replicas < self.settings.min_replicas:
                return None
            self._changed.clear()
            await self._changed.wait()
        return found

    def _numbers(self) -> str:
        own, oldest = self.settings, Counter(group.oldest for group in self._groups.values())
        versions = ", ".join(f"{number} of version {version}" for version, number in oldest.items()) or "none"
        return (
            f"groups that are not trained: {versions}; discarded: {len(self._uniform_groups)}; to begin anew: {len(self._anew)}; "
            f"next prompt {self.num_begun}; served version {self._dispatcher.version}; data.batch_size={own.batch_size}, "
            f"rollout.max_staleness={own.max_staleness}, lead of {self.lead.batches} batches, run.steps={own.num_steps}"
        )

    def _choose(self, step: int) -> list[Group] | None:
        """The groups of the batch, which are the stream's no longer."""
        own, batch = self.settings, self._batch(step)
        if batch is None or not (batch or self._uniform_groups):
            return None
        self._done.difference_update(batch)
        chosen = {ordinal: self._groups.pop(ordinal) for ordinal in batch}
        spare = sorted(self._uniform_groups)[: own.batch_size - len(batch)]  # groups that teach nothing complete it
        chosen |= {ordinal: self._uniform_groups[ordinal] for ordinal in spare}
        self._uniform_groups = {}
        return [chosen[ordinal] for ordinal in sorted(chosen)]

    def _batch(self, step: int) -> list[int] | None:
        """The ordinals that are ready to be taken; None while `step` has to wait."""
        own, newest = self.settings, self._dispatcher.version
        is_growing = len(self._done) < len(self._groups)
        if is_growing and len(self._done) < own.batch_size:
            return None
        oldest = {ordinal: newest if group.oldest is None else group.oldest for ordinal, group in self._groups.items()}
        candidates = [Candidate(ordinal, version, ordinal in self._done) for ordinal, version in oldest.items()]
        return choose_batch(candidates, step, own.max_staleness, own.batch_size, may_grow=is_growing)

    async def _progress(self) -> Progress:
        """Groups that were discarded will not be trained."""
        playing = self._episodes.playing if self._episodes is not None else lambda _: {}
        return self._with([group.saved(playing(group)) for group in self._groups.values()])

    async def _begun(self) -> Progress:
        return self._with([SavedGroup(key) for key in self._groups])

    def _with(self, groups: list[SavedGroup]) -> Progress:
        """And those that are to begin anew."""
        groups += [SavedGroup(ordinal) for ordinal in self._anew]
        groups.sort(key=lambda group: group.key)
        return Progress(self.num_trained, self.num_begun, self._dispatcher.expected_tokens, tuple(groups))

    async def _restore(self, progress: Progress, step: int) -> None:
        restored = restore_groups(progress, step, self.settings, self.make_group)
        self.step, self._anew = step, restored.anew
        self.num_trained, self.num_begun = progress.num_trained, progress.num_begun or progress.num_trained
        self._groups = {group.key: group for group in restored.groups}
        self._dispatcher.expected_tokens = progress.expected_tokens or self._dispatcher.expected_tokens
        self._begin([group for group in restored.groups if group.missing])
        for group in restored.groups:
            self._score_ended(group)
            self._settle(group)
        for note in restored.notes:
            self.note(note)

    async def _generate(
        self, requests: Sequence[GenerationRequest], tasks: Sequence[Task] = ()
    ) -> list[list[Completion | Played]] | None:
        """Keys below 0, the first request's the lowest."""
        first = self._num_outside - len(requests)
        of_groups = itertools.zip_longest(requests, tasks)
        groups = [Group(first + place, request, task=task) for place, (request, task) in enumerate(of_groups)]
        self._num_outside = first
        self._begin(groups)
        try:
            if await self._wait_for(lambda: None if any(group.missing for group in groups) else True) is None:
                return None
        finally:
            self._dispatcher.drop(groups)
            if self._episodes is not None:
                self._episodes.drop(groups)
        return [[completion for completion in group.completions if completion is not None] for group in groups]

    # ------------------------------------------------------------------------------------------------ what the replicas finish

    def _take_in(self, group: Group) -> None:
        if isinstance(group, TurnGroup):
            take_in(group)
        elif group.key >= 0:
            self._score_ended(group)

    def _take_in_member(self, group: Group) -> None:
        """An episode has ended."""
        self._changed.set()
        if group.key >= 0:
            self._score_ended(group)

    def _score_ended(self, group: Group) -> None:
        """What has ended and is not being scored; all samples together where the reward looks at them together."""
        samples = [sample for sample in group.unscored if sample not in group.in_scoring]
        if samples and not (self.settings.scores_groups and group.missing):
            group.in_scoring.update(samples)
            self._num_scoring += 1
            self._start(self._reward(group, range(len(group.rewards)) if self.settings.scores_groups else samples))

    async def _reward(self, group: Group, samples: Sequence[int]) -> None:
        try:
            for sample, scored in zip(samples, await self.score(group, samples), strict=True):
                group.rewards[sample], group.scored[sample] = scored.total, scored
        except Exception as error:  # noqa: BLE001 # the trainer raises it
            self._fail(error)
        self._num_scoring -= 1
        self._settle(group)

    def _settle(self, group: Group) -> None:
        """A group that is done can be trained; but nothing is learnt from equal rewards, and another one takes the place of such
        a group, as long as `filter_factor` lets it.
        """
        if not group.is_done:
            return
        if self.settings.filters_groups and not is_group_worth_training(group.own_rewards):
            self._uniform_groups[group.key] = self._groups.pop(group.key)
            self.num_filtered += 1
        else:
            self._done.add(group.key)
        self._fill()
        self._changed.set()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._changed.set()
