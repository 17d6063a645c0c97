"""A Ray on this machine, for one run: free ports, a folder of its own, gone afterwards.

`start_ray` is for a trainer rank that starts replicas. `local_cluster` takes jobs and wants an access token; it is `ray start`
and not `ray.init`: only there can the port of the agent that takes jobs be chosen, and a second Ray on the machine would hold the
default one. Leaves out submitting. Linux only, as Ray's own process control here is.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

from bridge.processes import RAY_PATH, socket_folder
from megasync.config.own_packages import in_ray_workers
from megasync.launch.processes import end_group, end_with_parent
from megasync.launch.scope import LOOPBACK, ON_LOOPBACK, environment

START_SECONDS = 120.0
STOP_SECONDS = 20.0
# By itself Ray starts a worker for each core, which our actors cannot use, since each gets an environment of its own; and it
# gives its workers a niceness of 15, with which a replica does not start in time on cores that others have work for. Once it has
# started it yields some of them by itself (bridge/vllm/serving/api.py:yield_cores).
WORKER_ENVIRONMENT = {"RAY_prestart_worker_first_driver": "0", "RAY_worker_niceness": "0"}
# `ray start` waits for its actors to leave, which ours never do by themselves (ray 2.60.0 _private/node.py:666).
NO_DRAINING = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
FREE_PORTS = range(20000, 32000)  # below: Ray's worker ports; above: ip_local_port_range
AGENT = Path(__file__).with_name("ray_agent.py")
# What Ray starts beside its actors, a process each that takes a second: an autoscaler, a reader of logs, a dashboard and, by
# `ray start`, a server for clients elsewhere.
UNUSED_DAEMONS = ("start_monitor", "start_log_monitor", "start_api_server", "start_ray_client_server")


@contextmanager
def local_cluster(num_cpus: int) -> Iterator[str]:
    """Yields the address of the job server once it answers. Its processes end with the block, or with this process.

    Raises:
        RuntimeError: the cluster did not start; the message holds what Ray said.
        ModuleNotFoundError: Ray is not installed.
    """
    if find_spec("ray") is None:
        raise ModuleNotFoundError("No module named 'ray'", name="ray")
    if " " in sys.executable:  # Ray 2.60, _private/runtime_env/context.py:exec_worker: a shell, no quotes
        raise RuntimeError(f"{sys.executable}: Ray cannot use a Python whose path has a space; use another one")
    # Anyone who reaches a job server can run commands, so the cluster wants a token that only this run knows.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), **WORKER_ENVIRONMENT, **NO_DRAINING}
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir=socket_folder(RAY_PATH)))
    port = free_port()
    log = folder / "start.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(folder, num_cpus, port),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**ON_LOOPBACK, **os.environ, "TMPDIR": str(folder)},  # the dashboard's processes talk through sockets there
            start_new_session=True,  # Ctrl-C is for this process, which stops the job first
            preexec_fn=end_with_parent,  # noqa: PLW1509  (the only thread of ours still sleeps)
        )
    try:
        _wait_for_port(process, port, log)
        yield f"http://{LOOPBACK}:{port}"
    finally:
        end_group(process, STOP_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)


def start_ray(address: str, gpus: Sequence[str] | None = None) -> Callable[[], None] | None:
    """Connect to the Ray at `address`, or start one of our own where it is `local`; what ends that, None if it was there before.

    `gpus`: those of this machine that a Ray of our own may give out; None: all that are visible.
    """
    import ray

    if ray.is_initialized():
        return None
    _never_start_by_itself()
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
    variables, folder = {}, None
    if address == "local":  # a Ray of our own, whatever cluster this machine may belong to
        folder = tempfile.mkdtemp(prefix="ray-", dir=socket_folder(RAY_PATH))
        options |= {"num_cpus": max(os.cpu_count() or 1, 4), "include_dashboard": False, "_temp_dir": folder}
        options["object_store_memory"] = 200 * 2**20  # weights never travel through Ray
        variables = WORKER_ENVIRONMENT | in_ray_workers() | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)})
    forget_token = _use_own_token() if address == "local" else lambda: None

    def stop() -> None:
        ray.shutdown()
        forget_token()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        with environment(variables), without_unused_daemons():
            _connect(options)
    except BaseException:
        stop()
        raise
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own leaves with 15 (ray 2.60.0 _private/worker.py:1675)
    return stop


def _never_start_by_itself() -> None:
    """A call of Ray's in a thread that goes on after `stop` fails, in the place of starting another Ray for it.

    ray 2.60.0 _private/auto_init_hook.py:8, which looks at RAY_ENABLE_AUTO_CONNECT only when ray is imported.
    """
    from ray._private import auto_init_hook

    auto_init_hook.enable_auto_connect = False


def _use_own_token() -> Callable[[], None]:
    """This process and the Ray that it starts know a token that nobody else knows, unless the user has said otherwise.

    By itself Ray takes the one in ~/.ray, or writes it: two that start at once on a new machine can end with different ones. And
    where `RAY_AUTH_MODE` was set after ray had been imported, its servers want a token and this process sends none (ray 2.60.0
    _private/authentication/authentication_token_setup.py:104). Returns what forgets it.
    """
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    def read_again() -> None:
        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()

    if os.environ.get("RAY_AUTH_MODE", "token") != "token" or {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        read_again()
        return lambda: None
    own = ExitStack()
    own.callback(read_again)
    own.enter_context(environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}))
    read_again()
    return own.close


@contextmanager
def without_unused_daemons() -> Iterator[None]:
    """A Ray that this process starts has no UNUSED_DAEMONS, for which there are no keys (ray 2.60.0 _private/node.py:1642).

    In the place of its dashboard's agent is what stands for it (ray_agent.py).
    """
    from ray._private import ray_constants, services, utils
    from ray._private.node import Node

    def leave_out(node: Any, **_: Any) -> None:
        node._webui_url = None  # start_api_server sets it

    python = services._build_python_executable_command_memory_profileable

    def build_command(component: str, *given: Any, **named: Any) -> list[str]:
        """What comes before the path of a daemon's program, and its options (_private/services.py:1862)."""
        is_agent = component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT
        return [sys.executable, "-S", str(AGENT)] if is_agent else list(python(component, *given, **named))

    absent = ImportError("Ray has no dashboard here")  # which Ray finds out by imports that take half a second
    with ExitStack() as changes:
        for name in UNUSED_DAEMONS:
            if name in vars(Node):
                changes.enter_context(mock.patch.object(Node, name, leave_out))
        changes.enter_context(mock.patch.object(services, python.__name__, build_command))
        changes.enter_context(mock.patch.object(utils, "get_dashboard_dependency_error", return_value=absent))
        yield


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


def free_port() -> int:
    """A TCP port that nobody listens on, outside of what Linux and Ray's workers hand out by themselves.

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


def _command(folder: Path, num_cpus: int, dashboard_port: int) -> list[str]:
    options = {
        "port": "0",
        "dashboard-host": LOOPBACK,
        "dashboard-port": str(dashboard_port),
        "dashboard-agent-listen-port": "0",
        "ray-client-server-port": str(free_port()),  # not used, but a taken one would end the cluster
        "num-cpus": str(num_cpus),
        "temp-dir": str(folder),
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats", *flags]


def _wait_for_port(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        with socket.socket() as probe:
            if probe.connect_ex((LOOPBACK, port)) == 0:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            said = log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"the local Ray cluster did not start (exit code {process.poll()}):\n{said}")
        time.sleep(0.2)
