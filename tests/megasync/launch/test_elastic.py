"""torch's rendezvous as the nodes of a run use it: order, numbers that fit, spares, losses; over a real store, without ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import distributed
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from megasync.launch.elastic import Limits, NodesRendezvous, RunOverError
from megasync.launch.members import Node
from tests.support.rewards import until

dist: Any = distributed
LOOPBACK = "127.0.0.1"


class Launcher:
    """One node's, in a thread for each round."""

    def __init__(self, port: int, folder: Path, limits: Limits, fits: Callable[[int], bool], **node: Any) -> None:
        self.node = Node(
            **{"host": f"node{node['number']}", "address": LOOPBACK, "num_ranks": 1, "num_gpus": 0, "place": None, **node}
        )
        self.rounds: list[list[int]] = []
        self.rendezvous = NodesRendezvous(
            lambda seconds: dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=seconds)),
            self.node,
            limits,
            fits,
            lambda members: self.rounds.append([each.number for each in members]),
            folder,
        )
        self.info: Any = None
        self.error: Exception | None = None

    def join(self) -> threading.Thread:
        thread = threading.Thread(target=self._join, daemon=True)
        thread.start()
        return thread

    def _join(self) -> None:
        try:
            self.info = self.rendezvous.next_rendezvous()
        except Exception as error:  # noqa: BLE001 # read by the test
            self.error = error


Start = Callable[..., Launcher]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(number, min_nodes=, max_nodes=, wait=, fits=, place=, ...)`: a node's launcher; number 1 is the head."""
    server = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    made: list[Launcher] = []

    def make(
        number: int,
        *,
        min_nodes: int = 2,
        max_nodes: int = 2,
        wait: float = 30.0,
        fits: Callable[[int], bool] = bool,
        **node: Any,
    ) -> Launcher:
        limits = Limits(min_nodes, max_nodes, wait, 3.0)
        made.append(Launcher(server.port, tmp_path, limits, fits, number=number, is_head=number == 1, **node))
        return made[-1]

    yield make
    for launcher in made:
        launcher.rendezvous._inner._stop_heartbeats()


def join_all(*launchers: Launcher) -> None:
    for thread in [launcher.join() for launcher in launchers]:
        thread.join(120)


def test_the_head_is_first_then_the_given_places_and_a_round_has_a_store_of_its_own(start: Start) -> None:
    nodes = [start(3, max_nodes=3, min_nodes=3, place=1), start(2, max_nodes=3, min_nodes=3), start(1, max_nodes=3, min_nodes=3)]
    join_all(*nodes)
    assert all(node.rounds == [[1, 3, 2]] for node in nodes)
    assert [node.info.rank for node in nodes] == [1, 2, 0] and nodes[0].info.world_size == 3
    first = nodes[0].info.bootstrap_store_info
    assert {node.info.bootstrap_store_info.master_port for node in nodes} == {first.master_port}
    join_all(*nodes)
    assert all(node.rounds[1] == [1, 3, 2] for node in nodes)
    assert nodes[0].info.bootstrap_store_info.master_port != first.master_port


def test_a_spare_takes_the_place_of_a_lost_node_and_another_hears_of_the_end(start: Start) -> None:
    head, lost, spare, late = start(1), start(2), start(3), start(4)
    join_all(head, lost)
    waiting = spare.join()
    time.sleep(2)
    assert spare.info is None and head.rendezvous.num_nodes_waiting() == 0
    lost.rendezvous._inner._stop_heartbeats()  # as a node without a word
    join_all(head)
    waiting.join(120)
    assert head.rounds[1] == spare.rounds[0] == [1, 3]
    waiting = late.join()
    time.sleep(2)
    # in a thread: torch records each change with `inspect.stack`, which takes so long below pytest that others' beats win
    threading.Thread(target=head.rendezvous.shutdown, daemon=True).start()
    waiting.join(120)
    assert isinstance(late.error, RunOverError)


@pytest.mark.long
def test_a_node_that_is_lost_as_its_round_begins_is_replaced(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for its entry in vain, and meet once more."""
    options: dict[str, Any] = {"min_nodes": 3, "max_nodes": 3}
    head, other, lost, spare = (start(number, **options) for number in (1, 2, 3, 4))

    def gone(_: object) -> None:
        lost.rendezvous._inner._stop_heartbeats()
        raise RuntimeError

    monkeypatch.setattr(lost.rendezvous, "_members", gone)
    threads = [node.join() for node in (head, other, lost)]
    threads[2].join(120)
    threads.append(spare.join())
    for thread in threads:
        thread.join(120)
    assert head.rounds == other.rounds == spare.rounds == [[1, 2, 4]] and not lost.rounds
    assert [node.info.rank for node in (head, other, spare)] == [0, 1, 2]


def test_fewer_nodes_go_on_in_a_number_that_fits(start: Start) -> None:
    """Of three that are left two have ranks, and the third has them once a fourth is there."""
    options: dict[str, Any] = {"min_nodes": 2, "max_nodes": 4, "wait": 3.0, "fits": lambda ranks: ranks % 2 == 0}
    nodes = [start(number, **options) for number in (1, 2, 3)]
    threads = [node.join() for node in nodes]
    until(lambda: bool(nodes[0].info and nodes[1].info))
    assert nodes[0].rounds == nodes[1].rounds == [[1, 2]] and threads[2].is_alive() and nodes[0].info.world_size == 2
    fourth = start(4, **options)
    last = fourth.join()
    until(lambda: nodes[0].rendezvous.num_nodes_waiting() > 0)
    join_all(nodes[0], nodes[1])
    for thread in (threads[2], last):
        thread.join(120)
    assert all(node.rounds[-1] == [1, 2, 3, 4] for node in [*nodes, fourth])


def test_it_gives_up_where_too_few_come(start: Start) -> None:
    alone = start(1, wait=1.0)
    join_all(alone)
    assert isinstance(alone.error, RendezvousTimeoutError)
