"""The stream of groups on rank 0: lets them begin, scores samples as they end, and makes batches of groups that are done.

It runs in a thread with an event loop of its own, beside the trainer. Leaves out the way to the replicas and back (dispatch.py),
the decisions (scheduler.py), and prompts, rewards and metrics (rollout.py).

    stream = RolloutStream(pool, settings, make_group, score, note)
    stream.serve(version=0)           # after each publish
    stream.admit(step=0)
    groups = stream.take(step=0)      # None: too few replicas are left; publish again
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from bridge.generation import Completion, GenerationRequest
from engine.advantages import is_group_worth_training
from megasync.rollouts.dispatch import Dispatcher
from megasync.rollouts.group import Group, StreamSettings
from megasync.rollouts.progress import Progress
from megasync.rollouts.rewards.pool import Scored
from megasync.rollouts.scheduler import Candidate, Lead, choose_batch, expired, num_admissible

if TYPE_CHECKING:
    from bridge.replicas.pool import ReplicaPool

Result = TypeVar("Result")
CLOSE_SECONDS = 10.0  # for what still runs to hear that it is cancelled


class RolloutStream:
    """The public methods are for the trainer's thread, all others for the stream's own."""

    def __init__(
        self,
        pool: ReplicaPool,
        settings: StreamSettings,
        make_group: Callable[[int], Group],
        score: Callable[[Group, Sequence[int]], Awaitable[list[Scored]]],
        note: Callable[[str], None],
    ) -> None:
        """`make_group` makes that of an ordinal, `score` gives what samples are worth, `note` says something to the user."""
        self.settings, self.make_group, self.score = settings, make_group, score
        self.step = 0
        self.num_begun = self.num_trained = 0  # ordinals that were admitted; that were taken
        self.num_replaced = self.replaced_in_step = self.num_filtered = 0
        self.lead = Lead(settings.max_staleness + 1)
        self._taken_seconds: float | None = None  # when the last batch was
        self._groups: dict[int, Group] = {}  # admitted and not taken
        self._equal: dict[int, Group] = {}  # done since the last batch, with rewards that are all equal
        self._unreplaced: set[int] = set()  # of these
        self._num_outside = 0
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._dispatcher = Dispatcher(pool, settings, self._start, self._take_in, self._fail, self._changed.set, note)
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()

    def serve(self, version: int) -> None:
        """The pool's members serve `version` from now on."""
        self.run(self._serve(version))

    def admit(self, step: int) -> None:
        """Let groups begin that `step`, the next to be trained, makes room for."""
        self.run(self._admit(step))

    def take(self, step: int) -> list[Group] | None:
        """The groups that `step` trains on, in order; None once there are fewer than `min_replicas` replicas.

        Raises:
            RuntimeError, or what a reward raised: the stream cannot go on.
        """
        return self.run(self._take(step))

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]] | None:
        """Completions outside of the stream, ahead of what waits in it; None as for `take`."""
        return self.run(self._generate(requests))

    def progress(self) -> Progress:
        """What a run that is resumed here needs to know."""
        return self.run(self._progress())

    def restore(self, progress: Progress) -> None:
        """Go on from there, before the first `admit`. What had not ended begins anew."""
        self.run(self._restore(progress))

    def close(self) -> None:
        """End the thread; what is generated is left alone. Safe to repeat."""
        if self._thread.is_alive():
            self.run(self._cancel())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _cancel(self) -> None:
        for task in (tasks := list(self._tasks)):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """What `work` on the stream's event loop gives."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # ------------------------------------------------------------------------------------------------ what the trainer asks

    async def _serve(self, version: int) -> None:
        self._dispatcher.serve(version)
        self._changed.set()

    async def _admit(self, step: int) -> None:
        if step != self.step:
            self.step, self.replaced_in_step = step, 0
        own = self.settings
        wanted = num_admissible(self.num_trained, self.lead.batches, own.batch_size, own.num_steps - step, self.num_replaced)
        admitted = {ordinal: self.make_group(ordinal) for ordinal in range(self.num_begun, wanted)}
        self.num_begun = max(self.num_begun, wanted)
        self._groups |= admitted
        self._dispatcher.add(list(admitted.values()))

    async def _take(self, step: int) -> list[Group] | None:
        begin_seconds = time.monotonic()
        batch = await self._wait_for(lambda: self._choose(step))
        if batch is None:
            return None
        self.num_trained += len(batch)
        taken = [self._groups.pop(ordinal) for ordinal in batch]
        before, self._taken_seconds = self._taken_seconds, time.monotonic()
        if before is not None:  # nothing could be ready for the first
            num_ready = sum(group.is_done for group in self._groups.values())
            wait_share = (self._taken_seconds - begin_seconds) / (self._taken_seconds - before)
            self.lead.observe(wait_share, num_ready / self.settings.batch_size)
        return taken

    async def _wait_for(self, look: Callable[[], Result | None]) -> Result | None:
        """What `look` finds once it is not None; None once there are fewer than `min_replicas` replicas."""
        while (found := look()) is None:
            if self._failure is not None:
                raise self._failure
            if self._dispatcher.num_replicas < self.settings.min_replicas:
                return None
            self._changed.clear()
            await self._changed.wait()
        return found

    def _choose(self, step: int) -> list[int] | None:
        own, newest = self.settings, self._dispatcher.version
        groups = self._groups.values()
        candidates = [Candidate(one.key, newest if one.oldest is None else one.oldest, one.is_done) for one in groups]
        if too_old := expired(candidates, step, own.max_staleness):
            self._begin_anew(too_old)
            return None
        is_growing = any(not candidate.is_done for candidate in candidates)
        batch = choose_batch(candidates, step, own.max_staleness, own.batch_size, may_grow=is_growing)
        if batch is not None and len(batch) < own.batch_size:  # what there is: groups that teach nothing complete it
            spare = sorted(self._equal)[: own.batch_size - len(batch)]
            self._groups |= {ordinal: self._equal.pop(ordinal) for ordinal in spare}
            self.num_replaced -= len(set(spare) - self._unreplaced)
            batch = sorted([*batch, *spare])
        if batch:
            self.num_replaced += len(self._unreplaced & set(self._equal))
            self._equal, self._unreplaced = {}, set()
        return batch or None

    async def _progress(self) -> Progress:
        """Groups with equal rewards that were not replaced yet will not be trained."""
        groups = tuple((key, tuple(self._groups[key].ended_samples())) for key in sorted(self._groups))
        num_replaced = self.num_replaced + len(self._unreplaced)
        return Progress(self.num_trained, self.num_begun, num_replaced, self._dispatcher.expected_tokens, groups)

    async def _restore(self, progress: Progress) -> None:
        self.num_trained, self.num_begun = progress.num_trained, progress.num_begun or progress.num_trained
        self.num_replaced = progress.num_replaced
        self._dispatcher.expected_tokens = progress.expected_tokens or self._dispatcher.expected_tokens
        for key, samples in progress.groups:
            group = self._groups[key] = self.make_group(key)
            group.restore(samples)
            self._score_ended(group)
        self._dispatcher.add([group for group in self._groups.values() if group.missing])

    async def _generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]] | None:
        """Keys below 0, the first request's the lowest."""
        first = self._num_outside - len(requests)
        groups = [Group(first + place, request) for place, request in enumerate(requests)]
        self._num_outside = first
        self._dispatcher.add(groups)
        try:
            if await self._wait_for(lambda: None if any(group.missing for group in groups) else True) is None:
                return None
        finally:
            self._dispatcher.drop([group.key for group in groups])
        return [[completion for completion in group.completions if completion is not None] for group in groups]

    # ------------------------------------------------------------------------------------------------ what the replicas finish

    def _take_in(self, group: Group) -> None:
        if group.key >= 0:
            self._score_ended(group)

    def _score_ended(self, group: Group) -> None:
        """What has ended and is not being scored; all samples together where the reward looks at them together."""
        samples = [sample for sample in group.unscored if sample not in group.in_scoring]
        if samples and not (self.settings.scores_groups and group.missing):
            group.in_scoring.update(samples)
            self._start(self._reward(group, range(len(group.rewards)) if self.settings.scores_groups else samples))

    async def _reward(self, group: Group, samples: Sequence[int]) -> None:
        try:
            for sample, scored in zip(samples, await self.score(group, samples), strict=True):
                group.rewards[sample], group.scored[sample] = scored.total, scored
        except Exception as error:  # noqa: BLE001 # the trainer raises it
            self._fail(error)
        rewards = [reward for reward in group.rewards if reward is not None]
        if group.is_done and self.settings.filters_groups and not is_group_worth_training(rewards):
            await self._replace_equal(group)
        if group.is_done:
            self._changed.set()

    async def _replace_equal(self, group: Group) -> None:
        """Nothing is learnt from equal rewards: another group takes the place of this one, while there may be more."""
        own = self.settings
        self._equal[group.key] = self._groups.pop(group.key)
        self.num_filtered += 1
        if self.replaced_in_step >= (own.filter_factor - 1) * own.batch_size:
            self._unreplaced.add(group.key)
        else:
            self.num_replaced += 1
            self.replaced_in_step += 1
            await self._admit(self.step)

    def _begin_anew(self, ordinals: Sequence[int]) -> None:
        self._groups |= {ordinal: self.make_group(ordinal) for ordinal in ordinals}
        self._dispatcher.drop(ordinals)
        self._dispatcher.add([self._groups[ordinal] for ordinal in ordinals])

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._changed.set()

    def _start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
