"""A Ray and replicas that serve the weights of a folder, and their end.

with served(config) as pool:
    completions = pool.generate(requests).result()
with serving(config) as start, start(config) as pool:      # others with other weights may be started after them
    ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from megasync.config.schema import Config
from megasync.launch.processes import end_on_sigterm
from megasync.launch.ray_cluster import start_ray
from megasync.launch.scope import listen_on_loopback, run_scope

if TYPE_CHECKING:
    from bridge.replicas.pool import ReplicaPool


@contextmanager
def served(config: Config) -> Iterator[ReplicaPool]:
    """For a command: what it starts and leaves on the disk ends with the block, whatever happens in it."""
    with serving(config) as start, start(config) as pool:
        yield pool


@contextmanager
def serving(config: Config) -> Iterator[Callable[[Config], AbstractContextManager[ReplicaPool]]]:
    """As `served`, with a Ray alone; what starts the replicas of a config in it."""
    if config.rollout.ray_address == "local":
        listen_on_loopback()
    end_on_sigterm()
    with run_scope(), _ray(config):
        yield _started


@contextmanager
def replicas(config: Config) -> Iterator[ReplicaPool]:
    """`rollout.replicas` of them, as a run has them.

    Raises:
        RuntimeError: one did not start, with vLLM's own error.
        ValueError: there are too few GPUs.
    """
    with _ray(config), _started(config) as pool:
        yield pool


@contextmanager
def _ray(config: Config) -> Iterator[None]:
    stop_ray = start_ray(config.rollout.ray_address)
    try:
        yield
    finally:
        if stop_ray is not None:
            stop_ray()


@contextmanager
def _started(config: Config) -> Iterator[ReplicaPool]:
    from bridge.replicas.pool import ReplicaPool
    from megasync.run.weights import replica_config

    pool = ReplicaPool.start(replica_config(config), config.rollout.replicas)
    try:
        yield pool
    finally:
        pool.close()
