"""The number of a replica and its states; actors.py moves it from one to another.

                 +------------- lost -------------+
                 v                                |
    (new) --> STARTING --> READY -- rejoin --> MEMBER <--> LEAVING -- dismiss --> ENDING --> (the number is free)
               |    ^
               v    |
    LOST: given up, or DEFERRED: the trainer may have the memory

Leaves out the threads that end and start actors (actors.py).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from bridge.replicas.launched import ReplicaActor


class State(Enum):
    """Where a number stands. A number without a state has no actor."""

    STARTING = "starting"  # in a thread, which ends a former actor first
    DEFERRED = "deferred"  # on shared devices: `rejoin` starts it, once the trainer has given its memory up
    READY = "ready"  # started; waits for `rejoin`
    MEMBER = "member"  # generates and takes part in syncs
    LEAVING = "leaving"  # a member that is not wanted any more, until `dismiss`
    ENDING = "ending"  # in a thread
    LOST = "lost"  # wanted, but START_ATTEMPTS starts failed


TRANSITIONS: dict[State, set[State]] = {
    State.STARTING: {State.READY, State.DEFERRED, State.LOST},
    State.DEFERRED: {State.STARTING},
    State.READY: {State.MEMBER, State.ENDING},
    State.MEMBER: {State.STARTING, State.LEAVING},
    State.LEAVING: {State.MEMBER, State.ENDING},
    State.ENDING: set(),
    State.LOST: {State.STARTING},
}
PRESENT = (State.MEMBER, State.LEAVING)


@dataclass
class NumberedReplica:
    """One number: its state, its actor while it has one, and its newest thread."""

    state: State
    actor: ReplicaActor | None = None
    thread: threading.Thread | None = None
    problem: str = ""  # why the last start failed

    def become(self, state: State) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state

    def take_actor(self) -> ReplicaActor | None:
        actor, self.actor = self.actor, None
        return actor


def choose_wanted(count: int, there: Collection[int], starting: Collection[int], taken: Collection[int]) -> set[int]:
    """The numbers of the `count` replicas that are wanted. Pure.

    First the replicas that are `there`, then those `starting`, each the lowest first; then the lowest free numbers. `taken`:
    numbers that cannot be given out, such as those of replicas that are ending.
    """
    known = [*sorted(there), *sorted(set(starting) - set(there))]
    free = (number for number in itertools.count() if number not in known and number not in taken)
    return set(itertools.islice(itertools.chain(known, free), count))
