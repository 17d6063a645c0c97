"""One rank's model chunks on torch's meta device, in a world of any size that needs no other process.

The engine's own builder builds them (engine/model/build.py), so that parameters are those of a real rank: its layers, its
experts, its shards. Only config.json is read. Leaves out the wrap, whose share of them memory.py counts.

    with world(128, rank=0, parallel=config.engine.parallel):
        rank = build_rank(config.model, config.engine)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from engine.config import EngineConfig, ModelConfig, ParallelConfig
from engine.model import build, lora
from engine.runtime.megatron import parallel_state as mpu
from engine.runtime.megatron import tensor_parallel
from megasync.tools.plan.meta.tracker import Tracker

META = torch.device("meta")


class OnMeta(TorchFunctionMode):
    """Whatever device is asked for, new tensors are on the meta device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.cuda:
            return args[0]
        if function in _device_constructors() or kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": META}
        return function(*args, **kwargs)


@contextmanager
def world(size: int, rank: int, parallel: ParallelConfig) -> Iterator[None]:
    """Within the block this process is `rank` of `size`, with megatron-core's groups; no other is there, and nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend, too

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        yield
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters of one rank. Experts that expert-parallel ranks share are counted apart from all else."""

    dense: int = 0
    dense_trained: int = 0
    experts: int = 0
    experts_trained: int = 0
    output: int = 0  # embeddings, final norm and output layer; part of `dense`
    output_trained: int = 0
    num_layers: int = 0
    largest_layer: int = 0

    @property
    def whole(self) -> int:
        return self.dense + self.experts

    @property
    def trained(self) -> int:
        return self.dense_trained + self.experts_trained


@dataclass
class MetaRank:
    """A rank's chunks, not wrapped, on the meta device."""

    bridge: Any
    chunks: list[torch.nn.Module]
    counts: Counts


def build_rank(model: ModelConfig, engine: EngineConfig) -> MetaRank:
    """The model of this rank of the world, a real one or that of `world`. `engine.fusions` is all or none: no device is asked."""
    bridge = build.build_mbridge(model.model_copy(update={"exact": False}), engine)  # exact tiles read numbers of tensors
    with OnMeta(), Tracker():  # the tracker answers the all-reduce of tied embeddings (language_module.py:245)
        chunks = build.build_chunks(bridge, None)
        if engine.lora.rank:
            lora.add_adapters(chunks, engine.lora, 0)
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters() if parameter.requires_grad):
        parameter.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
    return MetaRank(bridge, chunks, count(chunks))


def _drop_gradient(parameter: torch.Tensor) -> None:
    """Drop the gradient, as the wraps do, which add it to buffers of their own."""
    parameter.grad = None


def count(chunks: list[torch.nn.Module]) -> Counts:
    """Tied embeddings once, as they are stored."""
    sums: dict[str, int] = dict.fromkeys(("dense", "dense_trained", "experts", "experts_trained", "output", "output_trained"), 0)
    layers: dict[str, int] = {}
    named = ((index, *pair) for index, chunk in enumerate(chunks) for pair in chunk.named_parameters())
    for index, name, parameter in named:
        head, marker, tail = name.partition("decoder.layers.")
        kinds = ["experts" if getattr(parameter, "allreduce", True) is False else "dense"]
        if marker:
            layer = f"{index} {head}{tail.split('.', 1)[0]}"
            layers[layer] = layers.get(layer, 0) + parameter.numel()
        else:
            kinds.append("output")
        for kind in kinds:
            sums[kind] += parameter.numel()
            sums[f"{kind}_trained"] += parameter.numel() if parameter.requires_grad else 0
    return Counts(**sums, num_layers=len(layers), largest_layer=max(layers.values(), default=0))
