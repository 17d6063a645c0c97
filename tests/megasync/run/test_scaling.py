"""What is asked of a run in progress is read, decided and answered: with actors that start in no time, without a Ray."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.config import ReplicaConfig
from bridge.replicas.actors import ReplicaActors
from bridge.replicas.launched import ReplicaActor
from megasync.tools.scale import command as scale
from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.run.scaling import (
    FAILED,
    REFUSED,
    REQUEST_FILE,
    Request,
    Scaling,
    ask,
    asked_number,
    forget_request,
    read_answer,
    read_request,
    refusal,
)
from tests.runs.train_cases import write_config

ROOM = 3


class Actors(ReplicaActors):
    """With room for three; those on the host `bad` do not start."""

    def __init__(self, num_replicas: int, *, starts: bool = True) -> None:
        super().__init__(ReplicaConfig("nowhere"), num_replicas)
        self.starts = True
        self._take_as_members(self._begin_launch(range(num_replicas), serves_folder=True))
        self.starts = starts

    def _begin_launch(self, replicas: Sequence[int], *, serves_folder: bool) -> dict[int, ReplicaActor]:
        if not self.starts:
            raise RuntimeError("no memory")
        return {number: ReplicaActor(None, host=f"node{number}.lan") for number in replicas}

    def _finish_launch(self, actors: dict[int, ReplicaActor]) -> None:
        """At once."""

    def _end(self, actors: Any, seconds: float = 0.0) -> None:
        """There is no Ray."""

    def room_problem(self, num_replicas: int) -> str:
        return "" if num_replicas <= ROOM else f"{num_replicas} need more than {ROOM}"


class Trainer:
    """Syncs of a run: what Weights does around them."""

    def __init__(self, config: Config, actors: Actors) -> None:
        self.actors, self.busy, self.notes, self.version = actors, set[int](), list[str](), 0
        self.scaling = Scaling(config, cast(Any, actors), self.release_idle, self.notes.append)
        self.folder = config.run.folder

    def release_idle(self) -> set[int]:
        return self.busy & self.actors.leaving

    def sync(self, until_done: bool = False) -> tuple[str, ...]:
        """One, or as many as it takes; what was answered."""
        deadline = time.monotonic() + 60
        while True:
            self.version += 1
            self.scaling.apply_request(self.version)
            self.actors.rejoin(0, 0.0)
            self.scaling.write_answer(self.version)
            answer = read_answer(self.folder)
            if not until_done or (answer is not None and answer.code is not None):
                return answer.lines if answer is not None else ()
            assert time.monotonic() < deadline, answer
            time.sleep(0.01)

    def code(self) -> int | None:
        answer = read_answer(self.folder)
        return answer.code if answer is not None else None


@pytest.fixture
def config(tmp_path: Path) -> Config:
    found = load_config(write_config(tmp_path, rollout={"replicas": 2}))
    found.run.folder.mkdir(parents=True)
    return found


def test_replicas_come_and_leave_once_they_are_idle(config: Config) -> None:
    trainer = Trainer(config, Actors(2))
    assert trainer.sync() == ()
    ask(trainer.folder, Request("a", 3, configured=2))
    said = trainer.sync(until_done=True)
    assert said[0] == "taken at version 2: 3 replicas; replica 2 to start" and said[-1] == "done: 3 replicas"
    assert trainer.actors.members == [0, 1, 2] and trainer.code() == 0
    trainer.busy = {1}
    ask(trainer.folder, Request("b", without="node1", configured=2))
    assert trainer.sync()[0].endswith("2 replicas; replica 1 to leave")
    assert trainer.sync() and trainer.actors.members == [0, 1, 2], "it works on a group"
    trainer.busy = set()
    assert trainer.sync()[-2:] == (f"replica 1 ended before version {trainer.version}; 2 replicas", "done: 2 replicas")
    assert trainer.actors.members == [0, 2]


@pytest.mark.parametrize("is_taken", [False, True])
def test_who_waits_for_a_request_is_reported_that_another_has_taken_its_place(
    config: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_taken: bool
) -> None:
    trainer, former = Trainer(config, Actors(2)), Request("a", 3, configured=2)
    monkeypatch.setattr(scale, "lock_holder", lambda folder: "another process")  # whose own lock no process sees
    ask(trainer.folder, former)
    if is_taken:
        trainer.scaling.apply_request(1)
    ask(trainer.folder, Request("b", 1, configured=2))
    assert scale.wait(trainer.folder, former) == FAILED
    assert "another request has replaced this one" in capsys.readouterr().err
    trainer.sync(until_done=True)
    assert scale.wait(trainer.folder, former) == FAILED, "of which the answer is gone"
    assert scale.wait(trainer.folder, Request("b", 1, configured=2)) == 0


def test_what_cannot_be_is_refused_and_what_does_not_start_is_reported(config: Config) -> None:
    trainer = Trainer(config, Actors(2, starts=False))
    ask(trainer.folder, Request("a", 9, configured=2))
    assert trainer.sync() == ("refused at version 1: 9 need more than 3",) and trainer.code() == REFUSED
    ask(trainer.folder, Request("b", without="nowhere", configured=2))
    assert "no replica is on nowhere" in trainer.sync()[0] and trainer.actors.wanted == {0, 1}
    ask(trainer.folder, Request("c", 3, configured=2))
    assert "replica 2 did not start: no memory; the run goes on with 2 replicas" in trainer.sync(until_done=True)[-1]
    assert trainer.code() == FAILED
    trainer.actors.starts = True
    ask(trainer.folder, Request("d", 3, configured=2))
    assert trainer.sync(until_done=True)[-1] == "done: 3 replicas"
    (trainer.folder / REQUEST_FILE).write_text("[1")
    trainer.sync()
    trainer.sync()
    assert sum("this is no request" in note for note in trainer.notes) == 1
    (trainer.folder / REQUEST_FILE).write_text('{"key": "x", "replicas": "2"}')
    trainer.sync()
    assert "is no request" in trainer.notes[-1] and trainer.actors.members == [0, 1, 2]


def test_a_resumed_run_scales_itself_again_unless_the_config_has_another_number(config: Config) -> None:
    first = Trainer(config, Actors(2))
    ask(first.folder, Request("a", 3, configured=2))
    first.sync(until_done=True)
    again = Trainer(config, Actors(2))
    again.sync(until_done=True)
    assert again.actors.wanted == {0, 1, 2}
    other = config.model_copy(update={"rollout": config.rollout.model_copy(update={"replicas": 1})})
    changed = Trainer(other, Actors(1))
    changed.sync()
    assert changed.actors.wanted == {0}
    ask(first.folder, Request("b", 2, configured=1))
    changed.sync(until_done=True)
    assert changed.actors.members == [0, 1]
    forget_request(first.folder)
    assert read_request(first.folder) is None and read_answer(first.folder) is None


HOSTS = st.dictionaries(st.integers(0, 5), st.sampled_from(("a.lan", "b", "c")))


@given(st.sets(st.integers(0, 5)), HOSTS, st.integers(1, 6), st.sampled_from(("", "a", "b.lan", "d")))
def test_the_number_is_that_asked_for_or_without_the_host(wanted: set[int], hosts: dict[int, str], count: int, host: str) -> None:
    request = Request("k", 0 if host else count, host)
    number, without = asked_number(request, wanted, hosts)
    assert number == (len(wanted - set(without)) if host else count)
    assert without == sorted(one for one, name in hosts.items() if host and name[0] == host[0])
    assert bool(refusal(request, number, without, 2)) == (number < 2 or (bool(host) and not without))
