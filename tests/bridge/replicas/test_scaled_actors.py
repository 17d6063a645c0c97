"""Which replicas there are to be, and that they are there in the end, whatever starts and ends meanwhile: without a Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.config import ReplicaConfig
from bridge.generation import Completion, GenerationRequest
from bridge.replicas.actors import ReplicaActors
from bridge.replicas.states import NumberedReplica, State, choose_wanted
from bridge.replicas.launched import ReplicaActor
from bridge.replicas.places import room_problem
from bridge.replicas.pool import ReplicaPool

NUMBERS = st.sets(st.integers(0, 6))


@given(st.integers(1, 8), NUMBERS, NUMBERS, NUMBERS)
def test_present_replicas_stay_as_long_as_they_may(count: int, there: set[int], starting: set[int], taken: set[int]) -> None:
    wanted = choose_wanted(count, there, starting, taken - there - starting)
    assert len(wanted) == count
    assert wanted <= there or wanted >= there
    new = wanted - there - starting
    assert not new or wanted >= there | starting
    assert not new & (taken - there - starting)
    assert choose_wanted(count, there, starting, taken - there - starting) == wanted


class SlowActors(ReplicaActors):
    """Starts and ends take a moment; `alive` are the actors that were launched and not ended.

    `folders`: of each launch, whether it serves the weights of the model's folder.
    """

    def __init__(self, num_replicas: int, seconds: float) -> None:
        super().__init__(ReplicaConfig("nowhere"), num_replicas)
        self.seconds, self.alive, self.folders = seconds, list[int](), list[bool]()
        self._log = threading.Lock()
        self._take_as_members(self._begin_launch(range(num_replicas), serves_folder=True))

    def _begin_launch(self, replicas: Sequence[int], *, serves_folder: bool) -> dict[int, ReplicaActor]:
        with self._log:
            self.folders.append(serves_folder)
            assert not set(replicas) & set(self.alive), "two actors of one number"
            self.alive += replicas
        return {replica: ReplicaActor(replica) for replica in replicas}

    def _finish_launch(self, actors: dict[int, ReplicaActor]) -> None:
        time.sleep(self.seconds)

    def _end(self, actors: Collection[ReplicaActor], seconds: float = 0.0) -> None:
        time.sleep(self.seconds)
        with self._log:
            for actor in actors:
                self.alive.remove(actor.handle)


def is_busy(actors: SlowActors) -> bool:
    return bool(actors._numbers(State.STARTING, State.ENDING))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.booleans()), max_size=6), st.sampled_from((0.0, 0.001, 0.004)))
def test_after_any_changes_the_wanted_replicas_are_there_and_no_others(
    changes: list[tuple[int, bool, bool]], seconds: float
) -> None:
    """Each change asks for a number; some wait a moment, some let replicas fail."""
    actors = SlowActors(2, seconds)
    for count, waits, fails in changes:
        actors.scale(count)
        assert len(actors.wanted) == count
        if fails and actors.members:
            actors.replace(max(actors.members))
        actors.dismiss(*actors.leaving)
        if waits:
            time.sleep(0.005)
        actors.rejoin(0, 0.0)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (set(actors.members) != actors.wanted or is_busy(actors)):
        actors.dismiss(*actors.leaving)
        actors.rejoin(1, 10.0)
        time.sleep(0.002)
    assert set(actors.members) == actors.wanted
    assert sorted(actors.alive) == sorted(actors.wanted)
    assert actors.given_up == {} and actors.drain_notes() == []
    actors.close()
    assert actors.alive == []


class WantedAgain(SlowActors):
    """A number that is not started, since it is not wanted, is wanted again at that moment."""

    def _start_again(self, replica: int, own: NumberedReplica) -> State | None:
        found = super()._start_again(replica, own)
        if found is None:
            self.scale(2)
        return found


def test_one_that_is_wanted_again_while_it_is_given_up_starts() -> None:
    actors = WantedAgain(2, 0.05)
    actors.replace(1)
    actors.scale(1)
    while is_busy(actors):
        time.sleep(0.001)
    assert actors.rejoin(2, 10.0) and actors.members == [0, 1] and actors.given_up == {}
    actors.close()


def test_one_that_was_lost_and_is_there_again_before_the_next_sync_has_come() -> None:
    """Under its old number, so that the members are the same: the others have to connect to it all the same.

    It has no weights yet.
    """
    actors = SlowActors(2, 0.0)
    actors.replace(1)
    while is_busy(actors):
        time.sleep(0.001)
    assert actors.rejoin(2, 10.0) and actors.members == [0, 1] and actors.folders == [True, False]
    assert not actors.rejoin(2, 10.0)
    actors.close()


def test_what_has_no_room_is_reported_with_the_numbers() -> None:
    assert room_problem({"a": 4}, 4, 1, "CPU") == ""
    assert "rollout.replicas=9 times rollout.tensor_parallel=1 needs 9 CPUs, Ray has 4" in room_problem({"a": 4}, 9, 1, "CPU")


class EchoPool(ReplicaPool):
    """Replicas that answer at once, with the tokens of the prompt."""

    def __init__(self, num_replicas: int) -> None:
        super().__init__(ReplicaConfig("nowhere"), num_replicas)
        remote = SimpleNamespace(remote=lambda share: [[Completion(one.prompt_ids, (0.0,), (0,))] for one in share])
        self.actors = [ReplicaActor(SimpleNamespace(generate=remote)) for _ in range(num_replicas)]

    def _chosen(self, _replicas: Sequence[int] | None = None) -> list[ReplicaActor]:
        return self.actors

    def gather(self, refs: Sequence[Any], *_: Any) -> list[Any]:
        return list(refs)


@given(st.integers(1, 5), st.integers(0, 12))
def test_each_request_gets_its_own_answer_from_however_many_replicas(num_replicas: int, num_requests: int) -> None:
    pool = EchoPool(num_replicas)
    found = pool.generate([GenerationRequest((number,)) for number in range(num_requests)]).result()
    assert [completion.token_ids.tolist() for (completion,) in found] == [[number] for number in range(num_requests)]
    assert sum(actor.num_sent for actor in pool.actors) == min(num_replicas, num_requests)
