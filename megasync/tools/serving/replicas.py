"""Replicas that serve the weights of a folder, for the length of a command, and the command's temporary folder and errors.

with scratch_folder() as folder, main_errors():
    source = find_source(Path("runs/rl"), folder, step=None, overrides=[])
with machine_errors(), served(source.config) as pool:
    completions = pool.generate(requests).result()
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megasync.config.schema import Config
from megasync.launch.processes import end_on_sigterm
from megasync.launch.ray_cluster import start_ray
from megasync.launch.scope import kernel_cache, listen_on_loopback, run_scope

if TYPE_CHECKING:
    from bridge.replicas.pool import ReplicaPool

Serve = Callable[[Config], AbstractContextManager["ReplicaPool"]]
DOCTOR = "`megasync doctor` checks this machine"


@contextmanager
def served(config: Config, *, warms_up: bool = True) -> Iterator[ReplicaPool]:
    """For a command: whatever it starts, and leaves on the disk, ends with the block.

    `warms_up`: kernels are compiled at the start, not by the first requests that need them.
    """
    if config.rollout.ray_address == "local":
        listen_on_loopback()
    end_on_sigterm()
    with run_scope(), replicas(config, warms_up) as pool:
        yield pool
    end_on_sigterm()  # run_scope has set both signals aside
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def replicas(config: Config, warms_up: bool = True) -> Iterator[ReplicaPool]:
    """`rollout.replicas` of them, as a run has them.

    Raises:
        RuntimeError: one did not start, with vLLM's own error.
        ValueError: there are too few GPUs.
    """
    from bridge.replicas.pool import ReplicaPool
    from megasync.run.replica_start import replica_config

    stop_ray = start_ray(config.rollout.ray_address)
    try:
        pool = ReplicaPool.begin_start(replace(replica_config(config), warms_up=warms_up), config.rollout.replicas)
        try:
            pool.finish_start()
            for note in pool.drain_notes():
                print(note, file=sys.stderr)
            yield pool
        finally:
            pool.close()
    finally:
        if stop_ray is not None:
            stop_ray()


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Removed with the block, also where SIGTERM ends it; `megasync doctor` knows by its name what SIGKILL leaves. What computes
    beside the replicas, after they have ended too, leaves no empty cache.
    """
    end_on_sigterm()
    with kernel_cache(), tempfile.TemporaryDirectory(prefix=f"megasync-serve-{os.getpid()}-") as folder:
        yield Path(folder)


@contextmanager
def machine_errors() -> Iterator[None]:
    """An error of replicas, rewards, weights or files becomes its message and exit code 1."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        print(f"{error}\n{DOCTOR}", file=sys.stderr)
        sys.exit(1)
