"""vLLM's processes: they end with their replica, and their files in /dev/shm and their sockets are removed.

Where those lie is `socket_folder`, which is for Ray's too.

Any process or thread may be gone between two looks at it. Linux only.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108
SHARED_MEMORY = ("psm_*", "*-cpushm_*", "sem.mp-*")  # message queues; sums between CPU workers; locks
LONGEST_PATH = 107  # of a socket (man 7 unix)
RAY_PATH, VLLM_PATH = 84, 68  # how much longer than their folder's the paths of Ray's and of vLLM's sockets get
# Of trainer ranks and replicas on CPUs. Large tensors come from the kernel, in huge pages where it has them, and go back to it:
# a step, or a reload of weights, takes and frees many of them between ones that stay, and glibc's own heap gets full of holes.
MALLOC, MALLOC_ON_CPU = "GLIBC_TUNABLES", f"glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold={4 * 2**20}"
NO_SUCH_PROCESS = (FileNotFoundError, ProcessLookupError)  # what looking at a process in /proc raises when there is none


def host_identity() -> str:
    """Name and unique identity of this host or container: processes of one host can share memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"


def die_with(pid: int) -> None:
    """Kill this process when `pid` ends. The engine core itself does not notice when its client was killed.

    The shared memory between core and workers goes first: nobody else would remove it.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)

    def wait() -> None:
        select.select([descriptor], [], [])
        for path in _shared_memory(os.getpid()) | cuda_memory([os.getpid()]):
            Path(path).unlink(missing_ok=True)
        remove_sockets(pid)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="die-with-replica", daemon=True).start()


@contextmanager
def watched(watch: Callable[[threading.Event], None], name: str) -> Iterator[None]:
    """Runs `watch` in a thread called `name` during the block. It returns soon after its event is set, at the block's end."""
    over = threading.Event()
    thread = threading.Thread(target=watch, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def socket_folder(added: int = VLLM_PATH) -> str:
    """The folder for temporary files, or /tmp where TMPDIR is too long for sockets whose paths are `added` longer."""
    folder = tempfile.gettempdir()
    return folder if len(folder) + added <= LONGEST_PATH else "/tmp"  # noqa: S108


def make_sockets() -> str:
    """A folder for the sockets of this process and its children."""
    return tempfile.mkdtemp(prefix=f"megasync-vllm-{os.getpid()}-", dir=socket_folder())


def remove_sockets(pid: int) -> None:
    """The folder that `pid` made, if it is still there. A socket outlives a process that was killed."""
    for folder in Path(socket_folder()).glob(f"megasync-vllm-{pid}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def shared_memory_below(pid: int) -> set[str]:
    """The segments in /dev/shm that vLLM's processes, `pid` and its descendants, have mapped now; none where `pid` is gone."""
    found: set[str] = set()
    for process in (pid, *(child.pid for child in descendants(pid))):
        with suppress(*NO_SUCH_PROCESS):
            found |= _shared_memory(process)
    return found


def cuda_memory(pids: Iterable[int]) -> set[str]:
    """The files of CUDA and torch in /dev/shm for these processes when they share GPU memory.

    It outlives a process that was killed, or left by `os._exit`: CUDA's (driver 580), and torch's counts of who has the memory
    mapped (NewProcessWideShmHandle in ATen's MapAllocator.cpp names them; torch 2.11).
    """
    patterns = (pattern for pid in pids for pattern in (f"cuda.shm.*.{pid:x}.*", f"torch_{pid}_*"))
    return {str(path) for pattern in patterns for path in MEMORY_FOLDER.glob(pattern)}


def end_descendants(pid: int) -> None:
    """Kill all descendants of a process, Python's resource tracker aside, which cleans up after them."""
    for child in descendants(pid):
        with suppress(psutil.NoSuchProcess):
            if not any("resource_tracker" in word for word in child.cmdline()):
                child.kill()


def descendants(pid: int) -> list[psutil.Process]:
    """Descendants of all generations; none where `pid` has ended."""
    try:
        found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return found


def is_alive(pid: int) -> bool:
    """Neither gone nor a zombie, which its parent may be slow to take note of."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def lower_priority(pid: int, niceness: int) -> None:
    """Raise the niceness of a process and its descendants, thread by thread as Linux has it; new threads inherit it."""
    for each in (pid, *(child.pid for child in descendants(pid))):
        for thread in Path(f"/proc/{each}/task").glob("*"):
            with suppress(*NO_SUCH_PROCESS):
                number = int(thread.name)
                os.setpriority(os.PRIO_PROCESS, number, max(niceness, os.getpriority(os.PRIO_PROCESS, number)))


def _shared_memory(pid: int) -> set[str]:
    """By inode: a lock is mapped under another name by the process that made it (glibc's sem_open)."""
    lines = (line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    mapped = {int(words[4]) for words in lines if len(words) == 6 and words[5].startswith(f"{MEMORY_FOLDER}/")}
    found = set()
    for pattern in SHARED_MEMORY if mapped else ():
        for path in MEMORY_FOLDER.glob(pattern):
            with suppress(*NO_SUCH_PROCESS):
                if path.stat().st_ino in mapped:
                    found.add(str(path))
    return found
