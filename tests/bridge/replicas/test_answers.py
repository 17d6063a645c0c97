"""Errors of actors that give no answer. Actors of a real Ray, without vLLM.

python -m pytest tests/bridge/replicas/test_answers.py
"""

from __future__ import annotations


import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bridge.replicas.launched import ReplicaDiedError, gather


@pytest.mark.usefixtures("local_ray")
def test_an_error_of_rays_own_is_one_as_any_other() -> None:
    """Ray has many besides that of an actor that died; here that of an actor for a node which is gone."""

    class Answering:
        def answer(self) -> int:
            return 7

    gone = NodeAffinitySchedulingStrategy(ray.NodeID.from_random().hex(), soft=False)
    here, there = ray.remote(Answering), ray.remote(Answering).options(scheduling_strategy=gone)
    assert gather([here.remote().answer.remote()]) == [7]
    with pytest.raises(RuntimeError, match=r"^Ray has no answer of a replica: ActorUnschedulableError: "):
        gather([there.remote().answer.remote()], 30.0, [0])


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize(("ended", "kind"), [({"a": -9}, ReplicaDiedError), ({}, ReplicaDiedError), ({"a": 1}, RuntimeError)])
def test_an_engine_that_was_killed_while_it_started_may_start_again(ended: dict[str, int], kind: type[Exception]) -> None:
    """By vLLM's text, which lacks a process whose exit code was not known yet."""

    class Starting:
        def start(self) -> None:
            raise RuntimeError(f"Engine core initialization failed. See root cause above. Failed core proc(s): {ended}")

    with pytest.raises(RuntimeError) as caught:
        gather([ray.remote(Starting).remote().start.remote()])
    assert type(caught.value) is kind
