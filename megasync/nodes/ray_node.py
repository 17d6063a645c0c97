"""This node's part of the run's Ray: the head's, or one that joins it. It gives out the GPUs that the trainer's ranks leave.

Ends with the launcher, by its process id: `ray stop` would end every Ray on the machine. All nodes have one token, without which
Ray lets nobody in. Leaves out when it is started (member.py).

python -m megasync.nodes.ray_node start ...     # `ray start`, without the daemons that a run does not use
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from bridge.processes import RAY_PATH, descendants, socket_folder
from megasync.config.own_packages import in_ray_workers
from megasync.launch.processes import end_group, end_with_parent
from megasync.launch.ray_cluster import (
    NO_DRAINING,
    START_SECONDS,
    STOP_SECONDS,
    WORKER_ENVIRONMENT,
    free_port,
    without_unused_daemons,
)

STARTED = "Ray runtime started"  # ray 2.60.0 scripts/scripts.py
ACTOR_SECONDS = 0.5  # for actors to end with their Ray
AUTHENTICATION = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def authentication(given: Mapping[str, str]) -> dict[str, str]:
    """What all nodes set: nothing where the user has said how Ray lets nodes in, else a token of this run."""
    if any(name in given for name in AUTHENTICATION):
        return {}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


class RayNode:
    """`ray start --block`, as a child of this process."""

    def __init__(self, address: str, gpus: Sequence[str], head: str | None = None) -> None:
        """`address`: this node's; `gpus`: that it gives out; `head`: HOST:PORT of the Ray to join, None: this is the head."""
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir=socket_folder(RAY_PATH)))
        self.log = self.folder / "start.log"
        self.address = head or f"{address}:{free_port()}"
        place = [f"--address={head}"] if head else ["--head", f"--port={self.address.rpartition(':')[2]}"]
        if not head:
            place += ["--include-dashboard=false"]
        options = {
            "node-ip-address": address,
            "temp-dir": str(self.folder),
            "dashboard-agent-listen-port": "0",
            "object-store-memory": str(200 * 2**20),  # weights never travel through Ray
            "num-cpus": str(max(os.cpu_count() or 1, 4)),
        }
        flags = [*place, "--block", "--disable-usage-stats", *(f"--{name}={value}" for name, value in options.items())]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megasync.nodes.ray_node", "start", *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    **WORKER_ENVIRONMENT,
                    **in_ray_workers(),
                    **NO_DRAINING,
                    "CUDA_VISIBLE_DEVICES": ",".join(gpus),
                },
                start_new_session=True,
                preexec_fn=end_with_parent,  # noqa: PLW1509  (it calls the kernel alone)
            )

    def problem(self) -> str:
        """Why it does not run; empty where it does, or still starts."""
        if self.process.poll() is None:
            return ""
        return f"Ray ended on this node (exit code {self.process.returncode}):\n{self._said()[-2000:]}"

    def wait(self) -> None:
        """Until it has started.

        Raises:
            RuntimeError: it did not, or has ended since, with what Ray said.
        """
        deadline = time.monotonic() + START_SECONDS
        while (problem := self.problem()) or STARTED not in self._said():
            if problem:
                raise RuntimeError(problem)
            if time.monotonic() > deadline:
                raise RuntimeError(f"Ray did not start on this node within {START_SECONDS:g} s:\n{self._said()[-2000:]}")
            time.sleep(0.1)

    def close(self) -> None:
        """With its actors, which notice late that a Ray whose head is gone has ended."""
        family = descendants(self.process.pid)
        end_group(self.process, STOP_SECONDS)
        for process in psutil.wait_procs(family, timeout=ACTOR_SECONDS)[1]:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _said(self) -> str:
        return self.log.read_text(errors="replace")


def main() -> None:
    """Ray's own command line."""
    from ray.scripts.scripts import main as ray_main

    with without_unused_daemons():
        ray_main()


if __name__ == "__main__":
    main()
