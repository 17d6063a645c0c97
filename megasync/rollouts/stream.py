"""The stream of groups on rank 0: hands them to replicas as slots free up, scores samples as they end, makes batches of them.

It runs in a thread with an event loop of its own, beside the trainer. A replica that dies, or gives no answer in time, loses its
groups to the others and is started anew in the background. Leaves out the decisions (scheduler.py), and prompts, rewards and
metrics (rollout.py).

    stream = RolloutStream(pool, settings, make_group, score, note)
    stream.serve(version=0)           # after each publish
    stream.admit(step=0)
    groups = stream.take(step=0)      # None: too few replicas are left; publish again
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from bridge.messages import Completion, Finished, GenerationRequest, GroupRequest, NotServingError
from engine.advantages import is_group_worth_training
from megasync.rollouts.group import Group, StreamSettings
from megasync.rollouts.progress import Progress
from megasync.rollouts.rewards.pool import Scored
from megasync.rollouts.scheduler import Candidate, Load, choose_batch, choose_replica, expired, num_admissible

if TYPE_CHECKING:
    from bridge.replicas.pool import ReplicaPool

Result = TypeVar("Result")
COLLECT_SECONDS = 1.0  # a replica with no news answers after so long


@dataclass
class _Lane:
    """A replica that is handed groups."""

    load: Load = field(default_factory=Load)
    is_open: bool = True
    is_collected: bool = False


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
        """`make_group` makes that of an ordinal, `score` what samples are worth, `note` says something to the user."""
        self.pool, self.settings, self.make_group, self.score, self.note = pool, settings, make_group, score, note
        self.step, self.version = 0, 0
        self.num_begun = self.num_trained = 0  # ordinals that were handed out or wait for it; that were taken
        self.num_replaced = self.replaced_in_step = self.num_filtered = 0
        self.expected_tokens = settings.expected_tokens
        self._groups: dict[int, Group] = {}  # begun and not taken
        self._equal: dict[int, Group] = {}  # done since the last batch, with rewards that are all equal
        self._unreplaced: set[int] = set()  # of these
        self._waiting: list[Group] = []
        self._lanes: dict[int, _Lane] = {}
        self._num_outside = 0
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
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
        await asyncio.gather(*tasks, return_exceptions=True)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """What `work` on the stream's event loop gives."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # ------------------------------------------------------------------------------------------------ what the trainer asks

    async def _serve(self, version: int) -> None:
        self.version = version
        for replica in [replica for replica in self._lanes if replica not in self.pool.members]:
            self._lose(replica, self._lanes[replica], "took no part in the last sync")
        for replica in self.pool.members:
            lane = self._lanes.setdefault(replica, _Lane())
            lane.is_open = True
            if not lane.is_collected:
                lane.is_collected = True
                self._start(self._collect(replica, lane))
        self._feed()

    async def _admit(self, step: int) -> None:
        if step != self.step:
            self.step, self.replaced_in_step = step, 0
        own = self.settings
        steps_left = own.num_steps - step
        wanted = num_admissible(self.num_trained, own.max_staleness, own.batch_size, steps_left, self.num_replaced)
        while self.num_begun < wanted:
            group = self.make_group(self.num_begun)
            self._groups[group.key] = group
            self._waiting.append(group)
            self.num_begun += 1
        self._feed()

    async def _take(self, step: int) -> list[Group] | None:
        while (batch := self._choose(step)) is None:
            if self._failure is not None:
                raise self._failure
            if len(self._lanes) < self.settings.min_replicas:
                return None
            self._changed.clear()
            await self._changed.wait()
        self.num_trained += len(batch)
        return [self._groups.pop(ordinal) for ordinal in batch]

    def _choose(self, step: int) -> list[int] | None:
        own, candidates = self.settings, [
            Candidate(group.key, group.version if group.begun_seconds else self.version, group.is_done)
            for group in self._groups.values()
            if group.whole is None
        ]  # fmt: skip
        for ordinal in expired(candidates, step, own.max_staleness):
            self._begin_anew(self._groups[ordinal])
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
        groups = [(group.key, tuple(group.ended_samples())) for group in self._groups.values() if group.whole is None]
        return Progress(self.num_trained, self.num_begun, self.num_replaced, self.expected_tokens, tuple(sorted(groups)))

    async def _restore(self, progress: Progress) -> None:
        self.num_trained, self.num_begun = progress.num_trained, progress.num_begun or progress.num_trained
        self.num_replaced, self.expected_tokens = progress.num_replaced, progress.expected_tokens or self.expected_tokens
        for key, samples in progress.groups:
            group = self._groups[key] = self.make_group(key)
            for sample in samples if max((s.index for s in samples), default=0) < len(group.completions) else ():
                group.completions[sample.index] = sample.completion
                if math.isfinite(sample.reward):
                    group.rewards[sample.index] = sample.reward
                elif not self.settings.scores_groups:
                    self._start(self._reward(group, [sample.index]))
            group.note_versions()
            if self.settings.scores_groups and not group.missing and not group.is_done:
                self._start(self._reward(group, range(len(group.rewards))))
            if group.missing:
                self._waiting.append(group)

    async def _generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]] | None:
        groups = []
        for request in requests:
            self._num_outside += 1
            groups.append(Group(-self._num_outside, request, whole=self._loop.create_future()))
        self._groups |= {group.key: group for group in groups}
        self._waiting[:0] = groups
        self._feed()
        try:
            while not all(group.whole is None or group.whole.done() for group in groups):
                if self._failure is not None:
                    raise self._failure
                if len(self._lanes) < self.settings.min_replicas:
                    return None
                self._changed.clear()
                await self._changed.wait()
        finally:
            for group in groups:
                self._groups.pop(group.key, None)
            self._waiting = [group for group in self._waiting if group.whole is None]
        return [[completion for completion in group.completions if completion is not None] for group in groups]

    # ------------------------------------------------------------------------------------------------ to the replicas and back

    def _feed(self) -> None:
        """Hand out what waits, to whoever has the least to do."""
        chosen: dict[int, list[Group]] = {}
        while self._waiting:
            group = self._waiting[0]
            loads = {replica: lane.load for replica, lane in self._lanes.items() if lane.is_open}
            replica = choose_replica(loads, len(group.missing), self.settings.slots)
            if replica is None:
                break
            del self._waiting[0]
            group.replica = replica
            if not group.begun_seconds:
                group.begun_seconds, group.version = time.time(), self.version
            group.expected_tokens = self.expected_tokens + len(group.request.prompt_ids) / group.request.num_samples
            self._add_load(replica, len(group.missing), group.expected_tokens)
            chosen.setdefault(replica, []).append(group)
        for replica, groups in chosen.items():
            self._start(self._hand_in(replica, self._lanes[replica], groups))
        self._changed.set()

    async def _hand_in(self, replica: int, lane: _Lane, groups: list[Group]) -> None:
        try:
            await self.pool.hand_in(replica, [GroupRequest(group.key, group.request, group.missing) for group in groups])
        except NotServingError:  # a sync broke off; the next one opens the lane
            if self._lanes.get(replica) is lane:
                lane.is_open = False
                self._take_back(replica, groups)
        except (ValueError, TypeError) as error:  # of the request itself: another replica would say the same
            self._fail(error)
        except Exception as error:  # noqa: BLE001 # whatever ended it
            self._lose(replica, lane, str(error))

    async def _collect(self, replica: int, lane: _Lane) -> None:
        """Take in what a replica finishes, for as long as it answers."""
        limit = self.settings.answer_seconds
        while True:
            try:
                answer = self.pool.collect(replica, COLLECT_SECONDS)
                collected = await asyncio.wait_for(asyncio.wrap_future(answer.future()), COLLECT_SECONDS + limit)
            except TimeoutError:
                return self._lose(replica, lane, f"gave no answer for {limit:g} s (rollout.answer_timeout_seconds)")
            except Exception as error:  # noqa: BLE001 # whatever ended it
                return self._lose(replica, lane, str(error))
            for finished in collected.finished:
                self._take_in(replica, finished)
            if collected.silent_seconds > limit:
                silent = f"its vLLM engine gave no answer for {limit:g} s (rollout.answer_timeout_seconds)"
                return self._lose(replica, lane, silent)
            if collected.finished:
                self._feed()

    def _take_in(self, replica: int, finished: Finished) -> None:
        group = self._groups.get(finished.key)
        if group is None or group.completions[finished.sample] is not None:
            return
        group.completions[finished.sample] = finished.completion.copy()  # out of Ray's object store
        self._add_load(replica, -1, group.expected_tokens)
        if group.whole is not None:
            if not group.missing:
                group.whole.set_result(None)
            return
        length = len(finished.completion.token_ids)
        self.expected_tokens += (length - self.expected_tokens) / 256
        if not group.missing:
            group.note_versions()
        if not self.settings.scores_groups:
            self._start(self._reward(group, [finished.sample]))
        elif not group.missing:
            self._start(self._reward(group, range(len(group.rewards))))

    async def _reward(self, group: Group, samples: Sequence[int]) -> None:
        try:
            for sample, scored in zip(samples, await self.score(group, samples), strict=True):
                group.rewards[sample], group.scored[sample] = scored.total, scored
        except Exception as error:  # noqa: BLE001 # the trainer raises it
            self._fail(error)
        rewards = [reward for reward in group.rewards if reward is not None]
        if group.is_done and self.settings.filters_groups and not is_group_worth_training(rewards):
            await self._replace_equal(group)
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

    # ------------------------------------------------------------------------------------------------ when something fails

    def _lose(self, replica: int, lane: _Lane, reason: str) -> None:
        """Another replica takes its groups over; a new one is started in its place."""
        if self._lanes.get(replica) is not lane:
            return
        del self._lanes[replica]
        lost = [group for group in self._groups.values() if group.replica == replica and group.missing]
        self.note(f"replica {replica}: {reason}; {len(lost)} groups go to others, and it is started anew")
        self.pool.replace(replica)
        self._take_back(replica, lost)

    def _take_back(self, replica: int, groups: list[Group]) -> None:
        for group in groups:
            if replica in self._lanes:
                self._add_load(replica, -len(group.missing), group.expected_tokens)
            group.replica = None
        self._waiting = sorted([*groups, *self._waiting], key=lambda group: group.key)
        self._feed()

    def _begin_anew(self, group: Group) -> None:
        self._groups[group.key] = fresh = Group(group.key, group.request)
        self._waiting.insert(0, fresh)
        self._feed()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._changed.set()

    def _add_load(self, replica: int, samples: int, tokens_each: float) -> None:
        if (lane := self._lanes.get(replica)) is not None:
            lane.load = Load(lane.load.samples + samples, lane.load.tokens + samples * tokens_each)

    def _start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
