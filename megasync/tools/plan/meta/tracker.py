"""Counts the bytes of storages that appear and go while code runs on meta tensors: the memory it would take on a device.

Sizes are rounded up as torch's caching allocator does. Collectives return at once (stand_ins.py replaces all else that meta
tensors cannot run). Leaves out fragmentation, workspaces of libraries and the memory of other processes.

    tracker = Tracker()
    with tracker:
        run()
    tracker.peak_bytes
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

ROUNDED_TO = 512  # bytes: c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode for one thread. `bytes_now` and `peak_bytes` exclude storages passed to `leave_out`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes_now = self.peak_bytes = 0
        self._sizes: dict[int, int] = {}  # by the storage's address, which is unique while it lives
        self._ends: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._is_paused = False

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Storages that are counted elsewhere, such as weights."""
        for tensor in tensors:
            self._add(tensor.untyped_storage(), 0)

    def restart_peak(self) -> int:
        """Returns the peak since the last call, and begins a new one."""
        peak, self.peak_bytes = self.peak_bytes, self.bytes_now
        return peak

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = _collective(function, args) if function.namespace == "c10d" else function(*args, **(kwargs or {}))
        if not self._is_paused:
            self._add_all(result)
        return result

    def opaque(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as one kernel: its results count, its intermediate tensors do not."""
        plain = inspect.unwrap(function)  # the uncompiled function: see stand_ins.py:installed

        def run(*args: Any, **kwargs: Any) -> Any:
            was_paused, self._is_paused = self._is_paused, True
            try:
                result = plain(*args, **kwargs)
            finally:
                self._is_paused = was_paused
            if not was_paused:
                self._add_all(result)
            return result

        return run

    @contextmanager
    def counting_resizes(self) -> Iterator[None]:
        """Within the block storages that are resized, as selective recompute does, are counted by their new size."""
        real = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            key = storage._cdata
            if self._sizes.get(key):
                self._grow(_rounded(size) - self._sizes[key])
                self._sizes[key] = _rounded(size) or ROUNDED_TO
            return real(storage, size)

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = real  # type: ignore[method-assign]

    def _add_all(self, results: Any) -> None:
        for tensor in tree_iter(results):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._add(storage, _rounded(storage.nbytes()))

    def _add(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key in self._sizes:
            return

        def gone(_: Any) -> None:
            self._grow(-self._sizes.pop(key))
            del self._ends[key]

        self._sizes[key], self._ends[key] = size, weakref.ref(storage, gone)
        self._grow(size)

    def _grow(self, size: int) -> None:
        self.bytes_now += size
        self.peak_bytes = max(self.peak_bytes, self.bytes_now)


def _rounded(size: int) -> int:
    return -(-size // ROUNDED_TO) * ROUNDED_TO


def _collective(function: Any, args: Any) -> Any:
    """The results of c10d's operators without a peer: the output tensors, and a finished work handle."""
    from torch._C._distributed_c10d import FakeWork

    work = FakeWork().boxed()
    return (args[0], work) if len(function._schema.returns) > 1 else work
