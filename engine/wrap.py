"""The wrap table: one YAML flag chooses megatron-core's DDP or Megatron-FSDP, and how whole parameters come out of each.

Leaves out the optimizer. Sources: megatron-core 0.16.1 distributed/, megatron-fsdp 0.6.1 megatron_fsdp.py.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from engine import device, upstream
from engine.config import EngineConfig
from engine.model import global_name, is_tied_copy
from engine.unshard import NamedTensors, Unsharder

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

_unsharders: WeakKeyDictionary[torch.nn.Module, dict[bool, Unsharder]] = WeakKeyDictionary()
# of each chunk's parameters; None for those that another stage exports
_global_names: WeakKeyDictionary[torch.nn.Module, dict[str, str | None]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Wrap:
    """One entry of the table: DDP-config fields, the wrapper, and the way to whole (tensor-parallel local) parameters."""

    fields: dict[str, Any]
    wrap: Callable[[Any, DistributedDataParallelConfig, torch.nn.Module], torch.nn.Module]
    units: Callable[[torch.nn.Module, bool], Iterator[NamedTensors]]


def _wrap_ddp(config: Any, ddp_config: DistributedDataParallelConfig, chunk: torch.nn.Module) -> torch.nn.Module:
    wrapped: torch.nn.Module = DistributedDataParallel(config, ddp_config, chunk)
    return wrapped


def _wrap_fsdp(config: Any, ddp_config: DistributedDataParallelConfig, chunk: torch.nn.Module) -> torch.nn.Module:
    upstream.use_standalone_fsdp()
    upstream.add_fsdp_fields(ddp_config)
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    wrapped: torch.nn.Module = FullyShardedDataParallel(config, ddp_config, chunk)
    return wrapped


def _unit_key(name: str) -> str:
    """Which transformer layer a parameter belongs to; what is outside of the layers stands alone."""
    head, marker, tail = name.partition("decoder.layers.")
    return head + marker + tail.split(".", 1)[0] if marker else name


def _ddp_units(wrapped: torch.nn.Module, only_trained: bool) -> Iterator[NamedTensors]:
    unit: NamedTensors = []
    key = None
    inner: Any = wrapped.module
    for name, parameter in inner.named_parameters():
        if only_trained and not parameter.requires_grad:
            continue
        if unit and _unit_key(name) != key:
            yield unit
            unit = []
        key = _unit_key(name)
        unit.append((name, parameter))
    if unit:
        yield unit


def _fsdp_units(wrapped: torch.nn.Module, only_trained: bool) -> Iterator[NamedTensors]:
    known = _unsharders.setdefault(wrapped, {})
    if only_trained not in known:
        known[only_trained] = Unsharder(wrapped, only_trained=only_trained)
    return iter(known[only_trained])


WRAPS: dict[str, Wrap] = {
    "ddp": Wrap({"use_distributed_optimizer": True, "grad_reduce_in_fp32": True}, _wrap_ddp, _ddp_units),
    "megatron_fsdp": Wrap(
        {
            "use_distributed_optimizer": True,
            "use_megatron_fsdp": True,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            "grad_reduce_in_fp32": True,
        },
        _wrap_fsdp,
        _fsdp_units,
    ),
}


def ddp_config(config: EngineConfig) -> DistributedDataParallelConfig:
    """The wrap's fields with `engine.overrides` laid over them.

    Raises:
        ValueError: an override is no field of DistributedDataParallelConfig, or has another type.
    """
    fields = {field.name: field for field in dataclasses.fields(DistributedDataParallelConfig)}
    for key, value in config.overrides.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"engine.overrides.{key}={value!r}: no field of megatron-core's DistributedDataParallelConfig{hint} "
                f"Fields: {', '.join(sorted(fields))}"
            )
    values = dict(WRAPS[config.wrap].fields)
    if device.has_cuda():
        values["overlap_grad_reduce"] = True
    else:
        values["gradient_reduce_div_fusion"] = False  # gloo has no ReduceOp.PREMUL_SUM
    return DistributedDataParallelConfig(**{**values, **config.overrides})


def wrap_chunks(config: EngineConfig, model_config: Any, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Wrap every model chunk. `model_config` is megatron-core's TransformerConfig."""
    entry = WRAPS[config.wrap]
    return [entry.wrap(model_config, ddp_config(config), chunk) for chunk in chunks]


def whole_parameters(
    config: EngineConfig, chunks: list[torch.nn.Module], only_trained: bool = False
) -> Iterator[NamedTensors]:
    """All parameters of this pipeline stage, unit by unit, as (global megatron name, tensor) in layer order.

    With `only_trained` those that are not frozen, and only they are gathered. An adapter is in its linear's unit.

    Tensors are whole over the data-parallel group and local to the tensor-parallel rank, in the model's dtype, with
    megatron-core's `tensor_model_parallel` and `partition_dim` attributes on them. They are valid until the next unit is
    asked for. Every rank must walk the whole of it.
    """
    for chunk in chunks:
        known = _global_names.setdefault(chunk, {})
        for unit in WRAPS[config.wrap].units(chunk, only_trained):
            for name, _ in unit:
                if name not in known:
                    known[name] = None if is_tied_copy(chunk, name) else global_name(chunk, name)
            named = [(known[name], tensor) for name, tensor in unit]
            if exported := [(name, tensor) for name, tensor in named if name is not None]:
                yield exported
