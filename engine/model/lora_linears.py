"""Megatron-core's column- and row-parallel linears with low-rank adapters beside their frozen weights.

    column-parallel   y = W_i x + scale B_i (A x)                       A [rank, in] whole, B_i [out / tensor, rank]
    row-parallel      y = sum_i W_i x_i + scale B (sum_i A_i x_i)       A_i [rank, in / tensor], B [out, rank] whole

`A` and `B` are the linear's own parameters `lora_a` and `lora_b`; the base's names stay as they are. Gradients of the
whole factor are complete on every tensor-parallel rank; under sequence parallelism each rank has its tokens' part, and
megatron-core sums what says `sequence_parallel` (finalize_model_grads.py:354). Of a linear that is whole on every
tensor-parallel rank both factors are. Every expert has an adapter of its own, and those
of a rank's experts are stacked as their weights are. Leaves out how a linear becomes one of these (lora.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from engine.attention.latent import ReplicatedLinear
from engine.model import exact
from engine.moe.experts import ExpertLinear, grouped_linear
from engine.runtime.megatron import ColumnParallelLinear, RowParallelLinear, tensor_parallel


@dataclass(frozen=True)
class AdapterRows:
    """One adapter's rows of a pass that several adapters share, and its factors."""

    num_rows: int  # consecutive ones, under sequence parallelism of each tensor-parallel rank
    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(frozen=True)
class GroupedProduct:
    """Products of all adapters' rows of a pass in one grouped kernel, whose bits depend on the number of rows."""

    ends: torch.Tensor  # int32 [adapters], where each one's rows end
    scales: torch.Tensor  # float32 [rows, 1]

    @classmethod
    def of(cls, counts: Sequence[int], scales: Sequence[float], device: torch.device) -> GroupedProduct:
        rows = torch.tensor(counts, device=device)
        scale_of_row = torch.tensor(scales, device=device).repeat_interleave(rows)
        return cls(rows.cumsum(0).to(torch.int32), scale_of_row[:, None])

    def product(self, inputs: torch.Tensor, factors: Sequence[torch.Tensor], *, is_scaled: bool = False) -> torch.Tensor:
        """Inputs [..., in] with each adapter's factor [out, in]."""
        transposed = torch.stack(list(factors)).transpose(1, 2)
        out = F.grouped_mm(inputs.flatten(0, -2), transposed, offs=self.ends)
        if is_scaled:
            out = (out * self.scales).to(out.dtype)
        return out.view(*inputs.shape[:-1], -1)


def fits_grouped_product(linear: Any, adapters: Sequence[AdapterRows]) -> bool:
    """Whether one kernel reads a linear's factors: on CUDA, in 16 bits, with rows of a multiple of 16 bytes.

    On CPUs adapters go one by one, each with the bits that it has alone.
    """
    factors = [factor for each in adapters for factor in (each.a, each.b)]
    fits = all(each.is_cuda and each.element_size() == 2 and each.shape[1] % 8 == 0 for each in factors)
    return fits and not linear.sequence_parallel


class Adapted:
    """Common base of both kinds of adapted linears."""

    lora_a: torch.nn.Parameter
    lora_b: torch.nn.Parameter
    lora_scale: float
    lora_dropout: float
    lora_training = False
    lora_shown = ""  # the name of the adapter in use; empty: the policy's
    lora_kept: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = MappingProxyType({})  # A and B of others, by name

    lora_rows: Sequence[AdapterRows] = ()  # all rows of a shared pass, see engine/shared.py
    lora_grouped: GroupedProduct | None = None  # of these, where one kernel multiplies all of them

    def _factors(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A and B of the policy or, under `showing`, of the adapter of that name, where there is any."""
        return self.lora_kept.get(self.lora_shown) if self.lora_shown else (self.lora_a, self.lora_b)

    def _low(self, inputs: torch.Tensor, a: torch.Tensor, *, is_shard: bool) -> torch.Tensor:
        """scale A x of inputs [T, ..., in], in a shared pass by adapter, on CPUs with the bits that it has alone."""
        if not self.lora_rows:
            return product(self._dropped(inputs, is_shard=is_shard), a) * self.lora_scale
        if self.lora_grouped is not None:
            return self.lora_grouped.product(inputs, [each.a for each in self.lora_rows], is_scaled=True)
        return self._by_adapter(inputs, lambda rows, own: product(rows, own.a) * own.scale)

    def _high(self, low: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """B of what `_low` gave, likewise."""
        if self.lora_grouped is not None:
            return self.lora_grouped.product(low, [each.b for each in self.lora_rows])
        return self._by_adapter(low, lambda rows, own: product(rows, own.b)) if self.lora_rows else product(low, b)

    def _by_adapter(self, rows: torch.Tensor, compute: Callable[[torch.Tensor, AdapterRows], torch.Tensor]) -> torch.Tensor:
        sizes = [each.num_rows for each in self.lora_rows]
        parts = zip(split_by_adapter(rows, sizes), self.lora_rows, strict=True)
        return join_by_rank([compute(part, own) for part, own in parts], sizes)

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


def split_by_adapter(rows: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Rows [T, ...], by tensor-parallel rank and in each rank by adapter, as one tensor per adapter; also one rank's rows alone.

    `sizes`: the number of each adapter's rows on a rank.
    """
    pieces = torch.split(rows, [*sizes] * (len(rows) // sum(sizes)))
    return [torch.cat(pieces[number :: len(sizes)]) for number in range(len(sizes))]


def join_by_rank(parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """The inverse of `split_by_adapter`."""
    pieces = [torch.split(part, size) for part, size in zip(parts, sizes, strict=True)]
    return torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank])


class AdaptedColumnParallelLinear(Adapted, ColumnParallelLinear):  # type: ignore[misc]
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


class AdaptedRowParallelLinear(Adapted, RowParallelLinear):  # type: ignore[misc]
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


class AdaptedReplicatedLinear(Adapted, ReplicatedLinear):
    """y = W x + scale B (A x)."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = super().forward(inputs)
        if (factors := self._factors()) is None:
            return output
        low = self._low(inputs, factors[0], is_shard=self.sequence_parallel)
        return output + self._high(low, factors[1])


class AdaptedExpertLinear(Adapted, ExpertLinear):
    """y = W_e x + scale B_e (A_e x) of each expert e; A [experts * rank, in], B [experts * out, rank].

    Under tensor parallelism the dispatcher gathers inputs and sums outputs and, in the backward pass, the inputs' gradients. Of
    these each rank has its part, and of the whole factor's gradient, too.
    """

    def forward(self, inputs: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        output = super().forward(inputs, ends)
        if (factors := self._factors()) is None:
            return output
        return output + grouped_linear(grouped_linear(inputs, factors[0], ends) * self.lora_scale, factors[1], ends)


class _ExactAdapted(Adapted):
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
