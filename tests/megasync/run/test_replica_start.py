"""Whether replicas start beside a trainer that shares their devices, or wait for its memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from bridge.config import ReplicaConfig
from bridge.replicas.actors import ReplicaActors
from bridge.replicas.states import NumberedReplica, State
from bridge.replicas.launched import ReplicaActor
from megasync.config.load import load_config
from megasync.tools.plan.hardware import GIB
from megasync.run.replica_start import STATE_BYTES, TRAINER_BYTES, has_room
from tests.support.config_files import write_runnable

SHARED = ("rollout.placement=colocated", "rollout.kv_cache_bytes=1GiB", "rollout.gpu_memory_utilization=0.3")


@pytest.mark.parametrize(
    ("overrides", "free_bytes", "expected"),
    [
        (SHARED, 80 * GIB, True),
        (SHARED, 4 * GIB, False),  # the trainer's context and the KV cache
        ([*SHARED, "rollout.gpu_memory_utilization=0.9"], 80 * GIB, False),  # which vLLM demands when it starts
        ([*SHARED, "rollout.kv_cache_bytes=79GiB"], 80 * GIB, False),
        ([*SHARED, "rollout.kv_cache_bytes=null"], 80 * GIB, False),  # vLLM would take the trainer's for its own
        ([*SHARED, "rollout.placement=separate"], 80 * GIB, False),  # nothing is shared
    ],
)
def test_there_is_room_where_all_that_both_need_is_free(
    tmp_path: Path, overrides: Sequence[str], free_bytes: int, expected: bool
) -> None:
    assert has_room(load_config(write_runnable(tmp_path), overrides), free_bytes) is expected


def test_the_trainers_state_counts(tmp_path: Path) -> None:
    config = load_config(write_runnable(tmp_path), SHARED)
    num_parameters = 10**9
    with (Path(config.model.path) / "more.safetensors").open("wb") as file:
        file.truncate(2 * num_parameters)  # sparse
    needed = 2 * num_parameters + STATE_BYTES * num_parameters + TRAINER_BYTES + GIB
    assert not has_room(config, needed)
    assert has_room(config, 2 * needed)


class StartingActors(ReplicaActors):
    """The first start fails with `error`; notes those after it."""

    def __init__(self, config: ReplicaConfig, error: str) -> None:
        super().__init__(config, 1)
        self.error, self.again = error, list[int]()

    def _begin_launch(self, replicas: Sequence[int], *, serves_folder: bool) -> dict[int, ReplicaActor]:
        assert serves_folder
        self.again += replicas
        return {replica: ReplicaActor(None) for replica in replicas}

    def _finish_launch(self, actors: dict[int, ReplicaActor]) -> None:
        if not self.again:
            raise RuntimeError(self.error)


def test_a_start_for_which_the_memory_was_not_enough_is_made_again_once_it_is_free() -> None:
    actors = StartingActors(ReplicaConfig("model", shares_devices=True, has_room=True), "CUDA out of memory")
    actors._replicas = {0: NumberedReplica(State.STARTING, ReplicaActor(None))}
    actors.finish_start()
    assert actors.again == [0] and actors.members == [0]


@pytest.mark.parametrize(("has_room", "error"), [(False, "CUDA out of memory"), (True, "no such attention backend")])
def test_a_start_that_would_fail_again_is_not_made_again(has_room: bool, error: str) -> None:
    actors = StartingActors(ReplicaConfig("model", shares_devices=True, has_room=has_room), error)
    actors._replicas = {0: NumberedReplica(State.STARTING, ReplicaActor(None))}
    with pytest.raises(RuntimeError, match=error):
        actors.finish_start()
    assert actors.again == []
