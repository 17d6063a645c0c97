"""Memory-bound pieces of a training step in one kernel each: rotary embedding and log-probs; torch.compile makes the kernels.

Each is a pure function for the forward and one for the backward pass, joined by a torch.autograd.Function that keeps only what
the backward pass needs. With TORCHDYNAMO_DISABLE=1 the same functions run eagerly, which is how the CPU's tests see them.
RMSNorm is not here: torch.nn.functional.rms_norm is one CUDA kernel itself; SwiGLU is megatron-core's (fused_bias_swiglu.py).

Source of the log-probs under tensor parallelism: the log-sum-exp of the ranks' parts is that of their log-sum-exps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from engine import device


def chosen(fusions: str) -> bool:
    """Whether `engine.fusions` comes out as on: `auto` means with CUDA, where torch can compile."""
    if fusions == "auto":
        return device.has_cuda() and device.compiles()
    return fusions == "all"


def describe(fusions: str) -> str:
    """The choice and its outcome, in words."""
    what = "compiled rotary embedding, SwiGLU and log-probs, fused Adam and clipping" if chosen(fusions) else "off"
    return f"engine.fusions={fusions}: {what}"


def _on_any_length(x: torch.Tensor, dimension: int) -> None:
    """Compile for any size of this dimension, not for each size again."""
    torch._dynamo.maybe_mark_dynamic(x, dimension)


# ---------------------------------------------------------------------------------------------------- rotary embedding


def rotary_tables(embedding: Any, position_ids: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every packed token's angles, each float32 [T, 1, dim / 2]. Asks the device nothing.

    Args:
        embedding: megatron-core's RotaryEmbedding, whose frequencies (and their scaling) are used.
        position_ids: int64 [1, T], the position within each token's own sequence.
        longest: tokens of the longest sequence.
    """
    angles = embedding(longest, packed_seq=True)[position_ids[0], 0]  # [T, 1, dim]; its halves are equal
    half = angles[..., : angles.shape[-1] // 2]
    return half.cos(), half.sin()


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


@device.compiled
def _rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _rotated(query, cos, sin), _rotated(key, cos, sin)


@device.compiled
def _rotate_back(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _rotated(query, cos, -sin), _rotated(key, cos, -sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        for x in (query, key, cos, sin):
            _on_any_length(x, 0)
        result: tuple[torch.Tensor, torch.Tensor] = _rotate(query, key, cos, sin)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        for x in gradients:
            _on_any_length(x, 0)
        return (*_rotate_back(*gradients, *ctx.saved_tensors), None, None)


def rotate(
    query: torch.Tensor, key: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding (arXiv:2104.09864, halves as in GPT-NeoX) of both, computed in float32 and rounded once.

    Args:
        query, key: [T, heads, dim] and [T, groups, dim].
        tables: those of `rotary_tables`.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _Rotate.apply(query, key, *tables)  # type: ignore[no-untyped-call]
    return result


# ----------------------------------------------------------------------------------------------------------- log-probs


@device.compiled
def _log_sum_exp(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(logits.float() / temperature, -1)


@device.compiled
def _logits_gradient(
    logits: torch.Tensor, labels: torch.Tensor, normalizer: torch.Tensor, gradient: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    """gradient * d(label's logit / temperature - normalizer) / d logits. A label outside of this part matches nothing."""
    probs = torch.exp(logits.float() / temperature - normalizer[:, None])
    hit = torch.arange(logits.shape[1], device=logits.device)[None] == labels[:, None]
    return ((hit.float() - probs) * (gradient / temperature)[:, None]).to(logits.dtype)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, temperature: torch.Tensor, group: Any
    ) -> torch.Tensor:
        size = logits.shape[1]
        labels = labels - dist.get_rank(group) * size
        for x in (logits, labels):
            _on_any_length(x, 0)
        normalizer: torch.Tensor = _log_sum_exp(logits, temperature)
        own = logits.gather(1, labels.clamp(0, size - 1)[:, None]).squeeze(1).float() / temperature
        own = torch.where((labels >= 0) & (labels < size), own, 0.0)
        if dist.get_world_size(group) > 1:
            peak = normalizer.clone()
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
            total = torch.exp(normalizer - peak)
            dist.all_reduce(total, group=group)
            dist.all_reduce(own, group=group)
            normalizer = peak + total.log()
        ctx.save_for_backward(logits, labels, normalizer, temperature)
        return own - normalizer

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, labels, normalizer, temperature = ctx.saved_tensors
        (gradient,) = gradients
        for x in (logits, labels, normalizer, gradient):
            _on_any_length(x, 0)
        return _logits_gradient(logits, labels, normalizer, gradient, temperature), None, None, None


def token_log_probs(logits: torch.Tensor, labels: torch.Tensor, temperature: float, group: Any) -> torch.Tensor:
    """Natural log-prob of each label under softmax(logits / temperature), without float32 logits in memory.

    Reads the logits once for it (and once more, to write their gradient, in the backward pass), computes in float32.

    Args:
        logits: [T, vocabulary / tensor size], this tensor-parallel rank's part of the vocabulary; not changed.
        labels: int64 [T].
        group: the tensor-parallel group.

    Returns:
        float32 [T], the same on every rank of `group`; gradients flow to `logits`, in their dtype.
    """
    divisor = torch.full((), temperature, device=logits.device)
    result: torch.Tensor = _LogProbs.apply(logits, labels, divisor, group)  # type: ignore[no-untyped-call]
    return result
