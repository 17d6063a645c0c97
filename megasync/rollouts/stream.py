"""The stream of groups on rank 0: admits them, scores samples as they end, and makes batches of groups that are done.

It runs in a thread with an event loop of its own, beside the trainer. Leaves out that thread and the events (events.py), the way
to the replicas and back (dispatch.py), the decisions (scheduler.py), and prompts, rewards and metrics (rollout.py).

    stream = RolloutStream(pool, settings, make_group, score, note)
    stream.run(stream.serve(version=0))           # after each publish
    stream.run(stream.admit(step=0))
    groups = stream.run(stream.take(step=0))      # None: too few replicas are left; publish again
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from bridge.generation import Completion, GenerationRequest
from megasync.episodes.task import EpisodeResult, Task
from megasync.rewards.pool import Scored
from megasync.rollouts import events
from megasync.rollouts.dispatch import Dispatcher
from megasync.rollouts.events import EventThread, Result
from megasync.rollouts.group import Group, StreamSettings
from megasync.rollouts.progress import Progress, SavedGroup
from megasync.rollouts.restore import restore_groups
from megasync.rollouts.scheduler import Candidate, PrefetchController, choose_batch, choose_first, num_admissible
from megasync.rollouts.turns import Episodes, EpisodeSettings, Player

if TYPE_CHECKING:
    from bridge.replicas.pool import ReplicaPool


class RolloutStream:
    """Coroutines are called on the stream's event loop; from another thread by `run`. `close` does not abort running requests."""

    def __init__(
        self,
        pool: ReplicaPool,
        settings: StreamSettings,
        make_group: Callable[[int], Group],
        score: Callable[[Group, Sequence[int]], Awaitable[list[Scored]]],
        note: Callable[[str], None],
        loop: asyncio.AbstractEventLoop | None = None,
        episodes: tuple[Player, EpisodeSettings] | None = None,
        is_worth_training: Callable[[Group], bool] = lambda group: group.is_worth_training,
    ) -> None:
        """`make_group` makes the group of an ordinal, `score` gives the rewards of its samples, `note` logs a line for the user.

        `loop`: with a clock of its own; None: a plain one. `episodes`: where the groups have tasks, who plays them.
        `is_worth_training`: of a group that is done, where `settings.filters_groups`.
        """
        self.settings, self.make_group, self.score, self.note = settings, make_group, score, note
        self.is_worth_training = is_worth_training
        self.step = 0  # the next to be trained
        self.num_begun = self.num_trained = 0  # the first ordinal that was never admitted; how many groups were trained
        self._num_aborted = self._num_filtered = 0
        self._counted = 0, 0  # of these, by take_counts
        self.lead = PrefetchController(settings.max_staleness + 1)
        self._taken_seconds: float | None = None  # when the last batch was
        self._groups: dict[int, Group] = {}  # admitted, neither taken nor discarded
        self._taken: list[Group] = []  # the batch that was taken last, until it is trained
        self._done: set[int] = set()  # of these, groups whose samples all have their rewards
        self._again: list[int] = []  # ordinals below `num_begun` that are to be admitted again
        self._owed: set[int] = set()  # aborted ones of these and of `_groups`: the next batch waits for them
        self._uniform_groups: dict[int, Group] = {}  # discarded since the last batch: not worth training
        self.discarded: list[Group] = []  # the part of these that the last batch left out
        self._num_scoring = 0
        self._num_outside = 0
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self.events = EventThread("rollouts", self.handle, loop)
        self.dispatcher = Dispatcher(pool, settings, self.events, note)
        self._episodes = Episodes(*episodes, self.events) if episodes is not None else None

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of one of the coroutines, for other threads."""
        return self.events.run(work)

    def close(self, *last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """End all tasks, then run `last` on the loop, and end the thread."""
        self.events.close(*last)

    # ------------------------------------------------------------------------------------------------ events

    def handle(self, happened: Sequence[events.Event]) -> None:
        """All that happens to groups between two calls of the trainer."""
        try:
            for event in happened:
                self._apply(event)
            self.dispatcher.feed()
        except Exception as error:  # noqa: BLE001 # raised on the trainer's thread
            self._failure = self._failure or error
        self._changed.set()

    def _apply(self, event: events.Event) -> None:
        match event:
            case events.SamplesFinished():
                self._on_samples(event)
            case events.ReplicaLost():
                self.dispatcher.lose(event.slot, event.reason)
            case events.NotServing():
                self.dispatcher.take_back(event)
            case events.RequestRefused():
                self.dispatcher.refuse(event)
            case events.TurnAsked():
                self.dispatcher.add([event.turn])
            case events.EpisodeEnded():
                self._on_episode(event)
            case events.SamplesScored():
                self._on_scores(event)
            case events.Failed():
                self._failure = self._failure or event.error

    def _on_samples(self, event: events.SamplesFinished) -> None:
        for group in self.dispatcher.take_in(event):
            if group.is_turn:
                group.answer_turn()
            else:
                self._score_ended(group)

    def _on_episode(self, event: events.EpisodeEnded) -> None:
        assert self._episodes is not None
        self._episodes.finish(event)
        self._score_ended(event.group)

    def _score_ended(self, group: Group) -> None:
        """Score the samples that have ended; all together where the reward looks at them together."""
        samples = group.unscored
        if group.key >= 0 and samples and not (self.settings.scores_groups and group.missing):
            group.in_scoring.update(samples)
            self._num_scoring += 1
            self.events.start(self._score(group, range(len(group.scored)) if self.settings.scores_groups else samples))

    async def _score(self, group: Group, samples: Sequence[int]) -> None:
        self.events.put(events.SamplesScored(group, samples, await self.score(group, samples)))

    def _on_scores(self, event: events.SamplesScored) -> None:
        self._num_scoring -= 1
        for sample, scored in zip(event.samples, event.scored, strict=True):
            event.group.scored[sample] = scored
        self._finish_if_done(event.group)

    def take_counts(self) -> tuple[int, int]:
        """Groups that were aborted, and that others replaced, since the last call. From any thread."""
        former, self._counted = self._counted, (self._num_aborted, self._num_filtered)
        return self._counted[0] - former[0], self._counted[1] - former[1]

    def _finish_if_done(self, group: Group) -> None:
        """A group that is done can be trained; but another one replaces a group that is not worth training, such as one of equal
        rewards, as long as `filter_factor` lets it.
        """
        if not group.is_done or not group.is_wanted:
            return
        if self.settings.filters_groups and not self.is_worth_training(group):
            self._uniform_groups[group.key] = self._groups.pop(group.key)
            self._num_filtered += 1
        else:
            self._done.add(group.key)
        self._fill()

    # ------------------------------------------------------------------------------------------------ what the trainer calls

    async def serve(self, version: int) -> None:
        """The pool's members serve `version` from now on."""
        self.dispatcher.serve(version)
        self.dispatcher.feed()
        self._changed.set()

    async def release_idle(self) -> set[int]:
        """Forget leaving replicas that have nothing to do; returns the leaving ones that still work."""
        return self.dispatcher.release_idle()

    async def admit(self, step: int) -> None:
        """Let groups begin that `step`, the next to be trained, makes room for."""
        self.step = step
        self._fill()
        self.dispatcher.feed()

    def _fill(self) -> None:
        """Let groups begin for which there is room; those to be admitted again come first."""
        own, version = self.settings, self.dispatcher.version
        if own.oversample > 1 and self.step != version:
            return  # what began now would be older than the step that trains it
        most = self.lead.batches * own.num_together
        if self.step == version and (held := self.lead.num_held(own.batch_size)) and self._batch(self.step) is None:
            most -= held
        num_unreplaced = max(
            0, len(self._uniform_groups) - (own.filter_factor - 1) * own.batch_size
        )  # the next batch may lack them
        num_kept = len(self._groups) + num_unreplaced
        room = num_admissible(num_kept, self.step, version, most, own.num_together, own.num_steps)
        again, self._again = self._again[:room], self._again[room:]
        first, self.num_begun = self.num_begun, self.num_begun + room - len(again)
        admitted = {ordinal: self.make_group(ordinal) for ordinal in (*again, *range(first, self.num_begun))}
        self._groups |= admitted
        self._begin(list(admitted.values()))

    def _begin(self, groups: list[Group]) -> None:
        if self._episodes is None:
            self.dispatcher.add(groups)
        else:
            self._episodes.begin(groups)

    @property
    def _is_busy(self) -> bool:
        """Whether samples wait or run, or are scored."""
        is_playing = self._episodes is not None and self._episodes.is_busy
        return self.dispatcher.is_busy or is_playing or self._num_scoring > 0

    async def take(self, step: int) -> list[Group] | None:
        """The groups that `step` trains on, in order; None once there are fewer than `min_replicas` replicas.

        Raises:
            RuntimeError, or what a reward raised: the stream cannot continue; also where nothing runs that could be in the batch.
        """
        self.mark_trained()
        begin_seconds = self.events.loop.time()
        batch = await self._wait_for(lambda: self._choose(step))
        if batch is None:
            return None
        self._taken = batch
        if self.settings.oversample > 1:
            await self._abort_rest()
        self.step = step + 1
        before, self._taken_seconds = self._taken_seconds, self.events.loop.time()
        if before is not None:  # nothing could be ready for the first
            wait_share = (self._taken_seconds - begin_seconds) / (self._taken_seconds - before)
            self.lead.observe(wait_share, len(self._done) / self.settings.batch_size)
        self._fill()
        self.dispatcher.feed()
        return batch

    def mark_trained(self) -> None:
        """The batch that was taken last is trained: checkpoints leave it out from now on. From any thread."""
        self.num_trained, self._taken = self.num_trained + len(self._taken), []

    async def _abort_rest(self) -> None:
        """The groups that are left begin again in the next step, before any other."""
        rest, self._groups, self._done = list(self._groups.values()), {}, set()
        for group in rest:
            group.is_wanted = False
        self._owed = {group.key for group in rest}
        self._again = sorted({*self._again, *self._owed})
        self._num_aborted += len(rest)
        await self.dispatcher.abort(rest)

    async def _wait_for(self, look: Callable[[], Result | None]) -> Result | None:
        """Wait until `look` returns something, and return it; None once there are fewer than `min_replicas` replicas."""
        while (found := look()) is None:
            if self._failure is not None:
                raise self._failure
            if not self._is_busy:
                waits = f"step {self.step + 1} waits for a batch, and nothing runs that could be in it"
                raise RuntimeError(f"{waits}: {self._numbers()}")
            if self.dispatcher.num_replicas < self.settings.min_replicas:
                return None
            self._changed.clear()
            await self._changed.wait()
        return found

    def _numbers(self) -> str:
        own, oldest = self.settings, Counter(group.oldest for group in self._groups.values())
        versions = ", ".join(f"{number} of version {version}" for version, number in oldest.items()) or "none"
        return (
            f"groups that are not trained: {versions}; discarded: {len(self._uniform_groups)}; to start again: "
            f"{len(self._again)}; next prompt {self.num_begun}; served version {self.dispatcher.version}; "
            f"data.batch_size={own.batch_size}, rollout.max_staleness={own.max_staleness}, "
            f"lead of {self.lead.batches} batches, run.steps={own.num_steps}"
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
        self.discarded = [group for ordinal, group in self._uniform_groups.items() if ordinal not in chosen]
        self._uniform_groups = {}
        return [chosen[ordinal] for ordinal in sorted(chosen)]

    def _batch(self, step: int) -> list[int] | None:
        """The ordinals that are ready to be taken; None while `step` has to wait."""
        own, newest = self.settings, self.dispatcher.version
        is_growing = len(self._done) < len(self._groups)
        if is_growing and len(self._done) < own.batch_size:
            return None
        if own.oversample > 1:
            return choose_first(self._done, self._owed & self._groups.keys(), own.batch_size, may_grow=is_growing)
        oldest = {ordinal: newest if group.oldest is None else group.oldest for ordinal, group in self._groups.items()}
        candidates = [Candidate(ordinal, version, ordinal in self._done) for ordinal, version in oldest.items()]
        return choose_batch(candidates, step, own.max_staleness, own.batch_size, may_grow=is_growing)

    async def generate(
        self, requests: Sequence[GenerationRequest], tasks: Sequence[Task] = ()
    ) -> list[list[Completion | EpisodeResult]] | None:
        """Completions, or episodes of these tasks, outside of the stream, before what waits in it; None as for `take`.

        Keys are below 0, the first request's the lowest.
        """
        first = self._num_outside - len(requests)
        of_groups = itertools.zip_longest(requests, tasks)
        groups = [Group(first + place, request, task=task) for place, (request, task) in enumerate(of_groups)]
        self._num_outside = first
        self._begin(groups)
        self.dispatcher.feed()
        try:
            if await self._wait_for(lambda: None if any(group.missing for group in groups) else True) is None:
                return None
        finally:
            for group in groups:
                group.is_wanted = False
            if self._episodes is not None:
                self._episodes.drop(groups)
        return [[completion for completion in group.completions if completion is not None] for group in groups]

    async def progress(self, *, with_samples: bool = True) -> Progress:
        """For a run that resumes here. Groups that were discarded will not be trained; a batch that is not trained yet will."""
        playing = self._episodes.playing if self._episodes is not None else lambda _: {}
        kept = [*self._taken, *self._groups.values()]
        groups = [group.saved(playing(group)) if with_samples else SavedGroup(group.key) for group in kept]
        groups += [SavedGroup(ordinal) for ordinal in self._again]
        groups.sort(key=lambda group: group.key)
        return Progress(self.num_trained, self.num_begun, self.dispatcher.expected_tokens, tuple(groups))

    async def restore(self, progress: Progress, step: int) -> None:
        """Continue from there with `step`, before the first `admit`. Unfinished samples start again, and so do groups that this
        config asks or scores in another way, or cannot train in time.
        """
        restored = restore_groups(progress, step, self.settings, self.make_group)
        self.step, self._again = step, restored.again
        self.num_trained, self.num_begun = progress.num_trained, progress.num_begun or progress.num_trained
        self._groups = {group.key: group for group in restored.groups}
        num_done = sum(not group.missing for group in restored.groups)  # of a batch that was taken, all
        self._owed = set(restored.again) if num_done < self.settings.batch_size else set()
        self.dispatcher.expected_tokens = progress.expected_tokens or self.dispatcher.expected_tokens
        self._begin([group for group in restored.groups if group.missing])
        for group in restored.groups:
            self._score_ended(group)
            self._finish_if_done(group)
        for note in restored.notes:
            self.note(note)
