"""Processes, temporary files and shared memory of a run end with it. On one machine its sockets listen on
the loopback alone.

The two launchers (torchrun.py, submit.py) run within `run_scope`. Linux only.

    with run_scope():
        ...  # start ranks, Ray and vLLM, in any way
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from bridge.processes import MEMORY_FOLDER, RAY_PATH, cuda_memory, descendants, shared_memory_below, socket_folder, watched
from megasync.config.errors import ConfigError, refuse_if
from megasync.config.own_packages import hidden, rename
from megasync.config.schema import Config
from megasync.launch.connect import connection_problem
from megasync.launch.processes import ENDING, adopt_orphans

WATCH_SECONDS = 0.3
# What a process that was killed cannot do: its pipe ends, its ranks end (processes.py:ORPHAN_SECONDS), and then its folder goes.
SWEEP = 'read -r _; sleep 20; rm -rf "$0"'
END_SECONDS = 10.0  # for helper processes to notice that their clients are gone
LOOPBACK = "127.0.0.1"
LAST_PORT = 2**16 - 1
RAY_ADDRESS, HOSTS = "MEGASYNC_RAY_ADDRESS", "MEGASYNC_HOSTS"  # set by launchers of several nodes for the ranks
FOR_CLUSTER = "MEGASYNC_CHECKS_FOR_CLUSTER"  # set by `submit --address` for its check: packages are looked for on the nodes
CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")  # noqa: S108 # of the last `ray start` (ray 2.60.0 _private/utils.py)
OWN_RAY = re.compile(r"--temp_dir=\S*/ray-[a-z0-9_]{8}(?=\s|$)")
ON_LOOPBACK = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": LOOPBACK,
    # Ray takes the loopback's address for its own, on which all of its processes then listen, only without clusters
    # (ray 2.60, _private/services.py:815). Read when ray is imported.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


def ray_address(config: Config) -> str:
    """Address of the replicas' Ray: the launcher's where it has started one for all nodes, else the config's."""
    return os.environ.get(RAY_ADDRESS, config.rollout.ray_address)


def unreachable(address: str) -> str:
    """Why a connection to HOST:PORT or ray://HOST:PORT fails; empty where it does not, and for `local` and `auto`."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    if not port.isdigit():
        return "" if address in ("auto", "local") else "HOST:PORT is expected"
    return connection_problem(host.strip("[]"), int(port))


def check_ray(config: Config) -> None:
    """ConfigError where nobody listens at the address of the config, or `auto` finds none: Ray itself would try for minutes."""
    address = config.rollout.ray_address
    is_within_ray = "ray" in sys.modules and sys.modules["ray"].is_initialized()  # this process is one of Ray's
    if config.algorithm.name != "grpo" or RAY_ADDRESS in os.environ or is_within_ray:
        return
    files = hidden(Path.cwd()) if address != "local" else []  # its workers look into this folder first
    message = f"rollout.ray_address = {address}: the replicas would import {', '.join(files)} of this folder for packages of ours"
    refuse_if(files, message, remedy=rename(files))
    problem = unreachable(address) if address != "auto" else why_no_ray()
    if problem:
        remedy = "start that Ray (ray start --head), correct the address, or write rollout.ray_address=local"
        raise ConfigError(f"rollout.ray_address = {address}: {problem}", choices="local, auto, HOST:PORT", remedy=remedy)


def why_no_ray() -> str:
    """Why ray_address=auto finds no Ray; empty where it does. By itself Ray takes that of another run, which lets nobody in."""
    given = os.environ.get("RAY_ADDRESS", "")
    if not given and CURRENT_CLUSTER.is_file():
        given = CURRENT_CLUSTER.read_text(encoding="utf-8").strip()
    if given not in ("", "auto"):
        problem = unreachable(given)
        return f"{given}: {problem}" if problem else ""
    commands = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
    raylets = [command for command in commands if command.partition(" ")[0].endswith("/raylet")]
    if not raylets:
        return "no Ray runs here"
    return "the Ray that runs here is of another run, and for that alone" if all(map(is_of_run, raylets)) else ""


def is_of_run(raylet: str) -> bool:
    """Whether a raylet, by its command, is of a Ray that a run has started for itself (ray_cluster.py)."""
    return OWN_RAY.search(raylet) is not None


def is_one_machine(config: Config) -> bool:
    """Whether all trainer ranks and replicas are on this machine, by this rank's environment."""
    is_one_node = os.environ.get("GROUP_WORLD_SIZE") == "1"  # torchrun's
    is_local = os.environ.get("MASTER_ADDR", LOOPBACK) in (LOOPBACK, "localhost", "::1")
    is_one_host = int(os.environ.get(HOSTS, "1")) == 1
    return ray_address(config) == "local" and is_one_host and (is_one_node or is_local)


def listen_on_loopback() -> None:
    """Sockets of this process and its children listen on the loopback; variables that the user has set stay."""
    for name, value in ON_LOOPBACK.items():
        os.environ.setdefault(name, value)


@contextmanager
def run_scope() -> Iterator[None]:
    """A folder for temporary files, TMPDIR, for this process and its descendants; with the block's end all of them are gone.

    Descendants whose parents are gone become children of this process, so that none is lost.
    """
    folder = tempfile.mkdtemp(prefix="ms-", dir=socket_folder(RAY_PATH + len("/ms-12345678")))
    adopt_orphans()
    sweeper = subprocess.Popen(["/bin/sh", "-c", SWEEP, folder], stdin=subprocess.PIPE, start_new_session=True)
    with kernel_cache(), environment({"TMPDIR": folder}), watched_descendants() as (segments, family):
        tempfile.tempdir = None
        try:
            yield
        finally:
            tempfile.tempdir = None
            for kind in ENDING:
                signal.signal(kind, signal.SIG_IGN)
            end_descendants(segments, family, sweeper.pid)
            shutil.rmtree(folder, ignore_errors=True)
            sweeper.kill()  # last: this process may be killed while it ends the others
            sweeper.wait()


@contextmanager
def kernel_cache() -> Iterator[None]:
    """torch's cache of compiled kernels stays where it is, also where TMPDIR changes. An empty one is removed at the end: torch
    makes it where nothing is compiled, too.
    """
    kernels = os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
    try:
        yield
    finally:
        with suppress(OSError):
            Path(kernels).rmdir()


@contextmanager
def watched_descendants() -> Iterator[tuple[set[str], set[int]]]:
    """The segments in /dev/shm that descendants have mapped so far, and their ids: a killed one cannot be asked."""
    segments: set[str] = set()
    family: set[int] = set()

    def watch(over: threading.Event) -> None:
        known: set[str] = set()
        last: set[str] = set()
        while not over.wait(WATCH_SECONDS):
            names = set(os.listdir(MEMORY_FOLDER))  # noqa: PTH208 # what takes microseconds
            if names != known:
                segments.update(shared_memory_below(os.getpid()))
                family.update(child.pid for child in descendants(os.getpid()))
            known = names if names == last else known  # a new file may be mapped a moment later: it is looked for twice
            last = names

    with watched(watch, "watch-descendants"):
        yield segments, family


def end_descendants(segments: set[str], family: set[int], spared: int) -> None:
    """Wait until all descendants but `spared` have ended, kill the others, and remove what they and `family` had in
    /dev/shm.
    """
    children = _children(spared)
    segments, family = segments | shared_memory_below(os.getpid()), family | {child.pid for child in children}
    _, alive = psutil.wait_procs(children, timeout=END_SECONDS)
    while alive:
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=END_SECONDS)
        alive = [each for each in _children(spared) if each not in alive]
    for path in segments | cuda_memory(family):
        Path(path).unlink(missing_ok=True)


def _children(spared: int) -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if each.pid != spared]


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """These environment variables within the block."""
    former = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
