"""Somebody's Ray cluster on this machine, which takes jobs and wants an access token. Linux only.

It is `ray start` and not `ray.init`: only there can the port of the agent that takes jobs be chosen, and a second Ray on the
machine would hold the default one.

    with local_cluster(num_cpus=4) as address:
        JobSubmissionClient(address)
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bridge.processes import RAY_PATH, socket_folder
from megasync.bench.replicas.nccl import free_port
from megasync.launch.processes import end_with_parent
from megasync.launch.ray_cluster import NO_IDLE_WORKERS
from megasync.launch.scope import LOOPBACK, ON_LOOPBACK

START_SECONDS = 120.0
STOP_SECONDS = 20.0
# `ray start` waits for its actors to leave, which ours never do by themselves (ray 2.60.0 _private/node.py:666).
NO_DRAINING = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}


@contextmanager
def local_cluster(num_cpus: int) -> Iterator[str]:
    """Yields the address of the job server once it answers. Its processes end with the block, or with this process.

    Raises:
        RuntimeError: the cluster did not start; the message holds what Ray said.
    """
    # Anyone who reaches a job server can run commands, so the cluster wants a token that only this run knows.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), **NO_IDLE_WORKERS, **NO_DRAINING}
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
        _end(process)
        shutil.rmtree(folder, ignore_errors=True)


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


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
