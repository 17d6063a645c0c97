"""Processes of episodes on two nodes of a Ray, two raylets here: the same limits, and what the loss of an actor costs.

python -m pytest tests/megasync/episodes/test_episode_cluster.py
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from megasync.episodes.pool import EpisodePool
from megasync.episodes.task import Task
from tests.megasync.episodes.test_episode_pool import Replica, Reported, failure, pool_of

pytestmark = pytest.mark.long  # a cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        made.add_node(num_cpus=1)
        ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
        yield
    finally:
        ray.shutdown()
        made.shutdown()


def play_on_both(pool: EpisodePool, prompts: list[str], replica: Replica, on_parents: Any = None) -> Reported:
    """How episodes side by side end. `on_parents` gets the parents of the processes on the other node, once both play."""

    async def asked_for_their_parents() -> list[int]:
        asked = [pool.run(Task("good", (7, 8), ""), replica) for _ in range(2)]
        keepers = [int(ended.info["parent"]) for ended, _ in await asyncio.gather(*asked)]
        return [psutil.Process(keeper).ppid() for keeper in keepers]

    async def all_of_them() -> Reported:
        await asked_for_their_parents()
        while not all(state.is_ready for state in pool.workers.states.values()):
            await asyncio.sleep(0.05)
        parents = await asked_for_their_parents()
        tasks = [asyncio.ensure_future(pool.run(Task(prompt, (7, 8, 9), "12", seed=3), replica)) for prompt in prompts]
        assert sorted(bool(worker.node) for worker in pool.workers.states) == [False, True]
        (other,) = {*parents} - {os.getpid()}
        if on_parents is not None:
            await asyncio.sleep(0.5)
            on_parents(other)
        return dict(zip(prompts, await asyncio.gather(*tasks), strict=True))

    try:
        return asyncio.run(asyncio.wait_for(all_of_them(), 120))
    finally:
        pool.close()


def cluster_pool(folder: str, **options: Any) -> EpisodePool:
    return pool_of(folder, episode_placement="cluster", answer_timeout_seconds=60.0, **options)


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_limits_and_failures_are_those_of_one_node(cluster: None, folder: str) -> None:
    good = [f"good {0.2 + 0.01 * number}" for number in range(20)]
    bad = ["raises", "hangs", "floods", "leaves", "greedy", "opens", "holds", "dies", "none", "leaves again"]
    replica = Replica()
    reported = play_on_both(cluster_pool(folder, episode_memory_bytes=4 << 30, episode_open_files=1000), [*good, *bad], replica)
    for prompt in (*good, "floods"):
        ended, turns = reported[prompt]
        assert (ended.failure, ended.reward, len(turns)) == (None, 1.0, 2)
    assert failure(reported, "raises") == "raised ZeroDivisionError: on purpose"
    assert failure(reported, "greedy").startswith("raised MemoryError")
    assert failure(reported, "opens").startswith("raised OSError: [Errno 24]")
    assert "SIGKILL" in failure(reported, "dies")
    assert failure(reported, "hangs").startswith("took longer than rollout.episode_timeout_seconds")
    assert "took longer" in failure(reported, "holds")
    assert all(gone(int(reported[prompt][0].metrics["pid"])) for prompt in ("leaves", "leaves again"))


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_actor_costs_its_episodes_another_start(cluster: None, folder: str, kind: signal.Signals) -> None:
    """They start again, and what they had sampled answers their turns: no token is sampled twice, and nobody is to blame."""
    good, replica, lost = [f"good {2.0 + number / 100}" for number in range(8)], Replica(), list[psutil.Process]()

    def on_parents(actor: int) -> None:
        lost.extend(psutil.Process(actor).children(recursive=True))
        os.kill(actor, kind)

    options = {"episode_timeout_seconds": 20.0} | ({"answer_timeout_seconds": 2.0} if kind == signal.SIGSTOP else {})
    pool = pool_of(folder, episode_placement="cluster", **options)
    reported = play_on_both(pool, good, replica, on_parents)
    assert all((ended.failure, ended.reward) == (None, 1.0) for ended, _ in reported.values())
    by_length = [len(asked.prompt_ids) for asked in replica.asked]
    assert by_length.count(3) == len(good) and by_length.count(8) == len(good)
    assert lost and all(gone(process.pid) for process in lost)
