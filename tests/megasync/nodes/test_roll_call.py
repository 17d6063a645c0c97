"""Who sits where, what is missing, what differs, what the wire says: the pure parts of a run on several nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.replicas.places import room_problem as replicas_problem
from megasync.nodes.compare import differences, judge, slow_pairs
from megasync.nodes.facts import code_digest, described, flat
from megasync.nodes.roll_call import Arrival, fewer_seats, roll_call, room_problem, seats
from megasync.nodes.wire import tournament


def arrival(number: int, wish: int | None = None, host: str = "", **more: Any) -> Arrival:
    fields = {"num_ranks": 1, "num_gpus": 0, "is_head": number == 1} | more
    return Arrival(number, host or f"node{number}", f"10.0.0.{number}", wish, **fields)


@given(st.data())
def test_each_seat_has_one_node_and_the_head_the_first(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    wishes = data.draw(st.lists(st.none() | st.integers(0, count), min_size=1, max_size=8))
    present = [arrival(number, wish if number > 1 else None) for number, wish in enumerate(wishes, 1)]
    found = seats(present, count)
    assert seats(data.draw(st.permutations(present)), count) == found, "the order in which they are looked at changes nothing"
    if len(present) < count:
        assert found is None
        return
    assert found is not None and found[0].is_head
    assert len({each.number for each in found}) == count
    for seat in range(1, count):
        wishing = [each for each in present if each.wish == seat and not each.is_head]
        assert not wishing or found[seat] == wishing[0]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
def test_fewer_nodes_are_as_many_as_fit(ranks: list[int], num_nodes: int, min_nodes: int, product: int) -> None:
    present = [arrival(number, num_ranks=count) for number, count in enumerate(ranks, 1)]
    found = fewer_seats(present, num_nodes, min_nodes, lambda number: number > 0 and number % product == 0)
    sums = {count: sum(ranks[:count]) for count in range(min_nodes, min(num_nodes, len(ranks) + 1))}
    good = [count for count, number in sums.items() if number and number % product == 0]
    assert (found is None) == (not good)
    assert found is None or (len(found) == max(good) and found[0].is_head)


def test_no_round_without_the_head() -> None:
    assert seats([arrival(2), arrival(3)], 2) is None


def test_a_node_that_returns_has_its_seat_again() -> None:
    first = seats([arrival(1), arrival(2, 1), arrival(3, 2)], 3)
    again = seats([arrival(1), arrival(3, 2), arrival(4, 1, "node2")], 3)
    assert first is not None and again is not None
    assert [each.host for each in first] == [each.host for each in again]


@pytest.mark.parametrize(
    ("present", "expected", "told"),
    [
        ([arrival(1)], ("node1", "node2"), "1 of 2 nodes are here: node1 (10.0.0.1); not here: node2"),
        ([arrival(2), arrival(1)], ("node1.lan", "node2", "node3"), "node1 (10.0.0.1), node2 (10.0.0.2); not here: node3"),
        ([], (), "0 of 2 nodes are here: none; not here: 2 more"),
        ([arrival(1), arrival(2, 2)], (), "not here: --node-rank 1"),
        ([arrival(1)], ("node1", "node2", "node3"), "not here: 1 of node2, node3"),
        ([arrival(1)], ("node1", "node2"), "not here: node2 and 1 more"),
    ],
)
def test_who_is_missing_is_named(present: list[Arrival], expected: tuple[str, ...], told: str) -> None:
    count = 3 if "--node-rank" in told or "and 1 more" in told or "node3" in told else 2
    count = 2 if "1 of node2, node3" in told else count
    assert told in roll_call(present, count, expected)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 8)), min_size=1, max_size=5), st.integers(1, 6), st.integers(1, 4))
def test_replicas_fit_beside_the_ranks_or_the_numbers_are_told(nodes: list[tuple[int, int]], replicas: int, width: int) -> None:
    here = [arrival(number, num_ranks=ranks, num_gpus=gpus) for number, (ranks, gpus) in enumerate(nodes, 1)]
    problem = room_problem(here, replicas, width)
    if not any(gpus for _, gpus in nodes):
        assert not problem
    elif any(ranks > gpus for ranks, gpus in nodes):
        assert "needs a GPU of its own" in problem
    else:
        room = sum((gpus - ranks) // width for ranks, gpus in nodes)
        assert bool(problem) == (room < replicas)
        assert not problem or f"room for {room}" in problem
        assert bool(replicas_problem({node.host: node.num_gpus - node.num_ranks for node in here}, replicas, width)) == bool(
            problem
        )


def test_a_replica_is_not_cut_in_two() -> None:
    told = replicas_problem({"a": 3, "b": 3}, 2, 3), replicas_problem({"a": 3, "b": 3}, 3, 2)
    assert told[0] == "" and "room for 2 replicas, since each is on one node (a: 3, b: 3)" in told[1]


FACTS: dict[str, Any] = {
    "code": "aa", "commit": "abc", "python": "3.11.7", "packages": {"torch": "2.13.0"}, "config": {"run.seed": "0"},
    "files": {"model.path": "2 files"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"code": "bb", "commit": "def"}, ["other code", "commit def, files bb", "commit abc, files aa"]),
        ({"python": "3.12.1"}, ["another Python", "3.12.1"]),
        ({"packages": {"torch": "2.11.0"}}, ["torch 2.11.0 (elsewhere 2.13.0)"]),
        ({"packages": {}}, ["torch not installed (elsewhere 2.13.0)"]),
        ({"config": {"run.seed": "1"}}, ["run.seed 1 (elsewhere 0)", "the same key=value"]),
        ({"files": {"model.path": "not there"}}, ["model.path not there (elsewhere 2 files)"]),
    ],
)
def test_the_node_that_differs_is_named_with_both_values(wrong: dict[str, Any], told: list[str]) -> None:
    found = differences({"node1": FACTS, "node2": FACTS | wrong, "node3": FACTS})
    assert list(found) == ["node2"]
    assert all(text in found["node2"] for text in ["node2", *told])
    assert list(differences({"node1": FACTS, "node2": FACTS | wrong})) == ["node2"], "of two the first counts as right"


def test_equal_nodes_differ_in_nothing() -> None:
    assert differences({"node1": FACTS, "node2": FACTS}) == {}


def test_files_are_told_by_sizes_and_headers(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / "weights").write_bytes(b"header" + bytes(2**17))
    assert described(one) == described(two) and "1 files, 131078 bytes" in described(one)
    (two / "weights").write_bytes(b"HEADER" + bytes(2**17))
    assert described(one) != described(two)
    assert described(tmp_path / "none") == "not there"


def test_code_is_told_apart_by_any_source_file(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "a.py").write_text("1")
    before = code_digest(tmp_path)
    (tmp_path / "engine" / "a.py").write_text("2")
    assert code_digest(tmp_path) != before


def test_configs_are_compared_key_by_key() -> None:
    assert flat({"run": {"seed": 0, "more": {"a": [1]}}, "empty": {}}) == {"run.seed": "0", "run.more.a": "[1]", "empty": "{}"}


FINE: dict[str, Any] = {"unreachable": [], "unseen": [], "ahead": 0.1, "is_right": True}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"unreachable": [0]}, "node2: does not reach node1"),
        ({"unseen": [0]}, "node2: does not see in run.dir what node1 wrote"),
        ({"ahead": 61.0}, "node2: its clock is -61.0 s off the one of node1"),
        ({"is_right": False}, "node2: an all-reduce gave a wrong sum"),
        ({"error": "Connection refused"}, "node2: the all-reduce failed: Connection refused"),
    ],
)
def test_what_a_run_would_fail_at_is_told_by_name(wrong: dict[str, Any], told: str) -> None:
    errors, warnings = judge(["node1", "node2"], [FINE, FINE | wrong])
    assert len(errors) == 1 and told in errors[0] and warnings == []


def test_a_node_that_tells_nothing_is_named() -> None:
    assert judge(["node1", "node2"], [FINE, {}]) == (["node2: the check did not come to its end"], [])


def test_slow_links_are_named_with_the_node_that_they_share() -> None:
    hosts = [f"node{number}" for number in range(1, 5)]
    rates = {(a, b): 0.1 if 2 in (a, b) else 1.0 for a in range(4) for b in range(4) if a != b}
    (told,) = slow_pairs(hosts, rates)
    assert "node1 to node3 0.1" in told and "node3 is in all of them" in told
    assert slow_pairs(hosts, dict.fromkeys(rates, 1.0)) == slow_pairs(hosts, {}) == []


@given(st.integers(2, 33))
def test_each_pair_of_nodes_meets_once(count: int) -> None:
    turns = tournament(count)
    pairs = [pair for turn in turns for pair in turn]
    assert len(pairs) == len(set(pairs)) == count * (count - 1) // 2
    for turn in turns:
        met = [node for pair in turn for node in pair]
        assert len(met) == len(set(met))
