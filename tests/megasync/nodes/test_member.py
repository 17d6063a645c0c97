"""Two nodes of one process, with real stores, signs of life and checks; a small program takes the place of torchrun."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.launch.ray_cluster import free_port
from megasync.nodes.facts import node_facts
from megasync.nodes.head import Head, Terms
from megasync.nodes.member import Member
from megasync.nodes.roll_call import Arrival
from megasync.nodes.store import Beats, NodeStore
from tests.support.config_files import write_runnable

LOOPBACK = "127.0.0.1"
# Of the first round: node 1 fails, while node 0 would wait for ever. Of the second: both do their work.
PROGRAM = """
import pathlib, sys, time
folder, place = pathlib.Path(sys.argv[1]), sys.argv[2]
(folder / f"started-{place}-{time.time_ns()}").touch()
failed = folder / "failed"
if not failed.exists():
    if place == "1":
        failed.touch()
        sys.exit(3)
    time.sleep(600)
"""


class SmallMember(Member):
    """Its ranks are PROGRAM. While they run the user works on his config file."""

    scratch: Path
    user_file: Path

    def _start_ranks(self, endpoint: str, place: int, num_nodes: int, num_hosts: int) -> subprocess.Popen[bytes]:
        assert endpoint and num_nodes == num_hosts == 2
        self.user_file.write_text("run: [")
        assert load_config(self.config_file) == self.config
        return subprocess.Popen([sys.executable, "-c", PROGRAM, str(self.scratch), str(place)])


def test_a_failed_round_is_followed_by_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(write_runnable(tmp_path), ["algorithm.name=sft"])
    port, scratch = free_port(), tmp_path / "scratch"
    scratch.mkdir()
    terms = Terms(2, (), wait_seconds=60, max_restarts=1, limit_seconds=60, replicas=0, tensor_parallel=1)
    results: dict[int, tuple[int, str]] = {}
    threads = []
    for seat in (0, 1):
        store = NodeStore.listen(LOOPBACK, port) if seat == 0 else NodeStore.connect(LOOPBACK, port)
        assert store is not None
        threads.append(threading.Thread(target=live, args=(store, seat, config, scratch, terms, results)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(results) == [0, 1]
    assert {code for code, _ in results.values()} == {0}
    assert (
        "b: exit code 3\nthe run goes on from its newest checkpoint once 2 nodes are here; restarts left: 0"
        in capsys.readouterr().out
    )
    assert len(list(scratch.glob("started-*"))) == 4


def live(store: NodeStore, seat: int, config: Config, scratch: Path, terms: Terms, results: dict[int, tuple[int, str]]) -> None:
    number = store.add("arrivals")
    arrival = Arrival(number, "ab"[seat], LOOPBACK, seat, 1, 0, is_head=seat == 0)
    store.set(f"arrival/{number}", {"arrival": {**vars(arrival)}, "facts": node_facts(config)})
    own = store if seat == 0 else NodeStore.connect(LOOPBACK, store.port)
    assert own is not None
    beats = Beats(own, f"beat/{number}", 60)
    head = Head(store, LOOPBACK, terms) if seat == 0 else None
    member = SmallMember(store, arrival, head, config, starts_ray=False)
    member.scratch, member.user_file = scratch, scratch.parent / "run.yaml"
    results[seat] = member.live()
    beats.close()
    store.set(f"acknowledged/{number}", {})
    while head is not None and not head.has_acknowledged():
        threading.Event().wait(0.1)


class WithoutRay(Member):
    """On its node Ray does not start."""

    def _join_ray(self) -> None:
        raise RuntimeError("Ray ended on this node (exit code 1)")


def test_a_helper_whose_ray_does_not_start_leaves_with_a_word(tmp_path: Path) -> None:
    store = NodeStore.listen(LOOPBACK, free_port())
    assert store is not None
    store.set("round", {"round": 0, "members": [1]})
    store.set("admitted/2", {"round": 0})
    arrival = Arrival(2, "c", LOOPBACK, None, 0, 1)
    member = WithoutRay(store, arrival, None, load_config(write_runnable(tmp_path)), starts_ray=True)
    assert member.live() == (1, "c: Ray ended on this node (exit code 1)")
    assert store.get("left/2") is not None, "the others need not wait for its signs of life"
