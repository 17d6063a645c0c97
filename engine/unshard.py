"""Megatron-FSDP's units made whole for a while, one after the other: what an export walks over.

Units (transformer layers) are gathered from their shards into two memories of this module's own, each while the one before is
in use. A pass gives the same tensors as the one before, most often at the same place, so that what was worked out for them stays
good. Megatron-FSDP's own gather does the rest: embeddings, final norm, and whatever is not plainly sharded. Sources:
megatron-fsdp 0.6.1 param_and_grad_buffer.py, megatron_fsdp.py. Leaves out DDP and names (wrap.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist

from engine.weights import NamedTensors

NUM_MEMORIES = 2
ALIGNMENT_BYTES = 512  # as CUDA's allocator


@dataclass
class _Unit:
    """`buckets`: of Megatron-FSDP, one for trained and one for frozen parameters. `tensors` are theirs, whole."""

    buckets: list[int] = field(default_factory=list)
    tensors: NamedTensors = field(default_factory=list)
    gathers: list[tuple[torch.Tensor, Any]] = field(default_factory=list)  # into where, from which buffer; empty: upstream's


class Unsharder:
    """The units of one wrapped chunk, in the order of its parameters. The next training step is unchanged by it.

    Keeps no memory between passes but what Megatron-FSDP keeps.
    """

    def __init__(self, wrapped: torch.nn.Module, *, only_trained: bool) -> None:
        """`only_trained`: frozen parameters are left out, and not gathered."""
        self._fsdp = cast("Any", wrapped.module)
        self._buffer: Any = self._fsdp.param_and_grad_buffer
        units: dict[tuple[str, int], _Unit] = {}
        # the parameters that modules have while they compute (megatron_fsdp.py:403); now they may have the sharded ones
        for name, parameter in self._fsdp.raw_param.items():
            if parameter.requires_grad or not only_trained:
                bucket = self._buffer.param_to_param_group[parameter]
                number = self._buffer.parameter_groups[bucket].fsdp_unit_id
                unit = units.setdefault(("bucket", bucket) if number is None else ("unit", number), _Unit())
                unit.tensors.append((name, parameter))
                unit.buckets += [bucket] if bucket not in unit.buckets else []
        self._units = list(units.values())
        own = [unit for (kind, _), unit in units.items() if kind == "unit" and all(map(self._is_plain, unit.buckets))]
        self._sizes = [max(map(self._num_bytes, own[first::NUM_MEMORIES]), default=0) for first in range(NUM_MEMORIES)]
        self._memories = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in self._sizes]
        for index, unit in enumerate(own):
            self._place(unit, self._memories[index % NUM_MEMORIES])
        self._own = own
        self._free()

    def __iter__(self) -> Iterator[NamedTensors]:
        """Collective over data-parallel ranks, to the end. Tensors are good until the next unit is asked for.

        A gather comes after all that was queued on the stream before it, so that it never writes into what is still read.
        """
        self._fsdp.synchronize_param_gather()
        for memory, size in zip(self._memories, self._sizes, strict=True):
            memory.untyped_storage().resize_(size)
        coming: list[Any] = []
        following = iter(self._own)
        try:
            coming = self._start(next(following, None))
            for unit in self._units:
                if unit.gathers:
                    for work in coming:
                        work.wait()
                    coming = self._start(next(following, None))
                else:
                    parameters = [parameter for _, parameter in unit.tensors]
                    self._fsdp.all_gather_and_wait_parameters_ready(parameters, prefetch=False, wait_bucket_ready=True)
                yield list(unit.tensors)
                if not unit.gathers:
                    self._release(unit)
        finally:
            for work in coming:
                work.wait()
            self._free()
            self._fsdp.synchronize_param_gather()

    @property
    def _device(self) -> Any:
        return self._buffer.parameter_groups[0].model_weight_buffer.data.device

    def _is_plain(self, bucket: int) -> bool:
        """Whether the bucket is nothing but a shard on each rank of one group, in the parameters' dtype."""
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
        """Put views of `memory` in the place of the unit's parameters."""
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
        """Gather a unit, beside what runs."""
        works = []
        for whole, weights in unit.gathers if unit is not None else ():
            shard, group = weights.get_shard_from_local_buffer(), weights.data_parallel_group
            works.append(dist.all_gather_into_tensor(whole, shard, group=group, async_op=True))
        return works

    def _release(self, unit: _Unit) -> None:
        """Buckets outside of the units stay: param_and_grad_buffer.py:release_bucket forbids to free them."""
        for bucket in unit.buckets:
            if self._buffer.parameter_groups[bucket].fsdp_unit_id is not None:
                self._fsdp.all_gather_pipeline.release_bucket(bucket, False)

    def _free(self) -> None:
        for memory in self._memories:
            memory.untyped_storage().resize_(0)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
