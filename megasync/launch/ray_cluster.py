"""Rays that live as long as a run: of one machine, of several nodes, or one that takes jobs.

`start_ray` connects a trainer rank, which starts replicas. `RayNode` is `ray start`, as a child of this process: a node's part of
the Ray over several nodes. `local_cluster` takes jobs: only `ray start` has an option for the port of the agent that takes them.
All end by process id, since `ray stop` ends every Ray on the machine. Leaves out submitting. Linux only.

    with local_cluster(num_cpus=4) as address:
        JobSubmissionClient(address)
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from bridge.processes import RAY_PATH, descendants, socket_folder
from megasync.config.own_packages import in_ray_workers
from megasync.launch.connect import connection_problem
from megasync.launch.processes import end_group, end_with_parent
from megasync.launch.scope import LOOPBACK, ON_LOOPBACK, environment

START_SECONDS = 120.0
STOP_SECONDS = 20.0
ACTOR_SECONDS = 0.5  # for actors to end with their Ray
OBJECT_STORE_BYTES = 200 * 2**20  # weights never travel through Ray
STARTED = "Ray runtime started"  # ray 2.60.0 scripts/scripts.py
AUTHENTICATION = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
# By itself Ray starts a worker for each core, which our actors cannot use, since each gets an environment of its own; and it
# gives its workers a niceness of 15, with which a replica does not start in time on cores that others have work for. Once it has
# started it yields some of them by itself (bridge/vllm/serving/api.py:yield_cores).
WORKER_ENVIRONMENT = {
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
    "RAY_task_events_report_interval_ms": "0",  # no record of each call, which the GCS would keep: 4 KB each
}
# `ray start` waits for its actors to leave, which ours never do by themselves (ray 2.60.0 _private/node.py:666).
NO_DRAINING = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
FREE_PORTS = range(20000, 32000)  # below: Ray's worker ports; above: ip_local_port_range


class RayNode:
    """`ray start --block`, as a child of this process, in a folder of its own."""

    def __init__(self, options: Mapping[str, str], variables: Mapping[str, str]) -> None:
        """`options`: of `ray start`, without dashes; empty values are flags. `variables`: added to the environment."""
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir=socket_folder(RAY_PATH)))
        self.log = self.folder / "start.log"
        own = {"block": "", "disable-usage-stats": "", "temp-dir": str(self.folder), "dashboard-agent-listen-port": "0"}
        flags = [f"--{name}={value}" if value else f"--{name}" for name, value in {**own, **options}.items()]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # the dashboard's processes talk through sockets in TMPDIR
                env={**os.environ, **WORKER_ENVIRONMENT, **NO_DRAINING, "TMPDIR": str(self.folder), **variables},
                start_new_session=True,  # Ctrl-C is for this process
                preexec_fn=end_with_parent,  # noqa: PLW1509  (it calls the kernel alone)
            )

    def problem(self) -> str:
        """Why it does not run; empty where it does, or still starts."""
        code = self.process.poll()
        return "" if code is None else f"Ray ended (exit code {code}):\n{self._log_end()}"

    def wait(self, has_started: Callable[[], bool] | None = None) -> None:
        """Until it has started, by its log, or by `has_started`.

        Raises:
            RuntimeError: it did not, or has ended since, with Ray's output.
        """
        has_started = has_started or (lambda: STARTED in self.log.read_text(errors="replace"))
        deadline = time.monotonic() + START_SECONDS
        while (problem := self.problem()) or not has_started():
            if problem or time.monotonic() > deadline:
                raise RuntimeError(problem or f"Ray did not start within {START_SECONDS:g} s:\n{self._log_end()}")
            time.sleep(0.1)

    def close(self) -> None:
        """End Ray and its actors, which notice late that a Ray whose head is gone has ended."""
        family = descendants(self.process.pid)
        end_group(self.process, STOP_SECONDS)
        for process in psutil.wait_procs(family, timeout=ACTOR_SECONDS)[1]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _log_end(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


def node_of_run(address: str, gpus: Sequence[str], head: str) -> RayNode:
    """A node's part of the Ray over several nodes, which gives out `gpus`.

    `address`: this node's; `head`: HOST:PORT of the Ray's head, which this is where HOST is `address`.
    """
    host, _, port = head.rpartition(":")
    place = {"address": head}
    if host == address:
        place = {
            "head": "",
            "port": port,
            "include-dashboard": "false",
            "no-monitor": "",
            "ray-client-server-port": str(free_port()),
        }
    options = {
        "include-log-monitor": "false",
        "node-ip-address": address,
        "object-store-memory": str(OBJECT_STORE_BYTES),
        "num-cpus": str(max(os.cpu_count() or 1, 4)),
    }
    return RayNode(place | options, in_ray_workers() | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)})


def authentication() -> dict[str, str]:
    """Variables that all processes of a Ray set: a new token, or none where the user has set how Ray admits nodes."""
    if any(name in os.environ for name in AUTHENTICATION):
        return {}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@contextmanager
def local_cluster(num_cpus: int) -> Iterator[str]:
    """Yields the address of the job server once it answers. Its processes end with the block, or with this process.

    Raises:
        RuntimeError: the cluster did not start; the message holds Ray's output.
        ModuleNotFoundError: Ray is not installed.
    """
    if find_spec("ray") is None:
        raise ModuleNotFoundError("No module named 'ray'", name="ray")
    if " " in sys.executable:  # Ray 2.60, _private/runtime_env/context.py:exec_worker: a shell, no quotes
        raise RuntimeError(f"{sys.executable}: Ray cannot use a Python whose path has a space; use another one")
    # Anyone who reaches a job server can run commands, so the cluster wants a token that only this run knows.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), **WORKER_ENVIRONMENT, **NO_DRAINING}
    port = free_port()
    options = {
        "head": "",
        "port": "0",
        "dashboard-host": LOOPBACK,
        "dashboard-port": str(port),
        "ray-client-server-port": str(free_port()),  # not used, but a taken one (default: 10001) would end the cluster
        "num-cpus": str(num_cpus),
    }
    node = RayNode(options, {name: os.environ.get(name, value) for name, value in ON_LOOPBACK.items()})

    try:
        node.wait(lambda: not connection_problem(LOOPBACK, port))
        yield f"http://{LOOPBACK}:{port}"
    finally:
        node.close()


def start_ray(address: str, gpus: Sequence[str] | None = None) -> Callable[[], None] | None:
    """Connect to the Ray at `address`, or start one for this process where it is `local`. Returns the function that ends this;
    None if this process was connected already.

    `gpus`: those of this machine that a Ray of this process may give out; None: all that are visible.
    """
    import ray

    if ray.is_initialized():
        return None
    _never_start_by_itself()
    ends, is_own = ExitStack(), address == "local"  # whatever cluster this machine may belong to
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
    variables: dict[str, str] = {}
    if is_own:
        folder = tempfile.mkdtemp(prefix="ray-", dir=socket_folder(RAY_PATH))
        ends.callback(shutil.rmtree, folder, ignore_errors=True)
        ends.callback(_use_own_token())
        options |= {"num_cpus": max(os.cpu_count() or 1, 4), "include_dashboard": False, "_temp_dir": folder}
        options["object_store_memory"] = OBJECT_STORE_BYTES
        variables = WORKER_ENVIRONMENT | in_ray_workers() | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)})
    ends.callback(ray.shutdown)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        with environment(variables):
            _connect(options)
    except BaseException:
        ends.close()
        raise
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own leaves with 15 (ray 2.60.0 _private/worker.py:1675)
    return ends.close


def _never_start_by_itself() -> None:
    """After `ray.shutdown` a call of Ray's in some other thread fails; by itself Ray would start again for it.

    ray 2.60.0 _private/auto_init_hook.py:8, which looks at RAY_ENABLE_AUTO_CONNECT only when ray is imported.
    """
    from ray._private import auto_init_hook

    auto_init_hook.enable_auto_connect = False


def _use_own_token() -> Callable[[], None]:
    """This process and the Ray that it starts share a token that nobody else knows, unless the user has set one. Returns the
    function that forgets it.

    By itself Ray takes the one in ~/.ray, or writes it: two that start at once on a new machine can end with different ones. And
    where `RAY_AUTH_MODE` was set after ray had been imported, its servers want a token and this process sends none (ray 2.60.0
    _private/authentication/authentication_token_setup.py:104).
    """
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    def read_again() -> None:
        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()

    own = ExitStack()
    if os.environ.get("RAY_AUTH_MODE", "token") == "token" and not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        own.callback(read_again)
        own.enter_context(environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}))
    read_again()
    return own.close


def _connect(options: dict[str, Any]) -> None:
    """Once more where a Ray of this process does not start: it gives itself 30 s (ray 2.60.0 _private/node.py:428).

    Raises:
        RuntimeError: it did not start again; Ray raises an Exception without a type.
    """
    import ray

    try:
        ray.init(**options)
    except Exception:
        if options["address"] != "local":
            raise
        ray.shutdown()
        try:
            ray.init(**options)
        except Exception as error:
            raise RuntimeError(f"Ray did not start: {error}") from error


def free_port() -> int:
    """A TCP port that nobody listens on, outside of the ranges that Linux and Ray's workers hand out by themselves.

    Raises:
        RuntimeError: none was found.
    """
    for port in random.SystemRandom().sample(FREE_PORTS, k=100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free TCP port between {FREE_PORTS.start} and {FREE_PORTS.stop}")
