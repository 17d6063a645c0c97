"""A stand-in for the module `torch` in megatron-core, megatron-fsdp and mbridge on machines without CUDA.

megatron-core names the device "cuda" in some fifty places (rotary embedding, schedules, optimizer, FSDP buffers). An import
hook gives the modules of those three packages, and no others, a module in which those names mean the CPU. torch itself stays as
it is, so that `with torch.device("meta")` and with it transformers' `from_pretrained` keep working in the same process. Methods
of Tensor are replaced only where the call would have raised without CUDA.

Leaves out what has nothing to do with the device: see workarounds.py. megatron.py installs it before the first import.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
import torch.distributed
from torch.distributed.distributed_c10d import _coalescing_manager

from engine.runtime import gloo
from engine.runtime.device import CPU, compiled_late, has_cuda

PACKAGES = ("megatron.", "megatron_fsdp", "mbridge")
_installed = False
FACTORIES = (
    *("tensor", "as_tensor", "zeros", "ones", "empty", "full", "rand", "randn", "randint", "arange", "linspace", "eye"),
    *("empty_strided", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
)
TENSOR_FACTORIES = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")


class _Idle:
    """Replaces a stream or an event: CPU work is synchronous, so either is only a name."""

    device = CPU
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Idle()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


class _StandIn(types.ModuleType):
    """A module that answers with `replaced` first and with the real module for everything else."""

    def __init__(self, real: types.ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__dict__["_real"] = real
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _names_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return type(device) is int or (isinstance(device, str) and device.startswith("cuda"))


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapped


class _Done:
    """The handle of a finished collective."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _synchronous(collective: Callable[..., Any], instead: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """The collective, or what stands in for it, without asynchrony: with `async_op` it returns a handle that is done."""

    @functools.wraps(collective)
    def wrapped(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        (instead or collective)(*args, **kwargs)
        return _Done() if async_op else None

    return wrapped


@contextlib.contextmanager
def _not_coalescing(*_: Any, **__: Any) -> Iterator[_Done]:
    """Replaces torch.distributed._coalescing_manager.

    ProcessGroupGloo's AsyncAllgatherCoalescedWork (torch 2.13.0) corrupts the heap: Megatron-FSDP on two ranks dies in malloc
    in about one of four runs of 60 steps. So nothing is coalesced on gloo.
    """
    yield _Done()


def _all_gather(tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any = None) -> None:
    """gloo gathers equal shapes only; others are broadcast, one after another."""
    if len({each.shape for each in tensors}) == 1:
        torch.distributed.all_gather(tensors, tensor, group=group)
        return
    tensors[torch.distributed.get_rank(group)].copy_(tensor)
    for rank, each in enumerate(tensors):
        torch.distributed.broadcast(each, group=group, group_src=rank)


def _reduce_scatter(output: torch.Tensor, tensors: list[torch.Tensor], group: Any = None) -> None:
    """gloo scatters equal shapes only: of the sum of all, each rank takes its own."""
    whole = torch.cat(tensors)
    torch.distributed.all_reduce(whole, group=group)
    output.copy_(torch.split(whole, [len(each) for each in tensors])[torch.distributed.get_rank(group)])


COLLECTIVES: dict[str, Any] = {
    name: _synchronous(getattr(torch.distributed, name)) for name in ("all_reduce", "all_gather_into_tensor", "broadcast")
}
COLLECTIVES["reduce_scatter_tensor"] = _synchronous(torch.distributed.reduce_scatter_tensor, gloo.reduce_scatter_tensor)
COLLECTIVES["all_gather"] = _synchronous(torch.distributed.all_gather, _all_gather)
COLLECTIVES["reduce_scatter"] = _synchronous(torch.distributed.reduce_scatter, _reduce_scatter)


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    """Replaces the CUDA generator's state by the CPU generator's."""
    return torch.get_rng_state()


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Replaces moe_utils.py:maybe_move_tensor_to_cpu, which leaves CPU tensors as tensors; sizes are needed as numbers."""
    del record_stream
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _torch_stand_in() -> types.ModuleType:
    stream = _Idle()
    cuda = _StandIn(
        torch.cuda,
        {
            # an int, not a device: megatron_fsdp.py formats f"cuda:{torch.cuda.current_device()}"
            "current_device": _constant(0),
            **dict.fromkeys(("synchronize", "empty_cache", "set_device"), _constant(None)),
            **dict.fromkeys(("Stream", "Event"), _Idle),
            **dict.fromkeys(("current_stream", "default_stream"), _constant(stream)),
            "stream": lambda _: contextlib.nullcontext(),
            "get_rng_state": get_rng_state,
            "set_rng_state": set_rng_state,
            "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
        },
    )
    distributed = _StandIn(torch.distributed, {**COLLECTIVES, "_coalescing_manager": _not_coalescing})
    factories = {name: _on_cpu(getattr(torch, name)) for name in FACTORIES}
    return _StandIn(torch, {"cuda": cuda, "distributed": distributed, "compile": compiled_late, **factories})


class _CpuDeviceMesh:
    """Replaces DeviceMesh in mcore_fsdp_adapter.py:184-274, which requests device type "cuda"."""

    @staticmethod
    def from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(group, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)


def _adapt(module: types.ModuleType, stand_in: types.ModuleType) -> None:
    names = module.__dict__
    if names.get("torch") is torch:
        names["torch"] = stand_in
    for name, value in list(names.items()):
        if value is torch.distributed:
            names[name] = stand_in.distributed
        elif value is _coalescing_manager:
            names[name] = _not_coalescing
        elif getattr(value, "__module__", "") == "torch.distributed.distributed_c10d":
            names[name] = next((c for c in COLLECTIVES.values() if c.__wrapped__ is value), value)
    if module.__name__ == "megatron.core.distributed.fsdp.mcore_fsdp_adapter":
        names["DeviceMesh"] = _CpuDeviceMesh
    if module.__name__ == "megatron.core.tensor_parallel.random":  # :235-457 go through torch._C, silently queued
        names["_get_cuda_rng_state"] = get_rng_state
        names["_set_cuda_rng_state"] = set_rng_state
    if module.__name__ == "megatron.core.transformer.moe.token_dispatcher":
        names["maybe_move_tensor_to_cpu"] = _on_host


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, stand_in: types.ModuleType) -> None:
        self.stand_in = stand_in

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(PACKAGES):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None or isinstance(spec.loader, importlib.machinery.ExtensionFileLoader):
            return spec
        execute = spec.loader.exec_module

        def execute_and_adapt(module: types.ModuleType) -> None:
            execute(module)
            _adapt(module, self.stand_in)

        spec.loader.exec_module = execute_and_adapt  # type: ignore[method-assign] # of this module's own loader
        return spec


def _adapt_tensor_methods() -> None:
    tensor: Any = torch.Tensor
    for name in TENSOR_FACTORIES:
        setattr(tensor, name, _on_cpu(getattr(tensor, name)))
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, *args: None
    tensor.pin_memory = lambda self, *args: self
    real_to, real_type = tensor.to, tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and not isinstance(args[0], (torch.Tensor, torch.dtype)) and _names_cuda(args[0]):
            args = (CPU, *args[1:])
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return real_to(self, *args, **kwargs)

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # distrib_optimizer.py:361, optimizer.py:671 and clip_grads.py:167 compare with "torch.cuda.FloatTensor"
        result = real_type(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(result, str) and caller.startswith("megatron.core"):
            return "torch.cuda." + result.removeprefix("torch.")
        return result

    tensor.to, tensor.type = to, type_


def install() -> None:
    """Make the CPU answer for CUDA in megatron-core, megatron-fsdp and mbridge. Does nothing with CUDA or a second time.

    Raises:
        RuntimeError: one of those packages was imported before, and with it the real `torch`.
    """
    global _installed  # noqa: PLW0603
    if _installed or has_cuda():
        return
    early = sorted(name for name in sys.modules if name.startswith(PACKAGES) and name != "megatron.core.package_info")
    if early:
        raise RuntimeError(f"engine.runtime.fake_cuda.install() must come before the import of {early[0]}")
    sys.meta_path.insert(0, _Finder(_torch_stand_in()))
    _adapt_tensor_methods()
    _installed = True
