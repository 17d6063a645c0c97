"""This rank's memory: settings of torch's allocator, the return of malloc's free memory, and bytes in use. Leaves out offloading
(offload.py).
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from engine.runtime.device import has_cuda

P = ParamSpec("P")
T = TypeVar("T")
LIBC = ctypes.CDLL(None)
MALLINFO_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
MUCH_FREE_BYTES = 2**28  # in the heap; a step of a tiny model frees less, and allocating it again would make it a tenth slower
TRIM_THRESHOLD = "glibc.malloc.trim_threshold"
ENVIRONMENT = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch's own settings of its allocator


def enable_expandable_segments() -> None:
    """Let torch's caching allocator extend a segment in place of allocating another. No-op without a GPU, or with settings of the
    user's own.

    Packed batches differ in length, so each step asks for other sizes than the one before, and without it cached segments that
    fit none of them pile up until the GPU is full. Call before the first tensor is on the GPU. Other processes cannot map such
    memory by CUDA's IPC handles: memory that they map is allocated with the setting off (bridge/transport/ipc.py).
    """
    if has_cuda() and not any(os.environ.get(name) for name in ENVIRONMENT):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


class _Mallinfo2(ctypes.Structure):
    """The struct of mallinfo2(3), in glibc since 2.33."""

    _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO_FIELDS]


def return_free_memory() -> None:
    """Return the memory that freed tensors left in malloc's heap to the kernel, where it is much; no-op with a GPU, without
    glibc, and where the user's own GLIBC_TUNABLES configure it.

    Activations differ in size from step to step, so that holes between what lives on fit little of the next step's. malloc gives
    back by itself only memory that is free at the end of the heap (mallopt(3), M_TRIM_THRESHOLD).
    """
    if has_cuda() or not hasattr(LIBC, "mallinfo2") or TRIM_THRESHOLD in os.environ.get("GLIBC_TUNABLES", ""):
        return
    LIBC.mallinfo2.restype = _Mallinfo2
    if LIBC.mallinfo2().fordblks >= MUCH_FREE_BYTES:
        LIBC.malloc_trim(0)


def after_return(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, after `return_free_memory`: for what takes much memory at once."""

    @functools.wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> T:
        return_free_memory()
        return function(*given, **named)

    return call


def device_bytes() -> int:
    """Memory in use by all processes on this rank's GPU; 0 without one."""
    if not has_cuda():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def memory_metrics() -> dict[str, float]:
    """In bytes: host RSS, now and at most; device memory used by all processes, and in all; torch's now, and at most since the
    last call.
    """
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    resident, peak = (float(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    found = {"memory/host_bytes": resident, "memory/host_peak_bytes": peak}
    if has_cuda():
        found["memory/device_bytes"] = float(device_bytes())
        found["memory/device_total_bytes"] = float(torch.cuda.mem_get_info()[1])
        found["memory/tensors_bytes"] = float(torch.cuda.memory_allocated())
        found["memory/tensors_peak_bytes"] = float(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
    return found
