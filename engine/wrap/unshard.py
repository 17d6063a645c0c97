"""All-gathers Megatron-FSDP's sharded parameters, one FSDP unit (transformer layer) at a time, for an export.

Units are gathered into two scratch buffers in turn, each while the unit before it is in use. Tensors are most often at the same
address in every pass, so that a copy plan made for one is good for the next. Megatron-FSDP's own gather does the rest:
embeddings, final norm, and parameters that FSDP does not split evenly. Sources: megatron-fsdp 0.6.1 param_and_grad_buffer.py,
megatron_fsdp.py. Leaves out DDP (table.py) and names (items.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist

from engine.wrap.items import NamedTensors, layer_of

NUM_SCRATCH = 2
ALIGNMENT_BYTES = 512  # as CUDA's allocator


@dataclass
class _Unit:
    """An FSDP unit, or outside of the units one of the buckets, or a layer whose parameters each rank has whole."""

    buckets: list[int] = field(default_factory=list)  # Megatron-FSDP's: one of trained and one of frozen parameters
    tensors: NamedTensors = field(default_factory=list)  # unsharded
    gathers: list[tuple[torch.Tensor, Any]] = field(default_factory=list)  # (output, sharded buffer); empty: upstream gathers


class Unsharder:
    """Iterates over the units of one wrapped chunk in the order of its parameters.

    Training continues as if there had been no pass. The scratch buffers have no memory between passes.
    """

    def __init__(self, wrapped: torch.nn.Module, *, only_trained: bool) -> None:
        """`only_trained`: leave out frozen parameters, without gathering them."""
        self._fsdp = cast("Any", wrapped.module)
        self._buffer: Any = self._fsdp.param_and_grad_buffer
        units: dict[tuple[str, int | str], _Unit] = {}
        # modules have these unsharded parameters while they compute (megatron_fsdp.py:403), and may have DTensors now
        for name, parameter in self._fsdp.raw_param.items():
            if parameter.requires_grad or not only_trained:
                bucket = self._buffer.param_to_param_group[parameter]
                unit = units.setdefault(self._key(name, bucket), _Unit())
                unit.tensors.append((name, parameter))
                unit.buckets += [bucket] if bucket not in unit.buckets else []
        self._units = list(units.values())
        own = [unit for (kind, _), unit in units.items() if kind == "unit" and all(map(self._is_plain, unit.buckets))]
        self._sizes = [max(map(self._num_bytes, own[first::NUM_SCRATCH]), default=0) for first in range(NUM_SCRATCH)]
        self._scratch = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in self._sizes]
        for index, unit in enumerate(own):
            self._place(unit, self._scratch[index % NUM_SCRATCH])
        self._own = own
        self._free()

    def _key(self, name: str, bucket: int) -> tuple[str, int | str]:
        """The group that a parameter is gathered with: a layer's frozen weights always together with their adapters."""
        group = self._buffer.parameter_groups[bucket]
        if group.fsdp_unit_id is not None:
            return "unit", group.fsdp_unit_id
        weights = group.model_weight_buffer
        return ("bucket", bucket) if weights is not None and weights.is_data_distributed else ("layer", layer_of(name))

    def __iter__(self) -> Iterator[NamedTensors]:
        """Collective over data-parallel ranks, to the end. Tensors are valid until the next unit is requested.

        A gather is ordered after everything queued on the stream before it, so that no buffer is overwritten while it is read.
        """
        self._fsdp.synchronize_param_gather()
        for memory, size in zip(self._scratch, self._sizes, strict=True):
            memory.untyped_storage().resize_(size)
        pending: list[Any] = []
        upcoming = iter(self._own)
        try:
            pending = self._start(next(upcoming, None))
            for unit in self._units:
                if unit.gathers:
                    for work in pending:
                        work.wait()
                    pending = self._start(next(upcoming, None))
                else:
                    parameters = [parameter for _, parameter in unit.tensors]
                    self._fsdp.all_gather_and_wait_parameters_ready(parameters, prefetch=False, wait_bucket_ready=True)
                yield list(unit.tensors)
                if not unit.gathers:
                    self._release(unit)
        finally:
            for work in pending:
                work.wait()
            self._free()
            self._fsdp.synchronize_param_gather()

    @property
    def _device(self) -> Any:
        return self._buffer.parameter_groups[0].model_weight_buffer.data.device

    def _is_plain(self, bucket: int) -> bool:
        """Whether each rank of one group has one shard of the bucket, in the parameters' dtype, and nothing else."""
        group = self._buffer.parameter_groups[bucket]
        weights = group.model_weight_buffer
        if weights is None or not weights.is_data_distributed or group.transpose_weight_buffer is not None:
            return False
        is_one_group = self._buffer.ddp_config.outer_dp_sharding_strategy == "no_shard"
        return is_one_group and all(parameter.dtype == weights.dtype for parameter in weights.params)

    def _num_bytes(self, unit: _Unit) -> int:
        weights = (self._buffer.parameter_groups[bucket].model_weight_buffer for bucket in unit.buckets)
        return sum(_aligned(each.bucket_index.size * each.dtype.itemsize) for each in weights)

    def _place(self, unit: _Unit, memory: torch.Tensor) -> None:
        """Make the unit's tensors views of the scratch buffer `memory`."""
        start, views = 0, {}
        for bucket in unit.buckets:
            weights = self._buffer.parameter_groups[bucket].model_weight_buffer
            size = weights.bucket_index.size * weights.dtype.itemsize
            whole = memory[start : start + size].view(weights.dtype)
            unit.gathers.append((whole, weights))
            start += _aligned(size)
            for parameter, item in weights.param_idx.items():
                first = weights.item_index_map[item].global_data_index - weights.bucket_index.global_data_index
                views[parameter] = whole[first : first + parameter.numel()].view(parameter.shape)
        unit.tensors = [(name, views[parameter]) for name, parameter in unit.tensors]

    def _start(self, unit: _Unit | None) -> list[Any]:
        """Start all-gathering a unit; returns the handles to wait for."""
        works = []
        for whole, weights in unit.gathers if unit is not None else ():
            shard, group = weights.get_shard_from_local_buffer(), weights.data_parallel_group
            works.append(dist.all_gather_into_tensor(whole, shard, group=group, async_op=True))
        return works

    def _release(self, unit: _Unit) -> None:
        """Free what upstream gathered; param_and_grad_buffer.py:release_bucket does not allow it for buckets outside of units."""
        for bucket in unit.buckets:
            if self._buffer.parameter_groups[bucket].fsdp_unit_id is not None:
                self._fsdp.all_gather_pipeline.release_bucket(bucket, False)

    def _free(self) -> None:
        for memory in self._scratch:
            memory.untyped_storage().resize_(0)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
