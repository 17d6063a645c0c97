"""GPUs of teachers and judges on replicas, beside the trainer's and the policy's: on a machine, on nodes, in a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.replicas.places import room_problem as room_problem_of_free
from megasync.config.errors import ConfigError
from megasync.config.schema import Config
from megasync.launch.cluster_room import Demand, Pool, placement_problem, pool_options
from megasync.launch.members import Node, replica_room, room_problem
from megasync.launch.num_ranks import default_num_ranks, num_teacher_gpus, pools
from megasync.run.replica_start import judge_replica_config, replica_config, teacher_replica_config
from megasync.submit import job, parse
from tests.support.config_files import ROOT, write_model

COUNT = st.integers(0, 4)
TEACHER = {"path": {"maths": "a", "code": "b"}, "replicas": 2, "tensor_parallel": 2}


@pytest.mark.parametrize(
    ("teacher", "expected"),
    [(TEACHER, 8), ({"path": "a"}, 1), ({"path": "a", "place": "trainer"}, 0), ({"endpoint": "http://a/v1"}, 0), ({}, 0)],
)
def test_each_folder_has_its_replicas(teacher: dict[str, object], expected: int) -> None:
    for placement in ("separate", "colocated"):
        config = Config.model_validate({"teacher": teacher, "rollout": {"placement": placement}})
        own = placement == "separate"
        assert num_teacher_gpus(config) == expected
        assert default_num_ranks(config, 16) == 16 - expected - own
    assert num_teacher_gpus(Config.model_validate({"teacher": teacher, "algorithm": {"name": "sft"}})) == 0


def test_no_gpu_is_left_for_the_trainer() -> None:
    with pytest.raises(ConfigError) as caught:
        default_num_ranks(Config.model_validate({"teacher": TEACHER}), 8)
    assert (caught.value.key, caught.value.value) == ("teacher.replicas", "2")


@given(st.lists(st.integers(1, 8), min_size=1, max_size=3), COUNT, st.integers(1, 3), COUNT, st.integers(1, 3))
def test_a_cluster_has_room_or_says_whose_is_missing(
    gpus: list[int], replicas: int, width: int, teachers: int, other: int
) -> None:
    """One rank; the pools are placed in turn, each replica on one node."""
    nodes = {f"node{index}": {"CPU": 64.0, "GPU": float(number)} for index, number in enumerate(gpus)}
    own, beside = Pool("rollout", replicas, width), Pool("teacher", teachers, other)
    problem = placement_problem(nodes, Demand(1, 0, (own, beside)))
    if sum(gpus) - 1 < replicas * width + teachers * other:
        assert problem
    if not problem:
        assert not placement_problem(nodes, Demand(1, 0, (own,)))
    if replicas * width + teachers * other == 0:
        assert not problem


JUDGED = {"judges": {"quality": {"path": "c", "replicas": 3, "tensor_parallel": 2}}, "rollout": {"reward": "judge:quality"}}
ALL = (Pool("rollout", 1, 1), Pool("teacher", 2, 2), Pool("teacher", 2, 2), Pool("judges.quality", 3, 2))


def test_the_replicas_of_a_config_go_to_a_cluster_with_its_job() -> None:
    config = Config.model_validate({"teacher": TEACHER, **JUDGED})
    assert pools(config) == ALL and num_teacher_gpus(config) == 14
    made = job(parse([str(ROOT / "tests" / "data" / "submit.yaml")]), config, 2)["entrypoint"]
    assert " ".join(pool_options(ALL)) in made and made.count("--pool") == 4


def test_the_pool_that_leaves_no_gpu_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        default_num_ranks(Config.model_validate(JUDGED), 7)
    assert (caught.value.key, caught.value.value) == ("judges.quality.replicas", "3")


@given(st.lists(st.integers(1, 8), min_size=1, max_size=3), st.integers(1, 3), COUNT, st.integers(1, 3))
def test_nodes_count_the_replicas_of_every_model(gpus: list[int], width: int, teachers: int, other: int) -> None:
    """`replica_room`: as many of the policy's as fit once the others are placed."""
    nodes = [Node(number, f"node{number}", f"10.0.0.{number}", None, 1, count, number == 0) for number, count in enumerate(gpus)]
    beside = Pool("teacher", teachers, other)
    room, alone = replica_room(nodes, width, [beside]), replica_room(nodes, width)
    assert room <= alone and replica_room(nodes, width, []) == alone
    assert room * width + teachers * other <= sum(gpus) - len(gpus) or not room
    assert not room or not room_problem(nodes, (beside, Pool("rollout", room, width)))
    problem = room_problem(nodes, (beside, Pool("rollout", room + 1, width)))
    assert problem.startswith("teacher.replicas" if room_problem(nodes, (beside,)) else "rollout.replicas")


def test_a_pool_knows_its_key_and_the_gpus_of_the_others(tmp_path: Path) -> None:
    """Which Ray on one host counts as free while a run is scaled."""
    folder = str(write_model(tmp_path))
    config = Config.model_validate({"model": {"path": folder}, "teacher": TEACHER, **JUDGED})
    teacher, judge = teacher_replica_config(config, folder), judge_replica_config(config, "quality")
    found = [(each.key, each.gpus_beside, each.never_syncs) for each in (replica_config(config), teacher, judge)]
    assert found == [("rollout", 14, False), ("teacher", 11, True), ("judges.quality", 9, True)]
    reported = room_problem_of_free({"a": 4}, 9, 1, key="judges.quality")
    assert reported.startswith("judges.quality.replicas=9 times judges.quality.tensor_parallel=1")
