"""A Ray on this machine, for one run: a folder of its own, gone afterwards; or the connection to one that runs.

Leaves out who starts it: a trainer rank that wants replicas, or the driver of a run whose ranks are actors.

    stop = start_ray("local")
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bridge.processes import RAY_PATH, socket_folder
from megasync.launch.scope import environment

# By itself Ray starts a worker for each core; our actors cannot use those, since each gets an environment of its own.
NO_IDLE_WORKERS = {"RAY_prestart_worker_first_driver": "0"}
# What Ray starts beside its actors, a process each that takes a second: an autoscaler and a dashboard, and a reader of logs.
UNUSED_DAEMONS, LOG_READER = ("start_monitor", "start_api_server"), "start_log_monitor"


def start_ray(
    address: str, gpus: Sequence[str] | None = None, num_cpus: int = 4, *, prints_logs: bool = False
) -> Callable[[], None] | None:
    """Connect to the Ray at `address`, or start one of our own where it is `local`; what ends that, None if it was there before.

    `gpus`: those of this machine that a Ray of our own may give out; None: all that are visible. `num_cpus`: how many it claims
    to have at least. `prints_logs`: what its actors print appears here.
    """
    import ray

    if ray.is_initialized():
        return None
    options: dict[str, Any] = {"address": address, "log_to_driver": prints_logs, "logging_level": "ERROR"}
    variables, folder = {}, None
    if address == "local":  # a Ray of our own, whatever cluster this machine may belong to
        folder = tempfile.mkdtemp(prefix="ray-", dir=socket_folder(RAY_PATH))
        options |= {"num_cpus": max(os.cpu_count() or 1, num_cpus), "include_dashboard": False, "_temp_dir": folder}
        options["object_store_memory"] = 200 * 2**20  # weights never travel through Ray
        variables = NO_IDLE_WORKERS | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)})

    def stop() -> None:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        with environment(variables), _without(UNUSED_DAEMONS if prints_logs else (*UNUSED_DAEMONS, LOG_READER)):
            _connect(options)
    except BaseException:
        stop()
        raise
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own leaves with 15 (ray 2.60.0 _private/worker.py:1675)
    return stop


@contextmanager
def _without(daemons: Sequence[str]) -> Iterator[None]:
    """A Ray of our own starts without these daemons, for which `ray.init` has no keys (ray 2.60.0 _private/node.py:1642)."""
    from ray._private.node import Node

    def leave_out(node: Any, **_: Any) -> None:
        node._webui_url = None  # start_api_server sets it

    before = {name: vars(Node)[name] for name in daemons if name in vars(Node)}
    try:
        for name in before:
            setattr(Node, name, leave_out)
        yield
    finally:
        for name, method in before.items():
            setattr(Node, name, method)


def _connect(options: dict[str, Any]) -> None:
    """Once more where a Ray of our own does not start: it gives itself 30 s (ray 2.60.0 _private/node.py:428)."""
    import ray

    try:
        ray.init(**options)
    except Exception:
        if options["address"] != "local":
            raise
        ray.shutdown()
        ray.init(**options)
