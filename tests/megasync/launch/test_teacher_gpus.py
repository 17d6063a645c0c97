"""GPUs of teachers on replicas, beside the trainer's and the policy's: counted on a machine and in a cluster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasync.config.errors import ConfigError
from megasync.config.schema import Config
from megasync.launch.cluster_room import Demand, placement_problem
from megasync.launch.num_ranks import default_num_ranks, num_teacher_gpus

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
    problem = placement_problem(nodes, Demand(1, 0, replicas, width, teachers, other))
    if sum(gpus) - 1 < replicas * width + teachers * other:
        assert problem
    if not problem:
        assert not placement_problem(nodes, Demand(1, 0, replicas, width))
    if replicas * width + teachers * other == 0:
        assert not problem
