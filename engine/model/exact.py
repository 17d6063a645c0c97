"""The model under `model.exact`: megatron-core's layers with the functions of exact/ as their forward pass, as vLLM has them too.

The backward pass is another one of the same functions: ordinary products, torch's RMSNorm, attention as core.py has it.
Leaves out refused settings (rules.py) and vLLM's side (bridge/vllm/exact/).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from engine.attention import fused
from engine.attention.core import CoreAttention, RMSNorm
from engine.batch.packed import PackedSequences
from engine.model.recompute import RecomputingMLP
from engine.runtime.megatron import MLP, ColumnParallelLinear, RowParallelLinear
from exact import attention, cuda, linear, machine, pointwise, rotary


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        if order is None or x.is_cuda:  # there a row of the weight may be anywhere (exact/cuda_machine.py)
            return linear.linear(x, weight)
        out = linear.linear(x, weight[order])
        return torch.empty_like(out).index_copy_(-1, order, out)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0]
        of_weight = None
        if ctx.needs_input_grad[1]:
            weight.grad_added_to_main_grad = False  # it comes by autograd (layers.py:610)
            of_weight = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        return gradient @ weight if ctx.needs_input_grad[0] else None, of_weight, None


def product(x: torch.Tensor, weight: torch.Tensor, order: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in] times weight [out, in], computed in the `order` of rows that vLLM's weight has them in."""
    return _Product.apply(x, weight, order)  # type: ignore[no-any-return, no-untyped-call]


class _Exact:
    """The function of linears that megatron-core's classes call for the product (layers.py:1022, :1274)."""

    order: torch.Tensor | None = None

    def _forward_impl(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **_: Any  # noqa: A002 # their name
    ) -> torch.Tensor:
        out = product(input, self._whole(weight), self.order)
        return out if bias is None else out + bias

    def _whole(self, weight: torch.Tensor) -> torch.Tensor:
        """With an adapter the merged one (lora_linears.py)."""
        return weight


class ExactColumnParallelLinear(_Exact, ColumnParallelLinear):  # type: ignore[misc]
    """On one rank."""


class ExactQkvLinear(ExactColumnParallelLinear):
    """megatron-core has queries, keys and values group by group, vLLM all queries, then all keys, then all values."""

    def __init__(self, *args: Any, config: Any, **kwargs: Any) -> None:
        super().__init__(*args, config=config, **kwargs)
        groups, size = config.num_query_groups, config.kv_channels
        shared = config.num_attention_heads // groups
        rows = torch.arange(groups * (shared + 2) * size).view(groups, shared + 2, size)
        parts = rows[:, :shared], rows[:, shared], rows[:, shared + 1]
        self.order = torch.cat([part.flatten() for part in parts])


class ExactRowParallelLinear(_Exact, RowParallelLinear):  # type: ignore[misc]
    """On one rank."""


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return pointwise.rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        with torch.enable_grad():
            out = F.rms_norm(x, weight.shape, weight, ctx.eps)
        return (*torch.autograd.grad(out, [x, weight], gradients[0]), None)


class ExactNorm(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Norm.apply(x, self.weight, self.eps)  # type: ignore[no-any-return, no-untyped-call]


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return pointwise.silu_and_mul(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return pointwise.silu_and_mul_gradient(x, gradients[0])


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """SwiGLU of what an MLP's first linear gives."""
    return _SiluAndMul.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class ExactMLP(MLP):  # type: ignore[misc]
    """megatron-core's with another activation."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        gate_and_up, _bias = self.linear_fc1(hidden_states)
        return self.linear_fc2(silu_and_mul(gate_and_up))  # type: ignore[no-any-return]


class ExactRecomputingMLP(RecomputingMLP):
    def _activate(self, gate_and_up: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(gate_and_up)


class ExactAttention(CoreAttention):
    """Attention over packed sequences, with its own rotary embedding."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.window:
            raise ValueError("model.exact = true: a sliding window is not exact. Remedy: write model.exact=false")

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
        packed = options["packed_seq_params"]
        assert isinstance(packed, PackedSequences)
        assert packed.rotary is not None
        query, key = (_Rotate.apply(x, *packed.rotary) for x in (query, key))  # type: ignore[no-untyped-call]
        value = value.contiguous()  # a view would keep the whole of what q, k and v are split from
        return _Attend.apply(query, key, value, packed, self).flatten(1)  # type: ignore[no-any-return, no-untyped-call]


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return rotary.rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return rotary.rotate(gradients[0], cos, -sin), None, None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSequences, core: ExactAttention
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.packed, ctx.core = packed, core
        scale = core.scale or query.shape[-1] ** -0.5
        if query.is_cuda:
            return cuda.attend(query, key, value, packed.cu_seqlens_q, max(packed.lengths), scale)
        begins = packed.cu_seqlens_q.long()

        def fetch(sequences: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            rows = begins[sequences][:, None] + positions
            return key[rows], value[rows]

        return attention.attend(query, begins.tolist(), packed.lengths, fetch, key.shape[1], scale)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.core._packed(*inputs, ctx.packed)
        return (*torch.autograd.grad(out, inputs, gradients[0].reshape(out.shape)), None, None)


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.scale = scale
        return linear.merge_into(torch.empty_like(weight), weight, a, b, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b = ctx.saved_tensors
        gradient = gradients[0] * ctx.scale
        return None, b.t() @ gradient.to(b.dtype), gradient.to(a.dtype) @ a.t(), None


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """W + scale B A, of a frozen W, as the weight bridge merges it for the replicas."""
    return _Merge.apply(weight, a, b, scale)  # type: ignore[no-any-return, no-untyped-call]


def use_exact_layers(spec: Any) -> None:
    """Put all of these into megatron-core's spec of a decoder block."""
    spec.layer_norm = ExactNorm
    for layer in spec.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = ExactNorm
        own = layer.submodules.self_attention.submodules
        own.core_attention, own.linear_qkv, own.linear_proj = ExactAttention, ExactQkvLinear, ExactRowParallelLinear
        if own.q_layernorm is RMSNorm:
            own.q_layernorm = own.k_layernorm = ExactNorm
        mlp = layer.submodules.mlp
        mlp.module = ExactRecomputingMLP if mlp.module is RecomputingMLP else ExactMLP
        mlp.submodules.linear_fc1, mlp.submodules.linear_fc2 = ExactColumnParallelLinear, ExactRowParallelLinear


class Rotation:
    """Tables of the model's angles, for the micro-batches."""

    def __init__(self, hf_config: Any) -> None:
        self._frequencies = rotary.frequencies(hf_config, hf_config.head_dim)
        self._table = rotary.table(self._frequencies, 1)

    def tables(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the tokens of a packing, float32 [T, 1, head size / 2]. `position_ids`: int64 [1, T]."""
        length = int(position_ids.max()) + 1
        if length > len(self._table):
            self._table = rotary.table(self._frequencies, 2 * length)
        self._table = self._table.to(position_ids.device)
        cos, sin = self._table[position_ids[0], None].chunk(2, -1)
        return cos, sin


def prepare_machine(chunks: list[torch.nn.Module], hf_config: Any) -> None:
    """The replicas' settings: one thread on CPUs, sums that are not split on GPUs; and a check of their effect.

    Raises:
        ValueError: this machine's kernels are not as exactness needs them.
    """
    weights = [p for chunk in chunks for p in chunk.parameters() if p.dim() == 2]
    if weights[0].is_cuda:
        cuda.prepare()
    else:
        torch.set_num_threads(1)
    heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
    shapes = [(w.shape[1], w.shape[0]) for w in weights]
    machine.check(shapes, heads, hf_config.head_dim, hf_config.vocab_size, weights[0].dtype)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, temperature: float, use_fused: bool) -> torch.Tensor:
        found = pointwise.token_log_probs(logits, labels, temperature)
        ctx.save_for_backward(logits, labels, found)
        ctx.temperature, ctx.use_fused = temperature, use_fused
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, labels, log_probs = ctx.saved_tensors
        if ctx.use_fused:  # without float32 logits in memory
            own = (logits.gather(1, labels[:, None]).squeeze(1) / ctx.temperature).float()
            return fused.logits_gradient(logits, labels, own - log_probs, gradients[0], ctx.temperature), None, None, None
        gradient = gradients[0][:, None] / ctx.temperature
        of_logits = torch.softmax(logits / ctx.temperature, -1, dtype=torch.float32).mul_(-gradient)
        return of_logits.scatter_add_(1, labels[:, None], gradient).to(logits.dtype), None, None, None


def log_probs(logits: torch.Tensor, labels: torch.Tensor, temperature: float, *, use_fused: bool) -> torch.Tensor:
    """Natural log-prob of each label, float32 [T], of logits [1, T, vocabulary] and labels int64 [1, T].

    `use_fused`: in the backward pass, see fused.py; the forward pass is the same.
    """
    return _LogProbs.apply(logits[0], labels[0], temperature, use_fused)  # type: ignore[no-any-return, no-untyped-call]
