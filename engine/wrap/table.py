"""The wrap table: one YAML flag chooses megatron-core's DDP or Megatron-FSDP, and how whole parameters come out of each.

Leaves out the optimizer. Sources: megatron-core 0.16.1 distributed/, megatron-fsdp 0.6.1 megatron_fsdp.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from engine.wrap import ddp_fields
from engine.runtime import device, workarounds
from engine.moe import router_bias
from engine.config import EngineConfig
from engine.runtime.megatron import DistributedDataParallel, DistributedDataParallelConfig, parallel_state as mpu
from engine.wrap.unshard import Unsharder
from engine.wrap.items import AdapterItem, ChunkWeights, NamedTensors, WeightItem, layer_of


class DdpChunk:
    """A chunk in megatron-core's DDP, whose parameters lie whole on every data-parallel rank.

    With overlap_param_gather an optimizer step leaves them stale but for this rank's part, until the next forward pass gathers
    them (distrib_optimizer.py:2617).
    """

    def __init__(self, config: Any, ddp_config: DistributedDataParallelConfig, chunk: torch.nn.Module) -> None:
        self.module: Any = DistributedDataParallel(config, ddp_config, chunk)
        self.is_in_place = not ddp_config.overlap_param_gather

    def units(self, *, only_trained: bool) -> Iterator[NamedTensors]:
        """(local name, tensor) of the parameters, a transformer layer at a time; each one outside of the layers alone."""
        self.sync_parameters()
        named = self.module.module.named_parameters()
        kept = ((name, tensor) for name, tensor in named if tensor.requires_grad or not only_trained)
        for _, unit in itertools.groupby(kept, lambda pair: layer_of(pair[0])):
            yield list(unit)

    def parameters(self) -> Iterator[torch.Tensor]:
        """Tensors whose storages hold the parameters."""
        return (parameter.data for parameter in self.module.parameters())

    def gradients(self) -> Iterator[torch.Tensor]:
        """Tensors whose storages hold the gradients. `buffers`: a list of megatron-core's DDP, not torch's Module.buffers."""
        return (buffer.grad_data for buffer in (*self.module.buffers, *self.module.expert_parallel_buffers))

    def main_weights(self) -> Iterator[torch.Tensor]:
        """Tensors whose storages hold main weights outside of the optimizer."""
        return iter(())

    def sync_parameters(self) -> None:
        """Make the parameters current between passes, so that they can be read and set."""
        if not self.is_in_place:
            self.module.start_param_sync(force_sync=True)

    def trained(self) -> Iterator[torch.Tensor]:
        """This rank's shards of the trained parameters."""
        return (parameter.data for parameter in self.module.parameters() if parameter.requires_grad)

    def set_trained(self, parameter: Any, value: torch.Tensor) -> None:
        """`value`: of one, whole over data parallelism."""
        parameter.data.copy_(value)

    def set_main_weights(self) -> None:
        """To those of `trained`, as megatron-core's optimizer does by itself."""

    def step_gradients(self) -> Iterator[torch.Tensor]:
        """This rank's gradients that the optimizer's next step takes, also where no pass was since they were zeroed."""
        return self.gradients()


class FsdpChunk:
    """A chunk in Megatron-FSDP, whose parameters are shards between passes."""

    is_in_place = False

    def __init__(self, config: Any, ddp_config: DistributedDataParallelConfig, chunk: torch.nn.Module) -> None:
        workarounds.use_standalone_fsdp()
        workarounds.add_fsdp_fields(ddp_config)
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

        self.module: Any = FullyShardedDataParallel(config, ddp_config, chunk)
        workarounds.scale_gradients_once(self.module.module)
        self.unsharders: dict[bool, Unsharder] = {}  # by whether they leave frozen parameters out

    def units(self, *, only_trained: bool) -> Iterator[NamedTensors]:
        """Like DdpChunk.units; a unit stays gathered until the next one is requested."""
        if only_trained not in self.unsharders:
            self.unsharders[only_trained] = Unsharder(self.module, only_trained=only_trained)
        return iter(self.unsharders[only_trained])

    def parameters(self) -> Iterator[torch.Tensor]:
        """Tensors whose storages hold the parameters: shards, and whole ones where they stay gathered."""
        yield from (getattr(each.data, "_local_tensor", each.data) for each in self.module.parameters())
        for group in self.module.param_and_grad_buffer.parameter_groups:
            yield from (parameter.data for parameter in group.params)
        yield from self._buffers("model_weight_buffer")

    def gradients(self) -> Iterator[torch.Tensor]:
        return self._buffers("main_grad_buffer")

    def main_weights(self) -> Iterator[torch.Tensor]:
        return self._buffers("main_weight_buffer")

    def sync_parameters(self) -> None:
        self.module.module.synchronize_param_gather()  # drops what is gathered

    def trained(self) -> Iterator[torch.Tensor]:
        return (group.model_weight_buffer.data for group in self._trained_groups())

    def set_trained(self, parameter: Any, value: torch.Tensor) -> None:
        raw, buffer = parameter.orig_param, self.module.param_and_grad_buffer
        weights = buffer.parameter_groups[buffer.param_to_param_group[raw]].model_weight_buffer
        weights.set_item(weights.param_idx[raw], value)

    def set_main_weights(self) -> None:
        for group in self._trained_groups():
            if group.main_weight_buffer is not None:
                shard = group.model_weight_buffer.get_shard_from_local_buffer()
                group.main_weight_buffer.get_shard_from_local_buffer().copy_(shard)

    def step_gradients(self) -> Iterator[torch.Tensor]:
        buffer = self.module.param_and_grad_buffer
        parameters = [parameter for _, parameter in buffer.optimizer_named_parameters]
        if all(parameter.grad is None for parameter in parameters):
            buffer.update_main_grads()
        return (parameter.grad._local_tensor for parameter in parameters if parameter.grad is not None)

    def _trained_groups(self) -> Iterator[Any]:
        return (group for group in self.module.param_and_grad_buffer.parameter_groups if group.requires_grad)

    def _buffers(self, name: str) -> Iterator[torch.Tensor]:
        buffers = (getattr(group, name) for group in self.module.param_and_grad_buffer.parameter_groups)
        return (buffer.data for buffer in buffers if buffer is not None and buffer.data is not None)


@dataclass(frozen=True)
class Wrap:
    """One entry of the table: the wrapper, and the DDP-config fields it is used with."""

    chunk: type[DdpChunk | FsdpChunk]
    fields: dict[str, Any]
    accumulates_gradients: bool  # linears may add to the main gradient; Megatron-FSDP's overwrite it (layers.py:563)


WRAPS: dict[str, Wrap] = {
    "ddp": Wrap(DdpChunk, {"use_distributed_optimizer": True}, accumulates_gradients=True),
    "megatron_fsdp": Wrap(
        FsdpChunk,
        {
            "use_distributed_optimizer": True,
            "use_megatron_fsdp": True,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
        accumulates_gradients=False,
    ),
}


def ddp_config(config: EngineConfig) -> DistributedDataParallelConfig:
    """The wrap's fields with `engine.overrides` laid over them.

    Raises:
        ValueError: an override is refused; the config check says the same before anything starts.
    """
    for name, value in config.overrides.items():
        if reason := ddp_fields.refusal(config.wrap, name, value):
            raise ValueError(f"engine.overrides.{name} = {value!r}: {reason}")
    values = {**WRAPS[config.wrap].fields, "grad_reduce_in_fp32": config.gradient_dtype == "float32"}
    if device.has_cuda():
        values["overlap_grad_reduce"] = True
    else:
        values["gradient_reduce_div_fusion"] = False  # gloo has no ReduceOp.PREMUL_SUM
    return DistributedDataParallelConfig(**{**values, **config.overrides})


class FrozenModel:
    """Chunks that are never trained: sharded where those of the policy are, else as they are."""

    def __init__(self, config: EngineConfig, model_config: Any, chunks: list[torch.nn.Module]) -> None:
        """`model_config` is megatron-core's TransformerConfig."""
        for chunk in chunks:
            chunk.requires_grad_(False)
        is_sharded = ddp_config(config).data_parallel_sharding_strategy == "optim_grads_params"  # of DDP it is no_shard
        self._shards: list[FsdpChunk] = []
        if is_sharded and mpu.get_data_parallel_world_size(with_context_parallel=True) > 1:
            self._shards = [FsdpChunk(model_config, ddp_config(config), chunk) for chunk in chunks]
        self.modules: list[torch.nn.Module] = [shard.module for shard in self._shards] or chunks

    def release(self) -> None:
        """Free what a forward pass has left gathered: up to 500 M elements, which it prefetches (megatron_fsdp.py:444)."""
        for fsdp in (shard.module.module for shard in self._shards):
            for bucket, group in enumerate(fsdp.param_and_grad_buffer.parameter_groups):
                if group.fsdp_unit_id is not None:
                    fsdp.all_gather_pipeline.release_bucket(bucket, False)

    def parameters(self) -> Iterator[torch.Tensor]:
        """Like WrappedModel.parameters."""
        if self._shards:
            return itertools.chain.from_iterable(shard.parameters() for shard in self._shards)
        return (parameter.data for chunk in self.modules for parameter in chunk.parameters())


class WrappedModel:
    """This rank's model chunks in their wrap, and their parameters for an export."""

    def __init__(self, config: EngineConfig, model_config: Any, chunks: list[torch.nn.Module]) -> None:
        """Wraps the chunks. `model_config` is megatron-core's TransformerConfig."""
        kind = WRAPS[config.wrap].chunk
        self._weights = [ChunkWeights(chunk) for chunk in chunks]
        self._chunks = [kind(model_config, ddp_config(config), chunk) for chunk in chunks]
        self.modules: list[torch.nn.Module] = [chunk.module for chunk in self._chunks]
        self.is_in_place = all(chunk.is_in_place for chunk in self._chunks)  # parameters are always whole, at the same address

    def parameters(self) -> Iterator[torch.Tensor]:
        """Tensors whose storages hold the parameters that this rank has between passes; some more than once."""
        return itertools.chain.from_iterable(chunk.parameters() for chunk in self._chunks)

    def gradients(self) -> Iterator[torch.Tensor]:
        """Likewise, of all gradients after a backward pass."""
        return itertools.chain.from_iterable(chunk.gradients() for chunk in self._chunks)

    def main_weights(self) -> Iterator[torch.Tensor]:
        """Likewise, of the weights in the optimizer's precision that lie in the wrap and not in the optimizer."""
        return itertools.chain.from_iterable(chunk.main_weights() for chunk in self._chunks)

    def sync_parameters(self) -> None:
        """Make `trained` current between passes, so that they can be read and set."""
        for chunk in self._chunks:
            chunk.sync_parameters()

    def trained(self) -> Iterator[torch.Tensor]:
        """This rank's shards of the trained parameters."""
        return itertools.chain.from_iterable(chunk.trained() for chunk in self._chunks)

    def set_trained(self, chunk: int, parameter: Any, value: torch.Tensor) -> None:
        """Set a trained parameter of `modules[chunk]` to `value`, whole over data parallelism. `set_main_weights` follows."""
        self._chunks[chunk].set_trained(parameter, value)

    def set_main_weights(self) -> None:
        """To those of `trained`, where they lie in the wrap; the optimizer's reload_model_params sets its own."""
        for chunk in self._chunks:
            chunk.set_main_weights()

    def step_gradients(self) -> Iterator[torch.Tensor]:
        """This rank's gradients that the optimizer's next step takes, also where no pass was since they were zeroed."""
        return itertools.chain.from_iterable(chunk.step_gradients() for chunk in self._chunks)

    def whole_parameters(self) -> Iterator[list[WeightItem]]:
        """All parameters of this pipeline stage in layer order, a transformer layer at a time; the routers' biases at the end.

        Tensors are valid until the next layer is requested. Collective over data-parallel ranks, to the end.
        """
        for weights, chunk in zip(self._weights, self._chunks, strict=True):
            for unit in chunk.units(only_trained=False):
                if items := weights.weights(unit):
                    yield items
            if biases := weights.weights(router_bias.named(chunk.module)):
                yield biases

    def whole_adapters(self) -> Iterator[list[AdapterItem]]:
        """Only the adapters' parameters, gathered; else as `whole_parameters`."""
        for weights, chunk in zip(self._weights, self._chunks, strict=True):
            for unit in chunk.units(only_trained=True):
                if items := weights.adapters(unit):
                    yield items
