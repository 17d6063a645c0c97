"""Nodes on one machine: namespaces of network, processes, mounts and host name on a bridge, for tests that are root.

Each has its own address, loopback, /dev/shm and TMPDIR; the rest of the file system is shared. Leaves out what runs in them.

    with nodes(2) as (first, second):
        process = first.start([sys.executable, "-m", "..."])
        second.kill()      # all of its processes at once
        second.revive()
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PREFIX = os.environ.get("MEGASYNC_TEST_NODES", f"msn{os.getpid() % 10000}")
SUBNET = os.environ.get("MEGASYNC_TEST_SUBNET", "10.81.0")
TOOLS = ("ip", "unshare", "nsenter")
TEMPORARY = "/mnt"  # TMPDIR within a node: as short as sockets need it, else what runs there takes /tmp, which is everybody's


def why_not() -> str:
    """Why there can be no nodes here; empty where there can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        return f"nodes are namespaces: needs root and {', '.join(missing or TOOLS)}"
    name = f"{PREFIX}try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"nodes are namespaces, which this machine does not allow: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return ""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


class Node:
    """One of them. `rate` such as 400mbit limits its link, each way. `temporary`: what its TMPDIR holds, seen from outside."""

    def __init__(self, number: int, temporary: Path, rate: str = "") -> None:
        self.number, self.name, self.address = number, f"{PREFIX}n{number}", f"{SUBNET}.{number}"
        self.link, self.temporary = f"{PREFIX}v{number}", temporary / f"n{number}"
        self.temporary.mkdir(parents=True, exist_ok=True)
        ip("netns", "add", self.name)
        ip("link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("link", "set", self.link, "master", f"{PREFIX}br", "up")
        ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for interface in ("eth0", "lo"):
            ip("-n", self.name, "link", "set", interface, "up")
        for side in (["-n", self.name, "qdisc", "add", "dev", "eth0"], ["qdisc", "add", "dev", self.link]) if rate else ():
            subprocess.run(["tc", *side, "root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms"], check=True)
        self.revive()

    def revive(self) -> None:
        """A first process that holds the namespaces, as after a boot."""
        for path in self.temporary.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        mounts = f"mount -t tmpfs -o size=2g tmpfs /dev/shm; mount --bind {self.temporary} {TEMPORARY}"
        inner = f"hostname {self.name}; {mounts}; echo up; exec sleep infinity"
        spaces = ["--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child"]
        command = ["ip", "netns", "exec", self.name, "unshare", *spaces, "sh", "-c", inner]
        self.keeper = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self.keeper.stdout is not None
        assert self.keeper.stdout.readline() == b"up\n"
        children = Path(f"/proc/{self.keeper.pid}/task/{self.keeper.pid}/children").read_text().split()
        self.init = int(children[0])

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        enter = ["nsenter", "-t", str(self.init), "-n", "-m", "-u", "-i", "-p", f"--wd={folder or Path.cwd()}"]
        own = {**environment, "TMPDIR": TEMPORARY}
        return subprocess.Popen([*enter, *command], env=own, text=True, **options)

    def processes(self) -> list[str]:
        """Of this node, without its first, which waits for nobody: who has ended as its child stays a zombie."""
        command = ["nsenter", "-t", str(self.init), "-p", "-m", "ps", "-eo", "stat,pid,args", "--no-headers"]
        reported = subprocess.run(command, capture_output=True, text=True, check=True)
        alive = [line.split(maxsplit=1)[1] for line in reported.stdout.splitlines() if not line.startswith("Z")]
        return [line for line in alive if "sleep infinity" not in line and "ps -eo" not in line]

    def kill(self) -> None:
        """As a power cut; the kernel still answers for it."""
        os.kill(self.init, 9)
        self.keeper.wait()
        if self.keeper.stdout is not None:
            self.keeper.stdout.close()

    def cut(self) -> None:
        ip("link", "set", self.link, "down")

    def mend(self) -> None:
        ip("link", "set", self.link, "up")

    def close(self) -> None:
        if self.keeper.poll() is None:
            self.kill()
        subprocess.run(["ip", "netns", "del", self.name], check=False)
        with suppress(OSError):
            shutil.rmtree(self.temporary)


@contextmanager
def nodes(count: int, temporary: Path, rate: str = "") -> Iterator[list[Node]]:
    """`temporary`: holds what is in the nodes' TMPDIR."""
    ip("link", "add", f"{PREFIX}br", "type", "bridge")
    ip("link", "set", f"{PREFIX}br", "up")
    made: list[Node] = []
    try:
        made.extend(Node(number, temporary, rate) for number in range(1, count + 1))
        time.sleep(0.5)  # until the bridge forwards
        yield made
    finally:
        for node in made:
            node.close()
        subprocess.run(["ip", "link", "del", f"{PREFIX}br"], check=False)
