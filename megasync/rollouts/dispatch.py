"""Groups on their way to the replicas and back.

Groups are handed out as slots free up, and taken back from replicas that die or give no answer. A lost replica is replaced in the
background; its groups go to the others. Leaves out which groups there are and what becomes of them (stream.py), and which replica
gets which group (scheduler.py).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from bridge.generation import GroupRequest
from bridge.messages import NotServingError
from megasync.rollouts.events import EventThread, Failed, NotServing, ReplicaLost, ReplicaSlot, RequestRefused, SamplesFinished
from megasync.rollouts.group import Group, StreamSettings
from megasync.rollouts.scheduler import choose_for_turn, choose_replica

if TYPE_CHECKING:
    from bridge.replicas.pool import ReplicaPool

COLLECT_SECONDS = 1.0  # a replica with no news answers after so long
ANSWER_KEY = "rollout.answer_timeout_seconds"
MAX_LOSSES = 5  # of replicas with the same group in them


class RepeatedLossError(RuntimeError):
    """One replica after another was lost with the same group in it."""


class Dispatcher:
    """Sends one run's groups to replicas. Its methods are called on the event loop; its tasks report by events."""

    def __init__(self, pool: ReplicaPool, settings: StreamSettings, events: EventThread, note: Callable[[str], None]) -> None:
        self.pool, self.settings, self.events, self.note = pool, settings, events, note
        self.version = 0
        self.expected_tokens = settings.expected_tokens  # of a response: an exponential mean
        self.slots: dict[int, ReplicaSlot] = {}  # by replica
        self._numbers = itertools.count()
        self._waiting: list[Group] = []
        self._handed_out: dict[int, Group] = {}  # by key, until all of their samples have ended

    @property
    def num_replicas(self) -> int:
        """Replicas that accept groups."""
        return len(self._open_slots())

    def _open_slots(self) -> dict[int, ReplicaSlot]:
        """Slots of replicas that accept groups (not those leaving)."""
        return {replica: slot for replica, slot in self.slots.items() if slot.is_open and replica in self.pool.wanted}

    @property
    def is_busy(self) -> bool:
        """Whether samples wait or run."""
        return bool(self._waiting or self._handed_out)

    def serve(self, version: int) -> None:
        """The pool's members serve `version` from now on."""
        self.version = version
        for slot in [slot for replica, slot in self.slots.items() if replica not in self.pool.members]:
            self.lose(slot, "took no part in the last sync")
        for replica in self.pool.members:
            if replica not in self.slots:
                self.slots[replica] = ReplicaSlot(replica, next(self._numbers))
                self.events.start(self._collect(self.slots[replica]))
            self.slots[replica].is_open = True

    def release_idle(self) -> set[int]:
        """Forget leaving replicas that have nothing to do; returns the leaving ones that still work."""
        leaving = self.slots.keys() - self.pool.wanted
        busy = {replica for replica in leaving if self.slots[replica].load.samples}
        for replica in leaving - busy:
            del self.slots[replica]
        return busy

    def add(self, groups: Iterable[Group]) -> None:
        """These wait for a replica, those with a lower place first; `feed` hands them out."""
        for group in groups:
            insort(self._waiting, group, key=lambda one: one.place)

    def feed(self) -> None:
        """Hand out waiting groups, to the replicas with the least to do; a group that nobody waits for any more is left out.

        A replica with nothing to do gets its groups at once, so that they are scheduled together; else each on its own, so
        that an update does not wait until hundreds of requests have been taken in.
        """
        self._waiting = [group for group in self._waiting if group.is_wanted]
        idle = {replica for replica, slot in self.slots.items() if slot.load.samples == 0}
        chosen: dict[int, list[Group]] = {}
        while self._waiting:
            group = self._waiting[0]
            loads = {replica: slot.load for replica, slot in self._open_slots().items()}
            held_by, num_held = group.held(self.version)
            if held_by is not None:
                replica = choose_for_turn(loads, held_by, num_held, self.settings.slots)
            else:
                replica = choose_replica(loads, len(group.missing), self.settings.slots)
            if replica is None:
                break
            self._handed_out[group.key] = self._waiting.pop(0)
            group.begin(replica, self.version, num_held if replica == held_by else 0)
            num_new = len(group.request.prompt_ids) - group.num_held
            group.expected_tokens = self.expected_tokens + num_new / group.request.num_samples
            self.slots[replica].add_load(len(group.missing), group.expected_tokens)
            chosen.setdefault(replica, []).append(group)
        for replica, groups in chosen.items():
            for together in [groups] if replica in idle else [[group] for group in groups]:
                self.events.start(self._hand_in(self.slots[replica], together))

    async def abort(self, groups: Iterable[Group]) -> None:
        """Stop these; a replica that does not answer is lost."""
        running: dict[int, list[int]] = {}
        for group in groups:
            if self._handed_out.pop(group.key, None) is not None and group.replica in self.slots:
                self.slots[group.replica].add_load(-len(group.missing), group.expected_tokens)
                running.setdefault(group.replica, []).append(group.key)
        for replica, keys in running.items():
            slot = self.slots[replica]
            try:
                async with asyncio.timeout(self.settings.answer_seconds):
                    await self.pool.abort_groups(replica, keys)
            except Exception as error:  # noqa: BLE001 # whatever ended it
                self.events.put(ReplicaLost(slot, _error_text(error)))

    # ------------------------------------------------------------------------------------------------ tasks

    async def _hand_in(self, slot: ReplicaSlot, groups: list[Group]) -> None:
        version = self.version
        try:
            await self.pool.hand_in(slot.replica, [GroupRequest(group.key, group.request, group.missing) for group in groups])
        except NotServingError:
            self.events.put(NotServing(slot, groups, version))
        except (ValueError, TypeError) as error:  # of the request itself
            self.events.put(RequestRefused(slot, groups, error))
        except Exception as error:  # noqa: BLE001 # whatever ended it
            self.events.put(ReplicaLost(slot, _error_text(error)))

    async def _collect(self, slot: ReplicaSlot) -> None:
        """Ask a replica for finished samples, for as long as it answers and is not lost."""
        limit = self.settings.answer_seconds
        while self._is_current(slot):
            try:
                answer = self.pool.collect(slot.replica, COLLECT_SECONDS)
                async with asyncio.timeout(COLLECT_SECONDS + limit):  # Python 3.11's wait_for can swallow a cancellation
                    collected = await asyncio.wrap_future(answer.future())
            except TimeoutError:
                return self.events.put(ReplicaLost(slot, f"gave no answer for {limit:g} s ({ANSWER_KEY})"))
            except Exception as error:  # noqa: BLE001 # whatever ended it
                return self.events.put(ReplicaLost(slot, _error_text(error)))
            if collected.finished:
                self.events.put(SamplesFinished(slot, collected.finished))
            if collected.silent_seconds > limit:
                silent = f"its vLLM engine gave no answer for {limit:g} s ({ANSWER_KEY})"
                return self.events.put(ReplicaLost(slot, silent))
        return None

    # ------------------------------------------------------------------------------------------------ events

    def _is_current(self, slot: ReplicaSlot) -> bool:
        """Whether the slot was not lost since: others have its groups then."""
        own = self.slots.get(slot.replica)
        return own is not None and own.number == slot.number

    def take_in(self, event: SamplesFinished) -> list[Group]:
        """The groups of the samples that are new; each once a sample."""
        groups = []
        for finished in event.samples if self._is_current(event.slot) else ():
            group = self._handed_out.get(finished.key)
            if group is None or group.completions[finished.sample] is not None:
                continue
            if self.settings.oversample > 1 and finished.completion.weight_versions.min() < self.version:
                continue  # of the same prompt, before it was aborted
            group.complete(finished.sample, finished.completion)
            event.slot.add_load(-1, group.expected_tokens)
            self.expected_tokens += (len(finished.completion.token_ids) - self.expected_tokens) / 256
            if not group.missing:
                del self._handed_out[group.key]
                group.ended_seconds = time.time()
            groups.append(group)
        return groups

    def take_back(self, event: NotServing) -> None:
        """The replica gets no group before its next sync."""
        if self._is_current(event.slot):
            event.slot.is_open &= self.version != event.version  # a later sync has reached it since
            left = [group for group in event.groups if self._handed_out.get(group.key) is group]  # others were aborted
            for group in left:
                event.slot.add_load(-len(group.missing), group.expected_tokens)
            self._wait_again(left)

    def refuse(self, event: RequestRefused) -> None:
        """A turn is refused alone, to its episode; of the data's groups the run stops."""
        if not all(group.is_turn for group in event.groups):
            self.events.put(Failed(event.error))
        elif self._is_current(event.slot) and len(event.groups) > 1:
            for group in event.groups:
                self.events.start(self._hand_in(event.slot, [group]))
        elif self._is_current(event.slot):
            (group,) = event.groups
            del self._handed_out[group.key]
            event.slot.add_load(-1, group.expected_tokens)
            group.refuse(event.error)

    def lose(self, slot: ReplicaSlot, reason: str) -> None:
        """Other replicas get its groups; a new one is started in its place."""
        if not self._is_current(slot):
            return
        del self.slots[slot.replica]
        lost = [group for group in self._handed_out.values() if group.replica == slot.replica]
        for group in lost:
            group.num_lost += 1
        if any(group.num_lost >= MAX_LOSSES and group.is_wanted for group in lost):
            text = f"{MAX_LOSSES} replicas were lost with the same prompts in them, so that the next one would be, too"
            last = f"the last, replica {slot.replica}: {reason.splitlines()[0]}"
            self.events.put(Failed(RepeatedLossError(f"{text}; {last}")))
        then = "it is restarted" if slot.replica in self.pool.wanted else "it was leaving anyway"
        self.note(f"replica {slot.replica} is lost: {len(lost)} groups go to others, and {then}. {reason}")
        self.pool.replace(slot.replica)
        self._wait_again(lost)

    def _wait_again(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._handed_out.pop(group.key, None)
        self.add(groups)


def _error_text(error: Exception) -> str:
    """The text of an actor's error, without Ray's traceback."""
    return str(getattr(error, "cause", None) or error) or type(error).__name__
