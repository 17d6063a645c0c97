"""Typed weight items: views of parameters for export. Leaves out how shards are gathered (unshard.py).

Names and dimensions are read once from a model chunk before it is wrapped; a walk over the wrapped chunk then gives tensors only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from engine.moe import router_bias
from engine.model.lora import adapted_linears
from engine.model.build import global_name, is_tied_copy, local_name

NamedTensors = list[tuple[str, torch.Tensor]]


def layer_of(name: str) -> str:
    """A parameter's transformer layer by its name; outside of the layers its own name."""
    head, marker, tail = name.partition("decoder.layers.")
    return head + marker + tail.split(".", 1)[0] if marker else name


class Adapter(NamedTuple):
    """A low-rank update of a linear: W + scale * B @ A, of the shards that this tensor-parallel rank has."""

    a: torch.Tensor  # [rank, in]; in / tensor where the linear is row-parallel
    b: torch.Tensor  # [out, rank]; out / tensor where the linear is column-parallel
    scale: float


class WeightItem(NamedTuple):
    """One parameter of the model, whole over data parallelism and local to the tensor-parallel rank.

    A linear of experts has all of this rank one after another in `tensor`, [experts * rows, columns], and in the factors.
    """

    name: str  # megatron-core's, with the layer counted over all pipeline stages
    tensor: torch.Tensor
    shard_dim: int | None  # which dimension tensor parallelism shards; None: replicated
    adapter: Adapter | None
    experts: tuple[tuple[str, ...], ...] = ()  # of each expert the names of what each expert-parallel rank has in its place
    is_stack: bool = False  # they are one tensor of Hugging Face's, not one each; `experts` is empty, or has one entry


class AdapterItem(NamedTuple):
    """One adapter, or those of this rank's experts, stacked; without the linear's weight."""

    linear: str  # the weight's WeightItem.name without `.weight`
    shard_dim: int | None  # the weight's; 0: B is sharded by its dimension 0, 1: A by its dimension 1
    adapter: Adapter
    num_experts: int = 0  # of this rank; 0: it is no linear of experts


class ChunkWeights:
    """Makes items of a chunk's parameters. The last stage's copy of tied embeddings is left out: the first stage has it."""

    def __init__(self, chunk: torch.nn.Module) -> None:
        """`chunk`: not yet wrapped, its adapters added."""
        self._shard_dims: dict[str, int | None] = {}  # by global name
        self._names: dict[str, str] = {}  # global by local name
        self._stacks: dict[str, tuple[str, ...]] = {}  # of a parameter that is exported with all experts: its name on each rank
        self._experts: dict[str, tuple[tuple[str, ...], ...]] = {}  # of an ExpertLinear's parameter: WeightItem.experts
        parameter: Any
        for local, parameter in (*chunk.named_parameters(), *router_bias.named(chunk)):
            if not is_tied_copy(chunk, local):
                name = self._names[local_name(local)] = global_name(chunk, local)
                is_sharded = getattr(parameter, "tensor_model_parallel", False)
                self._shard_dims[name] = getattr(parameter, "partition_dim", None) if is_sharded else None
                if getattr(parameter, "is_stack", False):
                    self._stacks[name] = tuple(f"{name}{rank}" for rank in range(parameter.expert_parallel_size))
                elif count := getattr(parameter, "num_local_experts", 0):
                    first_of_ranks = range(0, count * parameter.expert_parallel_size, count)
                    self._experts[name] = tuple(tuple(f"{name}{first + i}" for first in first_of_ranks) for i in range(count))
        self._linears = dict(adapted_linears([chunk]))  # for their scale of now

    def weights(self, unit: NamedTensors) -> list[WeightItem]:
        """`unit`: (local name, tensor) of all parameters of some modules."""
        tensors, adapters = self._split(unit)
        items: list[WeightItem] = []
        for name, tensor in tensors.items():
            stack = self._stacks.get(name, ())
            experts = (stack,) if len(stack) > 1 else self._experts.get(name, ())
            adapter = adapters.get(name.removesuffix(".weight"))
            items.append(WeightItem(name, tensor, self._shard_dims[name], adapter, experts, is_stack=bool(stack)))
        return items

    def adapters(self, unit: NamedTensors) -> list[AdapterItem]:
        """`unit`: as for `weights`; it may hold adapters' parameters only."""
        _, adapters = self._split(unit)
        return [
            AdapterItem(linear, self._shard_dims[name], each, len(self._experts.get(name, ())))
            for linear, each in adapters.items()
            for name in [f"{linear}.weight"]
        ]

    def _split(self, unit: NamedTensors) -> tuple[dict[str, torch.Tensor], dict[str, Adapter]]:
        """Parameters by name without the adapters', and adapters by their linear's name."""
        named = ((self._names.get(local_name(local)), tensor) for local, tensor in unit)
        tensors = {name: tensor for name, tensor in named if name is not None}
        linears = [name.removesuffix(".lora_a") for name in tensors if name.endswith(".lora_a")]
        adapters = {
            linear: Adapter(tensors.pop(f"{linear}.lora_a"), tensors.pop(f"{linear}.lora_b"), self._linears[linear].lora_scale)
            for linear in linears
        }
        return tensors, adapters
