"""OLMo 3 (model_type olmo3): Gemma 3's layers without their norms before attention and MLP, in Qwen 3's bridge.

Queries and keys are normalised over all heads of a token together; layers with a sliding window have a rotary embedding of their
own. Source: transformers 5.19 models/olmo3/modeling_olmo3.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from engine.model.families import gemma
from engine.runtime import device
from engine.runtime.megatron import IdentityOp, tensor_parallel


def config_arguments() -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig, for mbridge's set_extra_args."""
    # with it finalize_model_grads.py:355 would sum the gradients of q_layernorm and k_layernorm, which are sharded over ranks
    return {"qk_layernorm": False}


def use_layers(layer: Any, config: Any, number: int) -> None:
    """Put this family's attention, MLP and norms into megatron-core's spec of a transformer layer."""
    gemma.use_layers(layer, config, number)
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    attention = parts.self_attention.submodules
    attention.core_attention, attention.q_layernorm, attention.k_layernorm = ScaledByKind, QueryNorm, KeyNorm


class ScaledByKind(gemma.RotatedByKind):
    """The config's `softmax_scale` has YaRN's factor (rope.py), which layers with a window do not have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.window:
            self.scale = None


class _NormOfHeads(torch.nn.Module):
    """RMSNorm of all heads of a token together. Each tensor-parallel rank has its heads' part of the weight."""

    num_heads: str  # a field of TransformerConfig

    def __init__(self, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
        """`hidden_size`: of a head."""
        super().__init__()
        self.eps, self.size = eps, hidden_size * getattr(config, self.num_heads)
        self.num_ranks: int = config.tensor_model_parallel_size
        ones = torch.ones(self.size // self.num_ranks, dtype=config.params_dtype, device=device.compute_device())
        self.weight = torch.nn.Parameter(ones)
        tensor_parallel.set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., heads of this rank, dim] to the same."""
        heads = x.flatten(-2)
        if self.num_ranks == 1:
            return F.rms_norm(heads, heads.shape[-1:], self.weight, self.eps).view(x.shape)
        wide = heads.float()
        squares = tensor_parallel.reduce_from_tensor_model_parallel_region(wide.square().sum(-1, keepdim=True))
        squares = tensor_parallel.copy_to_tensor_model_parallel_region(squares)  # whose gradients the ranks add up, too
        normed = wide * torch.rsqrt(squares / self.size + self.eps)
        return (self.weight * normed).to(x.dtype).view(x.shape)


class QueryNorm(_NormOfHeads):
    num_heads = "num_attention_heads"


class KeyNorm(_NormOfHeads):
    num_heads = "num_query_groups"
