"""Groups on their way to the replicas and back.

They are handed out as slots free up, and taken back from replicas that die or give no answer. A lost replica is started anew
in the background; its groups go to the others. All of it runs on the stream's event loop. Leaves out which groups there are
and what becomes of them (stream.py), and who gets which (scheduler.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bridge.generation import Finished, GroupRequest
from bridge.messages import NotServingError
from megasync.rollouts.group import Group, StreamSettings
from megasync.rollouts.scheduler import Load, choose_for_turn, choose_replica

if TYPE_CHECKING:
    from bridge.replicas.pool import ReplicaPool

COLLECT_SECONDS = 1.0  # a replica with no news answers after so long
ANSWER_KEY = "rollout.answer_timeout_seconds"
MOST_LOSSES = 5  # replicas that one group may see the end of


@dataclass
class _Lane:
    """A replica that is handed groups. Closed: its sync broke off, and it takes none before the next."""

    load: Load = field(default_factory=Load)
    is_open: bool = True


class RepeatedLossError(RuntimeError):
    """One replica after another was lost with the same group in it."""


class Dispatcher:
    """Of one run; methods are called on its event loop."""

    def __init__(
        self,
        pool: ReplicaPool,
        settings: StreamSettings,
        start: Callable[[Coroutine[Any, Any, None]], object],
        on_sample: Callable[[Group], None],
        on_error: Callable[[Exception], None],
        on_change: Callable[[], None],
        note: Callable[[str], None],
    ) -> None:
        """`start` runs a coroutine as a task; `on_sample` gets the group of each sample that ended, `on_error` what ends the run,
        `on_change` is called when all samples of a group have ended or a replica takes none any more, `note` says something to
        the user.
        """
        self.pool, self.settings, self.start = pool, settings, start
        self.on_sample, self.on_error, self.on_change, self.note = on_sample, on_error, on_change, note
        self.version = 0
        self.expected_tokens = settings.expected_tokens  # of a response: a mean that forgets slowly
        self._waiting: list[Group] = []
        self._handed_out: dict[int, Group] = {}  # by key, until all of their samples have ended
        self._lanes: dict[int, _Lane] = {}

    @property
    def num_replicas(self) -> int:
        """That groups are handed to."""
        return len(self._open_lanes())

    def _open_lanes(self) -> dict[int, _Lane]:
        """Of those that take groups; who is to leave takes none any more."""
        return {replica: lane for replica, lane in self._lanes.items() if lane.is_open and replica in self.pool.wanted}

    @property
    def is_busy(self) -> bool:
        """Whether samples wait or run."""
        return bool(self._waiting or self._handed_out)

    def serve(self, version: int) -> None:
        """The pool's members serve `version` from now on."""
        self.version = version
        for replica in [replica for replica in self._lanes if replica not in self.pool.members]:
            self._lose(replica, self._lanes[replica], "took no part in the last sync")
        for replica in self.pool.members:
            if replica not in self._lanes:
                self._lanes[replica] = _Lane()
                self.start(self._collect(replica, self._lanes[replica]))
            self._lanes[replica].is_open = True
        self._feed()

    def let_go(self) -> set[int]:
        """Forget those that the pool wants no more and that have nothing to do; those that still have something."""
        busy = set()
        for replica in [replica for replica in self._lanes if replica not in self.pool.wanted]:
            if self._lanes[replica].load.samples:
                busy.add(replica)
            else:
                del self._lanes[replica]
        return busy

    def add(self, groups: Sequence[Group]) -> None:
        """These are to be generated; what has a lower place comes first."""
        self._waiting = sorted([*self._waiting, *groups], key=lambda group: group.place)
        self._feed()

    def drop(self, groups: Iterable[Group]) -> None:
        """These are not to be handed out any more; samples that run are not stopped."""
        for group in groups:
            group.is_wanted = False
        self._waiting = [group for group in self._waiting if group.is_wanted]

    def _feed(self) -> None:
        """Hand out what waits, to whoever has the least to do.

        A replica with nothing to do gets its groups at once, so that they are scheduled together; else each on its own, so
        that an update does not wait until hundreds of requests have been taken in.
        """
        idle = {replica for replica, lane in self._lanes.items() if lane.load.samples == 0}
        chosen: dict[int, list[Group]] = {}
        while self._waiting:
            group = self._waiting[0]
            loads = {replica: lane.load for replica, lane in self._open_lanes().items()}
            held_by, num_held = group.held(self.version)
            if held_by is not None:
                replica = choose_for_turn(loads, held_by, num_held, self.settings.slots)
            else:
                replica = choose_replica(loads, len(group.missing), self.settings.slots)
            if replica is None:
                break
            self._handed_out[group.key] = self._waiting.pop(0)
            group.begin(replica, self.version)
            group.num_held = num_held if replica == held_by else 0
            num_new = len(group.request.prompt_ids) - group.num_held
            group.expected_tokens = self.expected_tokens + num_new / group.request.num_samples
            self._add_load(replica, len(group.missing), group.expected_tokens)
            chosen.setdefault(replica, []).append(group)
        for replica, groups in chosen.items():
            for together in [groups] if replica in idle else [[group] for group in groups]:
                self.start(self._hand_in(replica, self._lanes[replica], together))

    async def _hand_in(self, replica: int, lane: _Lane, groups: list[Group]) -> None:
        version = self.version
        try:
            await self.pool.hand_in(replica, [GroupRequest(group.key, group.request, group.missing) for group in groups])
        except NotServingError:
            if self._lanes.get(replica) is lane:
                lane.is_open &= self.version != version  # a later sync has reached it since
                for group in groups:
                    self._add_load(replica, -len(group.missing), group.expected_tokens)
                self._take_back(groups)
                self.on_change()
        except (ValueError, TypeError) as error:  # of the request itself: another replica would say the same
            self._refuse(replica, lane, groups, error)
        except Exception as error:  # noqa: BLE001 # whatever ended it
            self._lose(replica, lane, _told(error))

    def _refuse(self, replica: int, lane: _Lane, groups: list[Group], error: Exception) -> None:
        """The run stops where groups are the data's; a turn is refused alone, to who has asked for it.

        Those of a replica that was lost meanwhile are others'.
        """
        if not all(group.can_be_refused for group in groups):
            self.on_error(error)
        elif self._lanes.get(replica) is lane and len(groups) > 1:
            for group in groups:
                self.start(self._hand_in(replica, lane, [group]))
        elif self._lanes.get(replica) is lane:
            (group,) = groups
            del self._handed_out[group.key]
            self._add_load(replica, -1, group.expected_tokens)
            group.refuse(error)

    async def _collect(self, replica: int, lane: _Lane) -> None:
        """Take in what a replica finishes, for as long as it answers."""
        limit = self.settings.answer_seconds
        while True:
            try:
                answer = self.pool.collect(replica, COLLECT_SECONDS)
                async with asyncio.timeout(COLLECT_SECONDS + limit):  # Python 3.11's wait_for can swallow a cancellation
                    collected = await asyncio.wrap_future(answer.future())
            except TimeoutError:
                return self._lose(replica, lane, f"gave no answer for {limit:g} s ({ANSWER_KEY})")
            except Exception as error:  # noqa: BLE001 # whatever ended it
                return self._lose(replica, lane, _told(error))
            if self._lanes.get(replica) is not lane:
                return None  # it was lost while this answer was on its way, and others have its groups
            for finished in collected.finished:
                self._take_in(replica, finished)
            if collected.silent_seconds > limit:
                return self._lose(replica, lane, f"its vLLM engine gave no answer for {limit:g} s ({ANSWER_KEY})")
            if collected.finished:
                self._feed()

    def _take_in(self, replica: int, finished: Finished) -> None:
        group = self._handed_out.get(finished.key)
        if group is None or group.completions[finished.sample] is not None:
            return
        group.complete(finished.sample, finished.completion)
        self._add_load(replica, -1, group.expected_tokens)
        self.expected_tokens += (len(finished.completion.token_ids) - self.expected_tokens) / 256
        if not group.missing:
            del self._handed_out[group.key]
            group.ended_seconds = time.time()
            self.on_change()
        self.on_sample(group)

    def _lose(self, replica: int, lane: _Lane, reason: str) -> None:
        """Another replica takes its groups over; a new one is started in its place."""
        if self._lanes.get(replica) is not lane:
            return
        del self._lanes[replica]
        lost = [group for group in self._handed_out.values() if group.replica == replica]
        for group in lost:
            group.num_lost += 1
        if any(group.num_lost >= MOST_LOSSES and group.is_wanted for group in lost):
            told = f"{MOST_LOSSES} replicas were lost with the same prompts in them, so that the next one would be, too"
            self.on_error(RepeatedLossError(f"{told}; the last, replica {replica}: {reason.splitlines()[0]}"))
        then = "it is started anew" if replica in self.pool.wanted else "it was to leave anyway"
        self.note(f"replica {replica} is lost: {len(lost)} groups go to others, and {then}. {reason}")
        self.pool.replace(replica)
        self._take_back(lost)
        self.on_change()

    def _take_back(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._handed_out.pop(group.key, None)
        self.add([group for group in groups if group.is_wanted])

    def _add_load(self, replica: int, samples: int, tokens_each: float) -> None:
        lane = self._lanes[replica]
        lane.load = Load(lane.load.samples + samples, lane.load.tokens + samples * tokens_each)


def _told(error: Exception) -> str:
    """What an actor raised, without Ray's account of where."""
    return str(getattr(error, "cause", None) or error) or type(error).__name__
