"""Low-rank adapters beside megatron-core's column- and row-parallel linears; the base weights are frozen.

    column-parallel   y = W_i x + scale B_i (A x)                       A [rank, in] whole, B_i [out / tensor, rank]
    row-parallel      y = sum_i W_i x_i + scale B (sum_i A_i x_i)       A_i [rank, in / tensor], B [out, rank] whole

`A` and `B` are the linear's own parameters `lora_a` and `lora_b`; the base's names stay as they are. Gradients of the
whole factor are complete on every tensor-parallel rank; under sequence parallelism each rank has its tokens' part, and
megatron-core sums what says `sequence_parallel` (finalize_model_grads.py:354). Of a linear that is whole on every
tensor-parallel rank both factors are. Every expert has an adapter of its own, and those
of a rank's experts are stacked as their weights are. Leaves out files (peft.py) and the merge (the weight bridge's).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from engine import rules
from engine.config import DELTA_TARGETS, LORA_TARGETS, LoraConfig
from engine.moe.experts import ExpertLinear, grouped_linear
from engine.attention.latent import ReplicatedLinear
from engine.runtime import workarounds
from engine.runtime.megatron import ColumnParallelLinear, RowParallelLinear, parallel_state as mpu, tensor_parallel
from engine.model import exact
from engine.model.build import global_name, gpt_model

START = "start"  # the name of the adapters of the start model
NamedLinears = Iterator[tuple[str, Any]]


@dataclass(frozen=True)
class Block:
    """Rows of a pass that several adapters share: those of one, with its factors."""

    num_rows: int  # consecutive ones, under sequence parallelism of each tensor-parallel rank
    a: torch.Tensor
    b: torch.Tensor
    scale: float


class _Adapted:
    """Common base of both kinds of adapted linears."""

    lora_a: torch.nn.Parameter
    lora_b: torch.nn.Parameter
    lora_scale: float
    lora_dropout: float
    lora_training = False
    lora_shown = ""  # the name of the adapter in use; empty: the policy's
    lora_kept: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = MappingProxyType({})  # A and B of others, by name

    lora_blocks: Sequence[Block] = ()  # all rows of a shared pass, see engine/shared.py

    def _factors(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A and B of the policy or, under `showing`, of the adapter of that name, where there is any."""
        return self.lora_kept.get(self.lora_shown) if self.lora_shown else (self.lora_a, self.lora_b)

    def _low(self, inputs: torch.Tensor, a: torch.Tensor, *, is_shard: bool) -> torch.Tensor:
        """scale A x of inputs [T, ..., in], in a shared pass of each block by itself, with the bits that it has alone."""
        if not self.lora_blocks:
            return product(self._dropped(inputs, is_shard=is_shard), a) * self.lora_scale
        return self._by_block(inputs, lambda rows, block: product(rows, block.a) * block.scale)

    def _high(self, low: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """B of what `_low` gave, likewise."""
        return self._by_block(low, lambda rows, block: product(rows, block.b)) if self.lora_blocks else product(low, b)

    def _by_block(self, rows: torch.Tensor, compute: Callable[[torch.Tensor, Block], torch.Tensor]) -> torch.Tensor:
        sizes = [block.num_rows for block in self.lora_blocks]
        parts = zip(of_blocks(rows, sizes), self.lora_blocks, strict=True)
        return by_rank([compute(part, block) for part, block in parts], sizes)

    def _dropped(self, inputs: torch.Tensor, *, is_shard: bool) -> torch.Tensor:
        """Dropout, the same on all tensor-parallel ranks where the input is, and another on each of its shards."""
        if not (self.lora_training and self.lora_dropout):
            return inputs
        if not is_shard:
            return F.dropout(inputs, self.lora_dropout)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return F.dropout(inputs, self.lora_dropout)


def product(inputs: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """inputs [..., in] with factor [out, in]: the same bits with a factor that is trained and with one that is kept.

    Of transposed inputs, F.linear makes one product or a batch of them, by whether the factor requires a gradient.
    """
    return F.linear(inputs.flatten(0, -2), factor).view(*inputs.shape[:-1], -1)


def of_blocks(rows: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Rows [T, ...] that lie by tensor-parallel rank, and of each rank by block, as a tensor a block; also one rank's rows alone.

    `sizes`: of each block the number of its rows on a rank.
    """
    pieces = torch.split(rows, [*sizes] * (len(rows) // sum(sizes)))
    return [torch.cat(pieces[number :: len(sizes)]) for number in range(len(sizes))]


def by_rank(blocks: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """The inverse of `of_blocks`."""
    pieces = [torch.split(block, size) for block, size in zip(blocks, sizes, strict=True)]
    return torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank])


class AdaptedColumnParallelLinear(_Adapted, ColumnParallelLinear):  # type: ignore[misc]
    """y_i = W_i x + scale B_i (A x)."""

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(input_, *args, **kwargs)
        if (factors := self._factors()) is None:
            return output, bias
        low = self._low(input_, factors[0], is_shard=self.sequence_parallel)
        if self.sequence_parallel:
            low = tensor_parallel.gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=self.tp_group)
        else:
            low = tensor_parallel.copy_to_tensor_model_parallel_region(low, group=self.tp_group)
        return output + self._high(low, factors[1]), bias


class AdaptedRowParallelLinear(_Adapted, RowParallelLinear):  # type: ignore[misc]
    """y = sum_i W_i x_i + scale B (sum_i A_i x_i)."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(input_)
        if (factors := self._factors()) is None:
            return output, bias
        low = self._low(input_, factors[0], is_shard=True)
        if self.sequence_parallel:
            low = tensor_parallel.reduce_scatter_to_sequence_parallel_region(low, group=self.tp_group)
        else:
            low = tensor_parallel.reduce_from_tensor_model_parallel_region(low, group=self.tp_group)
        return output + self._high(low, factors[1]), bias


class AdaptedReplicatedLinear(_Adapted, ReplicatedLinear):
    """y = W x + scale B (A x)."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = super().forward(inputs)
        if (factors := self._factors()) is None:
            return output
        low = self._low(inputs, factors[0], is_shard=self.sequence_parallel)
        return output + self._high(low, factors[1])


class AdaptedExpertLinear(_Adapted, ExpertLinear):
    """y = W_e x + scale B_e (A_e x) of each expert e; A [experts * rank, in], B [experts * out, rank].

    Under tensor parallelism the dispatcher gathers inputs and sums outputs and, in the backward pass, the inputs' gradients. Of
    these each rank has its part, and of the whole factor's gradient, too.
    """

    def forward(self, inputs: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        output = super().forward(inputs, ends)
        if (factors := self._factors()) is None:
            return output
        return output + grouped_linear(grouped_linear(inputs, factors[0], ends) * self.lora_scale, factors[1], ends)


class _ExactAdapted(_Adapted):
    """y = (W + scale B A) x, with the weight that the replicas get."""

    def _whole(self, weight: torch.Tensor) -> torch.Tensor:
        factors = self._factors()
        return weight if factors is None else exact.merged(weight, *factors, self.lora_scale)


class ExactAdaptedColumnParallelLinear(_ExactAdapted, exact.ExactColumnParallelLinear):
    """A linear of the MLP."""


class ExactAdaptedQkvLinear(_ExactAdapted, exact.ExactQkvLinear):
    """Merged in megatron-core's order, multiplied in vLLM's."""


class ExactAdaptedRowParallelLinear(_ExactAdapted, exact.ExactRowParallelLinear):
    """A linear of attention or MLP."""


ADAPTED = {
    exact.ExactColumnParallelLinear: ExactAdaptedColumnParallelLinear,
    exact.ExactQkvLinear: ExactAdaptedQkvLinear,
    exact.ExactRowParallelLinear: ExactAdaptedRowParallelLinear,
    ColumnParallelLinear: AdaptedColumnParallelLinear,
    RowParallelLinear: AdaptedRowParallelLinear,
    ReplicatedLinear: AdaptedReplicatedLinear,
    ExpertLinear: AdaptedExpertLinear,
}


def add_adapters(chunks: list[torch.nn.Module], config: LoraConfig, seed: int) -> None:
    """Freeze the loaded chunks, not yet wrapped, and put an adapter beside each linear that `config.targets` names.

    A is drawn as PEFT does (Kaiming uniform with a = sqrt(5)), by seed and name, so that every layout starts alike;
    B is zero.

    Raises:
        ValueError: no linear is called so, the rank is larger than a linear's dimension, or does not go with experts.
    """
    workarounds.fold_gradients_of_frozen_linears()
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.requires_grad = False
        linears = dict(_layer_linears(chunk))
        present = {name.rpartition(".")[2] for name in linears}
        if gpt_model(chunk).config.linear_attention_freq:  # some chunks have layers of one kind alone
            present |= {*LORA_TARGETS, *DELTA_TARGETS}
        unknown = [target for target in config.targets if target not in present]
        if unknown:
            raise ValueError(f"engine.lora.targets: no linear {unknown[0]!r} in this model; it has {', '.join(sorted(present))}")
        for name, linear in linears.items():
            if name.rpartition(".")[2] in config.targets:
                adapt = _adapt_experts if isinstance(linear, ExpertLinear) else _adapt
                adapt(linear, global_name(chunk, name), config, seed)
        embedding = getattr(gpt_model(chunk), "embedding", None)
        if embedding is not None:
            embedding.register_forward_hook(_begin_graph)


def adapted_linears(chunks: list[torch.nn.Module]) -> NamedLinears:
    """(global name, linear) of every linear with an adapter, in layer order."""
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if isinstance(module, _Adapted):
                yield global_name(chunk, name), module


def keep(chunks: list[torch.nn.Module], name: str) -> None:
    """Keep a copy of the adapters of now, not yet wrapped, under a name."""
    for _, linear in adapted_linears(chunks):
        linear.lora_kept = {**linear.lora_kept, name: (linear.lora_a.detach().clone(), linear.lora_b.detach().clone())}


@torch.no_grad()
def put_back(chunks: list[torch.nn.Module], name: str) -> None:
    """Undo what has changed in the adapters, not yet wrapped, since they were kept."""
    for _, linear in adapted_linears(chunks):
        for factor, kept in zip((linear.lora_a, linear.lora_b), linear.lora_kept[name], strict=True):
            factor.copy_(kept)


def showing(chunks: list[torch.nn.Module], name: str) -> AbstractContextManager[None]:
    """Another model: the base with the adapters kept under this name, or none. Chunks without adapters stay as they are."""
    return _set(chunks, "lora_shown", name)


def reference(chunks: list[torch.nn.Module]) -> AbstractContextManager[None]:
    """The start model."""
    return showing(chunks, START)


@contextmanager
def sharing(chunks: list[torch.nn.Module], rows: Sequence[tuple[int, Mapping[Any, torch.Tensor], float]]) -> Iterator[None]:
    """Let rows of a pass have adapters of their own: Block.num_rows, factors by the policy's, scale."""
    linears = [linear for _, linear in adapted_linears(chunks)]
    for linear in linears:
        linear.lora_blocks = [Block(num, own[linear.lora_a], own[linear.lora_b], scale) for num, own, scale in rows]
    hooks = list(_whole_sequences(chunks, [num for num, _, _ in rows]))
    try:
        yield
    finally:
        for linear in linears:
            del linear.lora_blocks
        for hook in hooks:
            hook.remove()


def _whole_sequences(chunks: list[torch.nn.Module], sizes: Sequence[int]) -> Iterator[Any]:
    """Hooks by which attention gets block after block what lies by tensor-parallel rank, and gives it back by rank."""

    def whole(_linear: Any, _inputs: Any, outputs: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        return torch.cat(of_blocks(outputs[0], sizes)), outputs[1]

    def shards(_linear: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        num_ranks = len(inputs[0]) // sum(sizes)
        return (by_rank(torch.split(inputs[0], [size * num_ranks for size in sizes]), sizes),)

    for chunk in chunks:
        for name, linear in chunk.named_modules():
            if getattr(linear, "sequence_parallel", False) and name.endswith(("self_attention.linear_qkv", ".in_proj")):
                yield linear.register_forward_hook(whole)
            if getattr(linear, "sequence_parallel", False) and name.endswith(("self_attention.linear_proj", ".out_proj")):
                yield linear.register_forward_pre_hook(shards)


def training(chunks: list[torch.nn.Module]) -> AbstractContextManager[None]:
    """Enables the adapters' dropout."""
    return _set(chunks, "lora_training", True)


@contextmanager
def _set(chunks: list[torch.nn.Module], name: str, value: str | bool) -> Iterator[None]:
    linears = [linear for _, linear in adapted_linears(chunks)]
    for linear in linears:
        setattr(linear, name, value)
    try:
        yield
    finally:
        for linear in linears:
            delattr(linear, name)


def _layer_linears(chunk: torch.nn.Module) -> NamedLinears:
    for name, module in chunk.named_modules():
        if type(module) in ADAPTED and "decoder.layers." in name:
            yield name, module


def _begin_graph(_module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> None:
    """Make the first layer's input require a gradient, although the embeddings are frozen.

    megatron-core's recompute gives no gradients where no input wants one (random.py:CheckpointFunction), and Megatron-FSDP
    frees a unit after its backward pass by a hook on its inputs' gradients (megatron_fsdp.py:825).
    """
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()


def _adapt(linear: Any, name: str, config: LoraConfig, seed: int) -> None:
    is_column, is_row = isinstance(linear, ColumnParallelLinear), isinstance(linear, RowParallelLinear)
    rows, columns = linear.weight.shape
    _check_rank(config, name, min(linear.input_size, linear.output_size))
    first = initial_a(config.rank, linear.input_size, name, seed)
    if is_row:
        first = first.chunk(linear.tp_group.size(), dim=1)[linear.tp_group.rank()].contiguous()
    assert first.shape[1] == columns
    linear.__class__ = ADAPTED[type(linear)]  # as torch's fully_shard does: hooks, names and references stay
    linear.lora_a = torch.nn.Parameter(first.to(linear.weight))
    linear.lora_b = torch.nn.Parameter(linear.weight.new_zeros(rows, config.rank))
    for factor, is_sharded in ((linear.lora_a, is_row), (linear.lora_b, is_column)):
        if is_sharded:
            tensor_parallel.set_tensor_model_parallel_attributes(factor, True, 0 if is_column else 1, 1)
        elif linear.sequence_parallel:
            factor.sequence_parallel = True
    linear.lora_scale = config.scale
    linear.lora_dropout = config.dropout


def _adapt_experts(linear: Any, name: str, config: LoraConfig, seed: int) -> None:
    weight, count = linear.weight, linear.num_experts
    size, rank = mpu.get_expert_tensor_parallel_world_size(), mpu.get_expert_tensor_parallel_rank()
    is_column = weight.partition_dim == 0
    rows, columns = weight.shape[0] // count, weight.shape[1]
    num_inputs = columns if is_column else columns * size
    _check_rank(config, name, min(num_inputs, rows * size if is_column else rows))
    if found := rules.experts_lora_problem(config, name, str(weight.dtype).removeprefix("torch.")):
        raise ValueError(str(found))
    first_expert = mpu.get_expert_model_parallel_rank() * count
    experts = range(first_expert, first_expert + count)
    a = torch.cat([initial_a(config.rank, num_inputs, f"{name}.{expert}", seed) for expert in experts])
    linear.__class__ = AdaptedExpertLinear
    linear.lora_a = torch.nn.Parameter((a if is_column else a.chunk(size, dim=1)[rank].contiguous()).to(weight))
    linear.lora_b = torch.nn.Parameter(weight.new_zeros(count * rows, config.rank))
    for factor in (linear.lora_a, linear.lora_b):
        factor.allreduce = weight.allreduce
        factor.num_local_experts, factor.expert_parallel_size = count, weight.expert_parallel_size
    sharded, whole = (linear.lora_b, linear.lora_a) if is_column else (linear.lora_a, linear.lora_b)
    tensor_parallel.set_tensor_model_parallel_attributes(sharded, True, 0 if is_column else 1, 1)
    whole.sequence_parallel = size > 1
    linear.lora_scale, linear.lora_dropout = config.scale, 0.0


def _check_rank(config: LoraConfig, name: str, smallest: int) -> None:
    if config.rank > smallest:
        raise ValueError(f"engine.lora.rank={config.rank} is larger than a dimension of {name} ({smallest}); lower it")


def initial_a(rank: int, num_inputs: int, name: str, seed: int) -> torch.Tensor:
    """float32 [rank, num_inputs] on the CPU."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    a = torch.empty(rank, num_inputs)
    return torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
