"""Moves parameters, gradients and optimizer state out of device memory between steps, and back, to share the device.

A storage is copied into page-locked host memory and shrunk to nothing; every tensor that is a view of it, in DDP's buffers, in
Megatron-FSDP's and in the optimizer, keeps its identity and is whole again after `reload`. Gradients are not copied: a step
begins by setting them to zero. Without CUDA the same is done with ordinary host memory. Not collective; every rank does it.

    offload = Offload(engine)
    offload.offload(("gradients", "optimizer"))   # vLLM generates
    offload.reload()                              # before the engine or an export is used again

With `optimizer.offload` the engine itself does it around each optimizer step (`state_on_device`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from engine.runtime import device
from engine.config import OFFLOAD_KINDS
from engine.teacher import Teacher
from engine.wrap.optimizer import inner_optimizers
from engine.wrap.table import FrozenModel, WrappedModel

STATE = ("optimizer",)
CHUNK_BYTES = 2**28  # torch rounds page-locked memory up to a power of two


class HasState(Protocol):
    """An Engine, as far as it is looked at here."""

    wrapped: WrappedModel
    optimizer: Any

    @property
    def reference(self) -> WrappedModel | FrozenModel | None: ...

    @property
    def teacher(self) -> Teacher | None: ...


class Offload:
    """The tensors moved off the device, and their host memory, which is reused."""

    def __init__(self, engine: HasState) -> None:
        self.engine = engine
        self.chunks: list[torch.Tensor] = []  # uint8 [CHUNK_BYTES] each
        self.away: dict[str, list[torch.UntypedStorage]] = {}  # by kind
        self._sizes: dict[int, int] = {}  # bytes of each storage that is away, by its identity
        self._places: dict[tuple[int, int], int] = {}  # where in host memory the copy of a storage, of that size, lies
        self._host_bytes = 0

    def offload(self, kinds: Sequence[str] = OFFLOAD_KINDS, *, for_others: bool = True) -> int:
        """Move these kinds off the device; returns the bytes that were freed, including those `for_others`."""
        assert set(kinds) <= set(OFFLOAD_KINDS), kinds
        device.synchronize()  # other streams may still use the storages that shrink here
        if "gradients" in kinds and "gradients" not in self.away:
            self.engine.optimizer.zero_grad()
        moving = self._on_device(kinds)
        for storages in moving.values():
            self._sizes |= {storage._cdata: storage.nbytes() for storage in storages}
        self._copy(moving, to_host=True)
        device.synchronize()
        for kind, storages in moving.items():
            for storage in storages:
                storage.resize_(0)
            self.away[kind] = self.away.get(kind, []) + storages
        if device.has_cuda() and for_others:
            torch.cuda.empty_cache()
        return sum(self._sizes[storage._cdata] for storages in moving.values() for storage in storages)

    def reload(self, kinds: Sequence[str] = OFFLOAD_KINDS) -> None:
        """Move these kinds back to the device; gradients are zero."""
        coming = {kind: self.away.pop(kind) for kind in kinds if kind in self.away}
        for kind, storages in coming.items():
            for storage in storages:
                storage.resize_(self._sizes[storage._cdata])
                if kind == "gradients":
                    _bytes(storage).zero_()
        self._copy(coming, to_host=False)
        device.synchronize()

    def _on_device(self, kinds: Sequence[str]) -> dict[str, list[torch.UntypedStorage]]:
        """Tensors by kind, each once: one of two kinds, such as fp32 weights that the optimizer steps, counts as the first.

        Without what cannot be resized: memory that is mapped from a checkpoint's file, on CPUs.
        """
        seen = {storage._cdata for storages in self.away.values() for storage in storages}
        found: dict[str, list[torch.UntypedStorage]] = {}
        for kind in OFFLOAD_KINDS:
            for storage in storages(self.engine, kind):
                if storage._cdata not in seen and storage.nbytes() and storage.resizable():
                    seen.add(storage._cdata)
                    found.setdefault(kind, []).append(storage)
        return {kind: storages for kind, storages in found.items() if kind in kinds}

    def _copy(self, storages: dict[str, list[torch.UntypedStorage]], to_host: bool) -> None:
        """All but gradients."""
        for storage in (storage for kind, some in storages.items() if kind != "gradients" for storage in some):
            begin, whole = 0, _bytes(storage)
            for piece in self._host(storage, whole.numel()):
                part = whole[begin : begin + piece.numel()]
                target, source = (piece, part) if to_host else (part, piece)
                target.copy_(source, non_blocking=True)
                begin += piece.numel()

    def _host(self, storage: torch.UntypedStorage, size: int) -> Iterator[torch.Tensor]:
        """The storage's own host memory, `size` bytes of it, in pieces."""
        key = storage._cdata, size  # a storage that is gone may leave its address to another one
        if key not in self._places:
            self._places[key] = self._host_bytes
            self._host_bytes += size
        place = self._places[key]
        end = place + size
        while place < end:
            number, offset = divmod(place, CHUNK_BYTES)
            while len(self.chunks) <= number:
                self.chunks.append(torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=device.has_cuda()))
            length = min(CHUNK_BYTES - offset, end - place)
            yield self.chunks[number][offset : offset + length]
            place += length


class HostState:
    """The optimizer's state and main weights, in host memory but within `on_device`."""

    def __init__(self, engine: HasState) -> None:
        self._offload = Offload(engine)
        self._offload.offload(STATE, for_others=False)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        self._offload.reload(STATE)
        try:
            yield
        finally:
            self._offload.offload(STATE, for_others=False)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of the storage, uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def storages(engine: HasState, kind: str) -> Iterator[torch.UntypedStorage]:
    """The tensors of one of OFFLOAD_KINDS; some more than once."""
    gradients = engine.wrapped.gradients()
    tensors = {"parameters": _parameters(engine), "gradients": gradients, "optimizer": _optimizer(engine)}[kind]
    return (getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors)


def _parameters(engine: HasState) -> Iterator[torch.Tensor]:
    yield from engine.wrapped.parameters()
    if engine.reference is not None:
        yield from engine.reference.parameters()
    if engine.teacher is not None:
        yield from engine.teacher.parameters()


def _optimizer(engine: HasState) -> Iterator[torch.Tensor]:
    yield from engine.wrapped.main_weights()
    for inner in inner_optimizers(engine.optimizer):
        for group in inner.param_groups:
            yield from (parameter.data for parameter in group["params"])
        for state in inner.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value) and value.dim())
