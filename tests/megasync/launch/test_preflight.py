"""The pure parts of a run on several nodes: who is here and in which order, what differs, what the network check found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.replicas.places import room_problem as replicas_problem
from megasync.launch import machine, preflight
from megasync.launch.cluster_room import Pool
from megasync.launch.members import Node, first_members, in_order, roll_call, room_problem
from megasync.launch.preflight import code_digest, commit, described, differences, flat, judge, shared_memory_finding, slow_links


def node(number: int, place: int | None = None, host: str = "", **more: Any) -> Node:
    fields = {"num_ranks": 1, "num_gpus": 0, "is_head": number == 1} | more
    return Node(number, host or f"node{number}", f"10.0.0.{number}", place, **fields)


@given(st.data())
def test_the_first_nodes_take_part_the_head_before_all(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    places = data.draw(st.lists(st.none() | st.integers(0, count), min_size=1, max_size=8))
    present = [node(number, place if number > 1 else None) for number, place in enumerate(places, 1)]
    found = first_members(present, count)
    assert first_members(data.draw(st.permutations(present)), count) == found
    if len(present) < count:
        assert found is None
        return
    assert found is not None and found[0].is_head and {each.number for each in found} == set(range(1, count + 1))
    given_places = [each.place for each in found[1:]]
    assert given_places == sorted(given_places, key=lambda place: (place is None, place or 0))


def test_no_start_without_the_head() -> None:
    assert first_members([node(2), node(3)], 2) is None


def test_a_node_that_returns_has_its_place_again() -> None:
    again = in_order([node(4, 1, "node2"), node(3, 2), node(1)])
    assert [each.host for each in again] == [each.host for each in in_order([node(1), node(2, 1), node(3, 2)])]


@pytest.mark.parametrize(
    ("present", "count", "expected", "text"),
    [
        ([node(1)], 2, ("node1", "node2"), "1 of 2 nodes are here: node1 (10.0.0.1); not here: node2"),
        ([node(2), node(1)], 3, ("node1.lan", "node2", "node3"), "node1 (10.0.0.1), node2 (10.0.0.2); not here: node3"),
        ([], 2, (), "0 of 2 nodes are here: none; not here: 2 more"),
        ([node(1), node(2, 2)], 3, (), "not here: --node-rank 1"),
    ],
)
def test_missing_nodes_are_named(present: list[Node], count: int, expected: tuple[str, ...], text: str) -> None:
    assert text in roll_call(present, count, expected)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 8)), min_size=1, max_size=5), st.integers(1, 6), st.integers(1, 4))
def test_replicas_fit_beside_the_ranks_or_the_numbers_are_named(nodes: list[tuple[int, int]], replicas: int, width: int) -> None:
    here = [node(number, num_ranks=ranks, num_gpus=gpus) for number, (ranks, gpus) in enumerate(nodes, 1)]
    problem = room_problem(here, [Pool("rollout", replicas, width)])
    if not any(gpus for _, gpus in nodes):
        assert not problem
    elif any(ranks > gpus for ranks, gpus in nodes):
        assert "needs a GPU of its own" in problem
    else:
        room = sum((gpus - ranks) // width for ranks, gpus in nodes)
        assert bool(problem) == (room < replicas)
        assert not problem or f"room for {room}" in problem
        left = {each.host: each.num_gpus - each.num_ranks for each in here}
        assert bool(replicas_problem(left, replicas, width)) == bool(problem)


def test_a_replica_is_not_cut_in_two() -> None:
    reported = replicas_problem({"a": 3, "b": 3}, 2, 3), replicas_problem({"a": 3, "b": 3}, 3, 2)
    assert reported[0] == "" and "room for 2 replicas, since each is on one node (a: 3, b: 3)" in reported[1]


FACTS: dict[str, Any] = {
    "code": {"files": "aa"}, "shown": {"code": "; commit abc"}, "python": {"version": "3.11.7"},
    "packages": {"torch": "2.13.0"}, "config": {"run.seed": "0"}, "files": {"model.path": "2 files"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "reported"),
    [
        ({"code": {"files": "bb"}, "shown": {"code": "; commit def"}}, ["other code", "files bb (elsewhere aa); commit def"]),
        ({"python": {"version": "3.12.1"}}, ["another Python", "3.12.1"]),
        ({"packages": {"torch": "2.11.0"}}, ["torch 2.11.0 (elsewhere 2.13.0)"]),
        ({"packages": {}}, ["torch absent (elsewhere 2.13.0)"]),
        ({"config": {"run.seed": "1"}}, ["run.seed 1 (elsewhere 0)", "the same key=value"]),
        ({"files": {"model.path": "not there"}}, ["model.path not there (elsewhere 2 files)"]),
    ],
)
def test_the_node_that_differs_is_named_with_both_values(wrong: dict[str, Any], reported: list[str]) -> None:
    found = differences({"node1": FACTS, "node2": FACTS | wrong, "node3": FACTS})
    assert list(found) == ["node2"]
    assert all(text in found["node2"] for text in ["node2", *reported])
    assert list(differences({"node1": FACTS, "node2": FACTS | wrong})) == ["node2"], "of two the first counts as right"


def test_nodes_with_the_same_files_are_equal_whatever_their_commits() -> None:
    assert differences({"node1": FACTS, "node2": FACTS | {"shown": {"code": "; commit def"}}}) == {}


def test_a_node_without_git_has_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit(tmp_path) == ""


def test_little_shared_memory_is_a_warning_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "RAY_BYTES", 2**60)
    text, is_error = shared_memory_finding("node2", has_rollouts=True)
    assert text.startswith("node2: /dev/shm: ") and "--shm-size" in text and not is_error
    assert shared_memory_finding("node2", has_rollouts=False) == ("", False)
    monkeypatch.setattr(preflight, "MEMORY_FOLDER", tmp_path / "none")
    assert shared_memory_finding("node2", has_rollouts=False)[1]


def test_files_are_compared_by_sizes_headers_and_pieces(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / "weights").write_bytes(b"header" + bytes(2**17))
    assert described(one) == described(two) and "1 files, 131078 bytes" in described(one)
    (two / "weights").write_bytes(b"HEADER" + bytes(2**17))
    assert described(one) != described(two)
    for begin, end in ((2**20, 2**21), (2**21 - 1, 2**21)):  # as another fine-tune's values, and a data set's last line
        for folder, value in ((one, 0), (two, 1)):
            (folder / "weights").write_bytes(bytes(begin) + bytes([value]) * (end - begin))
        assert described(one) != described(two), begin
    assert described(tmp_path / "none") == "not there"


def test_code_differs_by_any_source_file(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "a.py").write_text("1")
    before = code_digest(tmp_path)
    (tmp_path / "engine" / "a.py").write_text("2")
    assert code_digest(tmp_path) != before


def test_configs_are_compared_key_by_key() -> None:
    assert flat({"run": {"seed": 0, "more": {"a": [1]}}, "empty": {}}) == {"run.seed": "0", "run.more.a": "[1]", "empty": "{}"}


FINE: dict[str, Any] = {"unreachable": [], "unseen": [], "ahead": 0.1, "is_right": True}


@pytest.mark.parametrize(
    ("wrong", "reported"),
    [
        ({"unreachable": [0]}, "node2: does not reach node1"),
        ({"unseen": [0]}, "node2: does not see in run.dir what node1 wrote"),
        ({"ahead": 61.0}, "node2: its clock is -61.0 s off the one of node1"),
        ({"is_right": False}, "node2: an all-reduce gave a wrong sum"),
        ({"error": "Connection refused"}, "node2: the all-reduce failed: Connection refused"),
    ],
)
def test_a_problem_of_the_network_names_its_node(wrong: dict[str, Any], reported: str) -> None:
    errors, warnings = judge(["node1", "node2"], [FINE, FINE | wrong])
    assert len(errors) == 1 and reported in errors[0] and warnings == []


def test_a_node_without_results_is_named() -> None:
    assert judge(["node1", "node2"], [FINE, {}]) == (["node2: the network check did not finish"], [])


def test_slow_links_are_named() -> None:
    hosts = [f"node{number}" for number in range(1, 5)]
    (reported,) = slow_links(hosts, [1.0, 0.1, 1.0, 0.2])
    assert "node2 to node3 0.1, node4 to node1 0.2" in reported
    assert slow_links(hosts, [1.0] * 4) == slow_links(hosts, [None] * 4) == []
