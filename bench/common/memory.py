"""How much memory processes take while something runs, as Linux or torch counts it. Leaves out what runs (worker.py).

A process's peak is VmHWM of /proc/PID/status, which 5 written to /proc/PID/clear_refs sets back to the present resident memory
(man 5 proc). It counts RssAnon (heap), RssFile (mapped files, a cache that the kernel may take back) and RssShmem
(shared memory, in every process that touched it). Shared memory that stays mapped from one measurement to the next
would not show as growth, so its resident part is added: `kept` is its path.

    meter = PeakMeter({"worker": pid}, kept="/dev/shm/megasync-1234-0")
    meter.start()
    ...
    meter.extra_bytes()["worker"]
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import psutil


def status_bytes(pid: int) -> dict[str, int]:
    """The sizes in /proc/PID/status, in bytes: VmRSS, VmHWM, RssAnon, RssFile, RssShmem and more."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


def mapped_bytes(pid: int, path: str) -> int:
    """Resident bytes of a mapped file in a process; the file may have been unlinked."""
    return sum(mapping.rss for mapping in psutil.Process(pid).memory_maps() if mapping.path == path)


def mapped_files(prefix: str) -> set[str]:
    """The files that this process has mapped whose paths begin with `prefix`, unlinked ones too."""
    return {mapping.path for mapping in psutil.Process().memory_maps() if mapping.path.startswith(prefix)}


def restart_host_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def give_back_free_memory() -> None:
    """Let malloc return what was freed, or a peak would hide in memory that some earlier work had left resident."""
    ctypes.CDLL(None).malloc_trim(0)


def device_bytes(*, begin: bool) -> int:
    """`begin`: reset torch's peak on this process's GPU and return the allocated bytes; else return the peak in bytes."""
    import torch

    if not begin:
        return torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


class PeakMeter:
    """Peaks of several processes, by name, over what each had resident at `start`."""

    def __init__(self, pids: dict[str, int], kept: str) -> None:
        self._pids, self._kept = pids, kept
        self._before: dict[str, int] = {}

    def start(self) -> None:
        for name, pid in self._pids.items():
            restart_host_peak(pid)
            self._before[name] = status_bytes(pid)["VmRSS"] - mapped_bytes(pid, self._kept)

    def extra_bytes(self) -> dict[str, int]:
        """Never below 0, though a process may well have shrunk."""
        return {name: max(0, status_bytes(pid)["VmHWM"] - self._before[name]) for name, pid in self._pids.items()}
