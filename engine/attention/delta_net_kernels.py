"""The gated delta net on GPUs, in 16 bits: flash-linear-attention's Triton kernels over packed sequences.

Convolution, rule and gated norm are a kernel or a few each, forward and backward; none of them reads another sequence. vLLM
computes prompts with copies of the rule's kernels. The first step of a run tunes them, which takes minutes. Leaves out when they
are used, and plain torch (delta_net.py).
Source: fla-core 0.6.0 fla/ops/gated_delta_rule/chunk.py, fla/modules/causal_conv1d/ops.py, fla/modules/norm/fused_norm_gate.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec

import torch

from engine.batch.packed import PackedSequences

LIBRARY = "flash-linear-attention"
_enabled = False  # of this process, as attention's kernels are


def enable(value: bool) -> None:
    """Whether the layers of this process use these kernels from now on."""
    global _enabled  # noqa: PLW0603 - torch's switch of attention's kernels is one of the process, too
    _enabled = value


def is_enabled() -> bool:
    return _enabled


def version() -> str:
    """Version of the installed flash-linear-attention, or an empty string."""
    if not find_spec("fla"):
        return ""
    try:
        return metadata.version("fla-core")
    except metadata.PackageNotFoundError:  # installed in another way
        return "of unknown version"


def attend(
    packed: PackedSequences, mixed: torch.Tensor, log_decay: torch.Tensor, strength: torch.Tensor, conv1d: torch.Tensor,
    sizes: Sequence[int], key_dim: int,
) -> torch.Tensor:  # fmt: skip
    """The gated delta rule of queries, keys and values that have gone through a causal convolution and SiLU.

    Args:
        packed: of T tokens.
        mixed: [T, channels], the rows of queries, keys and values, `sizes` of them each.
        log_decay: float32 [T, heads], at most 0.
        strength: [T, heads], between 0 and 1.
        conv1d: [channels, 1, tokens].
        key_dim: of a head of queries or keys; there may be more heads of values than of keys.

    Returns:
        [T, heads, value dim], in the dtype of `mixed`.
    """
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    offsets, on_host = packed.int64_offsets
    sequences = {"cu_seqlens": offsets, "cu_seqlens_cpu": on_host}
    convolved, _state = causal_conv1d(mixed[None], conv1d.squeeze(1), activation="silu", **sequences)
    query, key, value = torch.split(convolved, list(sizes), -1)
    query, key = (torch.unflatten(x, -1, (-1, key_dim)) for x in (query, key))
    value = torch.unflatten(value, -1, (log_decay.shape[-1], -1))
    inputs = (query, key, value, log_decay[None], strength[None])
    out, _state = chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True, **sequences)
    heads: torch.Tensor = out[0]
    return heads


def gated_norm(heads: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm of each head [T, heads, dim] with `weight` [dim], times SiLU of `gate`, of the shape of `heads`."""
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    normed: torch.Tensor = rms_norm_gated(heads, gate, weight, None, activation="swish", eps=epsilon)
    return normed
