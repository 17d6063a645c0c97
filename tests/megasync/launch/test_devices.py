"""Which GPUs trainer ranks, replicas and Ray get, however the ranks are started.

python -m pytest tests/megasync/launch/test_devices.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasync.config.schema import Config, RolloutConfig
from megasync.launch.devices import devices_for_ray, gpu_names, replica_devices, visible_devices
from megasync.launch.driver import Place, rank_environments
from megasync.launch.num_ranks import default_num_ranks
from tests.support.gpus import pretend_gpus

VISIBLE = st.lists(st.integers(0, 63), min_size=1, max_size=16, unique=True).map(lambda numbers: list(map(str, numbers)))


def rank_devices(launcher: str, visible: list[str], num_ranks: int) -> tuple[list[str], list[list[str]]]:
    """Each rank's own GPU, and what all ranks see, as parallel.initialize takes it from a rank's environment."""
    if launcher == "torchrun":
        environments = [{"LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": ",".join(visible)} for rank in range(num_ranks)]
    else:
        environments = rank_environments([Place("node", gpu) for gpu in visible[:num_ranks]], "127.0.0.1", 1234)
    seen = [environment["CUDA_VISIBLE_DEVICES"].split(",") for environment in environments]
    own = [gpus[int(environment["LOCAL_RANK"])] for gpus, environment in zip(seen, environments, strict=True)]
    return own, seen


@given(st.data(), VISIBLE, st.sampled_from(["torchrun", "submit"]), st.integers(1, 4), st.integers(1, 4))
def test_every_worker_of_colocated_replicas_is_on_a_rank_of_its_own(
    data: st.DataObject, visible: list[str], launcher: str, replicas: int, width: int
) -> None:
    num_ranks = data.draw(st.integers(1, len(visible)))
    own, seen = rank_devices(launcher, visible, num_ranks)
    assert own == visible[:num_ranks]
    if replicas * width > len(seen[0]):
        with pytest.raises(ValueError, match="lower one of them"):
            replica_devices(seen[0], replicas, width)
        return
    devices = replica_devices(seen[0], replicas, width)
    assert len(devices) == replicas
    workers = [gpu for each in devices for gpu in each.split(",")]
    assert len(workers) == len(set(workers)) == replicas * width
    assert workers[:num_ranks] == own[: len(workers)]
    assert devices_for_ray(seen[0], num_ranks, is_colocated=True) is None


@given(st.data(), VISIBLE)
def test_a_ray_of_our_own_gives_out_all_gpus_but_those_of_the_ranks(data: st.DataObject, visible: list[str]) -> None:
    num_ranks = data.draw(st.integers(1, len(visible)))
    own, seen = rank_devices("torchrun", visible, num_ranks)
    left = devices_for_ray(seen[0], num_ranks, is_colocated=False)
    assert left is not None
    assert sorted([*own, *left]) == sorted(visible)


def test_a_machine_without_gpus() -> None:
    assert replica_devices((), 2, 2) == ()
    assert devices_for_ray((), 2, is_colocated=False) is None


@pytest.mark.parametrize(("listed", "seen"), [("", ()), ("-1", ()), ("3,1", ("3", "1")), ("GPU-8f,GPU-2c", ("GPU-8f", "GPU-2c"))])
def test_visible_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, listed: str, seen: tuple[str, ...]) -> None:
    pretend_gpus(monkeypatch, tmp_path, 4)
    assert visible_devices() == ("0", "1", "2", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert visible_devices() == seen


@pytest.mark.skipif(bool(gpu_names()), reason="the machine has GPUs")
def test_a_machine_without_gpus_has_none_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert visible_devices() == ()


def test_ranks_of_several_nodes_see_the_gpus_of_their_own() -> None:
    places = [Place("a", "3"), Place("b", "0"), Place("a", "1")]
    reported = rank_environments(places, "10.0.0.1", 500)
    assert [one["LOCAL_RANK"] for one in reported] == ["0", "0", "1"]
    assert [one["LOCAL_WORLD_SIZE"] for one in reported] == ["2", "1", "2"]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in reported] == ["3,1", "0", "3,1"]
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in reported} == {("10.0.0.1", "500")}
    assert all("CUDA_VISIBLE_DEVICES" not in one for one in rank_environments([Place("a", "")], "10.0.0.1", 500))


@pytest.mark.parametrize(("placement", "ranks"), [("separate", 4), ("colocated", 8)])
def test_default_num_ranks_leaves_replicas_the_gpus_that_they_do_not_share(placement: str, ranks: int) -> None:
    config = Config(rollout=RolloutConfig(placement=placement, replicas=2, tensor_parallel=2))
    assert default_num_ranks(config, gpus=8) == ranks
    assert default_num_ranks(config, gpus=0) == 2
