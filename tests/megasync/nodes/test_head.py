"""The head's decisions, tick by tick, over a real store: who takes part, when it gives up, what follows from a failure."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import ParallelConfig
from megasync.config.files import STOP_FILE
from megasync.config.load import load_config
from megasync.launch.processes import REFUSED, STOPPED
from megasync.launch.ray_cluster import free_port
from megasync.nodes import head as head_module, presence
from megasync.nodes.facts import warning_here
from megasync.nodes.head import Head, Terms
from megasync.nodes.roll_call import Arrival
from megasync.nodes.store import NodeStore
from tests.support.config_files import write_runnable

LOOPBACK = "127.0.0.1"
TERMS = Terms(num_nodes=2, expected=(), wait_seconds=60, max_restarts=1, limit_seconds=60, replicas=0, tensor_parallel=1)
FACTS: dict[str, Any] = {"code": "a", "commit": "c", "python": "3", "packages": {}, "config": {}, "files": {}}
FINE = {"unreachable": [], "unseen": [], "ahead": 0.0, "is_right": True}


class Stage:
    """A head, and what nodes would write."""

    def __init__(self, store: NodeStore) -> None:
        self.store, self.silent = store, set[int]()
        self.head = Head(store, LOOPBACK, TERMS)
        self.count = 0

    def terms(self, **changes: Any) -> None:
        self.head.terms = replace(TERMS, **changes)

    def arrive(self, host: str, *, num_ranks: int = 1, num_gpus: int = 0, facts: dict[str, Any] | None = None) -> int:
        self.count = number = self.store.add("arrivals")
        arrival = Arrival(number, host, f"10.0.0.{number}", None, num_ranks, num_gpus, is_head=number == 1)
        self.store.set(f"arrival/{number}", {"arrival": asdict(arrival), "facts": facts or FACTS})
        return number

    def tick(self, until: Callable[[], Any] = lambda: None, times: int = 4) -> Any:
        """Signs of life of all that are not silent, and a tick; the first thing that is found."""
        for _ in range(times):
            for number in range(1, self.count + 1):
                if number not in self.silent:
                    self.store.add(f"beat/{number}")
            self.head.tick()
            if (found := until()) is not None:
                return found
        return None

    def get(self, key: str) -> Callable[[], Any]:
        return lambda: self.store.get(key)

    def run(self, number: int, *members: int, warning: str = "") -> None:
        """A round of these nodes from its announcement to its start."""
        told = self.tick(lambda: self._round(number))
        assert told["members"] == list(members)
        for seat in range(len(members)):
            self.head.round.store.set(f"wire/{seat}", json.dumps(FINE))
            self.store.set(f"ready/{number}/{seat}", {"problem": "", "code": 1, "warning": warning if seat else ""})
        assert self.tick(self.get(f"fit/{number}")) == {"warnings": [warning] if warning else []}

    def _round(self, number: int) -> Any:
        told = self.store.get("round")
        return told if told and told["round"] == number else None


@pytest.fixture
def stage() -> Stage:
    store = NodeStore.listen(LOOPBACK, free_port())
    assert store is not None
    return Stage(store)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "CAUSE_SECONDS", 0.0)


def end(stage: Stage, number: int, seat: int, code: int, told: str = "") -> None:
    stage.store.set(f"ended/{number}/{seat}", {"code": code, "told": told})


def test_it_waits_for_all_and_says_who_is_missing(stage: Stage) -> None:
    stage.terms(expected=("a", "b"))
    stage.arrive("a")
    assert stage.tick(stage.get("waiting")) == "1 of 2 nodes are here: a (10.0.0.1); not here: b"
    stage.arrive("b")
    stage.run(0, 1, 2)


def test_it_gives_up_at_the_limit(stage: Stage) -> None:
    stage.terms(expected=("a", "b"))
    stage.arrive("a")
    assert stage.tick(stage.get("over")) is None
    stage.terms(wait_seconds=0.0, expected=("a", "b"))
    over = stage.tick(stage.get("over"))
    assert over == {"code": 1, "told": "gave up after 0 s: 1 of 2 nodes are here: a (10.0.0.1); not here: b"}


def test_a_node_that_differs_is_refused(stage: Stage) -> None:
    stage.arrive("a")
    stage.arrive("b", facts=FACTS | {"code": "x"})
    over = stage.tick(stage.get("over"))
    assert over["code"] == REFUSED and over["told"].startswith("b: other code")


def test_a_node_with_little_shared_memory_is_named_and_takes_part(stage: Stage, tmp_path: Path) -> None:
    config = load_config(write_runnable(tmp_path), ["algorithm.name=grpo"])
    warning = warning_here(config, "b", 2**26)
    assert warning.startswith("b: /dev/shm: 64 MiB free: a run takes 216 MiB") and "--shm-size" in warning
    assert warning_here(config, "b", 2**30) == ""
    for name in ("a", "b"):
        stage.arrive(name)
    stage.run(0, 1, 2, warning=warning)


def test_all_done_is_the_end_and_so_is_a_stop(stage: Stage) -> None:
    for name in ("a", "b"):
        stage.arrive(name)
    stage.run(0, 1, 2)
    end(stage, 0, 0, STOPPED)
    assert stage.tick(stage.get("over")) is None
    end(stage, 0, 1, STOPPED)
    assert stage.tick(stage.get("over")) == {"code": STOPPED, "told": ""}


def test_a_failure_is_followed_by_a_round_while_restarts_are_left(stage: Stage) -> None:
    for name in ("a", "b"):
        stage.arrive(name)
    stage.run(0, 1, 2)
    end(stage, 0, 1, 1, "rank 1 was ended by SIGKILL")
    assert "b: rank 1 was ended by SIGKILL" in stage.tick(stage.get("outcome/0"))["told"]
    stage.run(1, 1, 2)
    end(stage, 1, 0, 1, "rank 0 failed")
    over = stage.tick(stage.get("over"))
    assert over == {"code": 1, "told": "a: rank 0 failed"}


def test_signs_of_life_that_a_link_held_up_are_no_node(stage: Stage) -> None:
    for name in ("a", "b"):
        stage.arrive(name)
    stage.run(0, 1, 2)
    end(stage, 0, 1, 1, "rank 1 ended with exit code 1")
    stage.silent.add(2)
    assert stage.tick(stage.get("outcome/0")) is not None
    stage.tick(times=1)
    stage.store.add("beat/2", 30)
    assert stage.tick(lambda: stage._round(1)) is None
    stage.arrive("b")
    stage.run(1, 1, 3)


@pytest.mark.parametrize("when", ["gather", "check", "run", "gather again"])
def test_a_stop_while_no_ranks_run_is_the_end(stage: Stage, tmp_path: Path, when: str) -> None:
    """Ranks that run stop by themselves; else nodes would be waited for until the batch system ends the job."""
    stage.terms(run_folder=tmp_path)
    stop = tmp_path / STOP_FILE
    stage.arrive("a")
    if when == "gather":
        assert stage.tick(stage.get("over")) is None
    else:
        stage.arrive("b")
    if when == "check":
        assert stage.tick(lambda: stage._round(0)) is not None
    if when in ("run", "gather again"):
        stage.run(0, 1, 2)
    if when == "gather again":
        stage.store.set("left/2", {})
        assert stage.tick(stage.get("outcome/0")) is not None
    stop.touch()
    over = stage.tick(stage.get("over"))
    if when == "run":
        assert over is None
        stage.store.set("left/2", {})
        assert stage.tick(stage.get("outcome/0")) is not None
        over = stage.tick(stage.get("over"))
    assert over["code"] == STOPPED and f"as asked ({stop})" in over["told"]


def test_no_round_follows_on_a_config_that_is_refused(stage: Stage) -> None:
    for name in ("a", "b"):
        stage.arrive(name)
    stage.run(0, 1, 2)
    end(stage, 0, 0, REFUSED)
    assert stage.tick(stage.get("over"))["code"] == REFUSED


def test_a_spare_takes_the_seat_of_a_node_that_is_gone(stage: Stage) -> None:
    for name in ("a", "b", "spare"):
        stage.arrive(name)
    stage.run(0, 1, 2)
    stage.store.set("left/2", {})
    assert "node b is gone: its launcher ended" in stage.tick(stage.get("outcome/0"))["told"]
    stage.run(1, 1, 3)


def test_after_the_limit_a_round_has_fewer_nodes_where_its_ranks_may_be_fewer(stage: Stage) -> None:
    stage.terms(num_nodes=3, min_nodes=1, max_restarts=2)
    for name in ("a", "b", "c"):
        stage.arrive(name)
    stage.run(0, 1, 2, 3)
    stage.store.set("left/3", {})
    assert "once 3 nodes are here, or 1 after 60 s" in stage.tick(stage.get("outcome/0"))["told"]
    assert stage.tick(lambda: stage._round(1)) is None, "it waits until the limit"
    stage.terms(num_nodes=3, min_nodes=1, max_restarts=2, wait_seconds=0.0)
    stage.run(1, 1, 2)
    said = stage.store.get("round")["said"]
    assert "not here: c; --min-nodes 1: the run goes on with 2 nodes, a, b, and 2 trainer ranks" in said
    parallel = ParallelConfig(tensor=2)
    stage.terms(num_nodes=3, min_nodes=1, max_restarts=2, wait_seconds=0.0, parallel=parallel)
    stage.store.set("left/2", {})
    over = stage.tick(stage.get("over"), times=8)
    assert over["code"] == 1 and "--min-nodes 1 is not met by ranks that engine.parallel divides" in over["told"]


def test_fewer_nodes_may_have_fewer_replicas(stage: Stage) -> None:
    stage.terms(num_nodes=2, min_nodes=1, replicas=4, tensor_parallel=2)
    for name in ("a", "b"):
        stage.arrive(name, num_gpus=6)
    stage.run(0, 1, 2)
    assert stage.store.get("round")["overrides"] == []
    stage.store.set("left/2", {})
    stage.tick(stage.get("outcome/0"))
    stage.tick()
    stage.terms(num_nodes=2, min_nodes=1, replicas=4, tensor_parallel=2, wait_seconds=0.0)
    stage.run(1, 1)
    assert stage.store.get("round")["overrides"] == ["rollout.replicas=2"]


def test_a_silent_node_is_missed_and_waited_for(stage: Stage) -> None:
    stage.terms(limit_seconds=0.2)
    for name in ("a", "b"):
        stage.arrive(name)
    stage.run(0, 1, 2)
    stage.silent.add(2)
    outcome, deadline = None, time.monotonic() + 10
    while outcome is None and time.monotonic() < deadline:
        outcome = stage.tick(stage.get("outcome/0"), times=1)
        time.sleep(0.02)
    assert outcome is not None and "node b is gone: no sign of life for 0.2 s" in outcome["told"]
    stage.store.set("waiting", None)
    assert "not here: b" in stage.tick(stage.get("waiting"))
    stage.arrive("b")
    stage.run(1, 1, 3)


def test_the_last_word_waits_for_nobody_who_is_gone(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        stage.arrive(name)
    stage.run(0, 1, 2)
    stage.silent.add(2)
    end(stage, 0, 0, 1)
    stage.tick(stage.get("outcome/0"), times=1)
    stage.arrive("b")
    stage.run(1, 1, 3)
    monkeypatch.setattr(presence, "FRESH_SECONDS", 0.1)
    time.sleep(0.2)
    for seat in (0, 1):
        end(stage, 1, seat, 0)
    assert stage.tick(stage.get("over")) == {"code": 0, "told": ""}
    stage.store.set("acknowledged/1", {})
    assert not stage.head.has_acknowledged()
    stage.store.set("acknowledged/3", {})
    assert stage.head.has_acknowledged()


def test_a_spare_hears_that_it_is_one_or_that_it_is_of_another_run(stage: Stage) -> None:
    for name in ("a", "b"):
        stage.arrive(name)
    stage.run(0, 1, 2)
    told = "the run goes on with a, b; this node is a spare, and takes the place of one that is lost"
    assert stage.store.get("waiting") == told
    stage.arrive("a", facts=FACTS | {"config": {"run.name": "other"}})
    assert "a #3: another config\n  here:   run.name other (elsewhere absent)" in stage.tick(stage.get("refused/3"))
    stage.arrive("c")
    stage.tick()
    assert stage.store.get("refused/4") is None and stage.store.get("outcome/0") is None
    stage.store.set("left/2", {})
    assert stage.tick(stage.get("outcome/0")) is not None
    stage.run(1, 1, 4)
    assert stage.store.get("waiting") == (
        "the run goes on with a, c; this node is not needed: no restart is left (--max-restarts 1)"
    )


def test_a_node_of_replicas_alone_may_go_and_come(stage: Stage) -> None:
    stage.arrive("a")
    stage.arrive("b", num_ranks=0)
    stage.run(0, 1, 2)
    assert stage.store.get("round")["trainers"] == [1]
    stage.store.set("left/2", {})
    assert stage.tick(stage.get("outcome/0")) is None
    stage.arrive("b", num_ranks=0)
    assert stage.tick(stage.get("admitted/3")) == {"round": 0}
    end(stage, 0, 0, 0)
    assert stage.tick(stage.get("over")) == {"code": 0, "told": ""}


def test_later_a_node_that_differs_is_refused_alone(stage: Stage) -> None:
    for name in ("a", "b"):
        stage.arrive(name)
    stage.run(0, 1, 2)
    stage.store.set("left/2", {})
    stage.tick(stage.get("outcome/0"))
    stage.arrive("b", facts=FACTS | {"code": "x"})
    assert "other code" in stage.tick(stage.get("refused/3"))
    assert stage.store.get("over") is None
    stage.arrive("c")
    stage.run(1, 1, 4)
