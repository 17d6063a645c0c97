"""vLLM's norms, activation, rotary embedding and linears with the functions of exact/.

The classes take the place of vLLM's own by the registry of out-of-tree layers (model_executor/custom_op.py); linears and output
layer by a quantization config, whose methods leave weights as they were loaded. Leaves out attention (attention.py).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers import activation, layernorm, rotary_embedding
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from exact import linear, pointwise, rotary


class ExactRMSNorm(layernorm.RMSNorm):  # type: ignore[misc] # mypy does not follow vLLM
    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        weight, eps = self.weight.data, self.variance_epsilon
        return pointwise.rms_norm(x, weight, eps) if residual is None else pointwise.add_rms_norm(x, residual, weight, eps)

    forward_cpu = forward_cuda = forward_native


class ExactSiluAndMul(activation.SiluAndMul):  # type: ignore[misc]
    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return pointwise.silu_and_mul(x)

    forward_cpu = forward_cuda = forward_native


class _Rotary(torch.nn.Module):
    """Mixed in before a rotary embedding of vLLM's: its table and its rotation."""

    rotary_dim: int
    head_size: int
    max_position_embeddings: int
    cos_sin_cache: torch.Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("cos_sin_cache", self._compute_cos_sin_cache(), persistent=False)  # theirs was rounded

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        assert self.rotary_dim == self.head_size
        found = rotary.frequencies(get_current_vllm_config().model_config.hf_text_config, self.head_size)
        return rotary.table(found, self.max_position_embeddings).to(torch.get_default_device())

    def forward_native(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, (cos, sin) = positions.flatten(), self.cos_sin_cache[:, None].chunk(2, -1)
        turned = (rotary.rotate(x.view(len(rows), -1, self.head_size), cos, sin, rows).view(x.shape) for x in (query, key))
        query, key = turned
        return query, key

    forward_cpu = forward_cuda = forward_native


class ExactRotaryEmbedding(_Rotary, rotary_embedding.RotaryEmbedding):  # type: ignore[misc]
    """rope_type default."""


class ExactLinearScaling(_Rotary, rotary_embedding.LinearScalingRotaryEmbedding):  # type: ignore[misc]
    """rope_type linear."""


class ExactLlama3(_Rotary, rotary_embedding.Llama3RotaryEmbedding):  # type: ignore[misc]
    """rope_type llama3."""


OUT_OF_TREE = {
    "RMSNorm": ExactRMSNorm,
    "SiluAndMul": ExactSiluAndMul,
    "RotaryEmbedding": ExactRotaryEmbedding,
    "LinearScalingRotaryEmbedding": ExactLinearScaling,
    "Llama3RotaryEmbedding": ExactLlama3,
}


@register_weight_loader_v2_supported_method
class ExactLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """vLLM's packs the weight away."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = linear.linear(x, layer.weight)
        return out if bias is None else out + bias


class ExactEmbeddingMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """See the linears' method."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the vocabulary without vLLM's padding."""
        out = linear.linear(x, layer.weight[: layer.org_vocab_size])
        return out if bias is None else out + bias


class ExactConfig(QuantizationConfig):  # type: ignore[misc]
    """Quantises nothing: it is how vLLM lets a plug-in choose what linears compute with."""

    def get_name(self) -> str:
        return "megasync_exact"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, _: dict[str, Any]) -> ExactConfig:
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, LinearBase):
            return ExactLinearMethod()
        return ExactEmbeddingMethod() if isinstance(layer, VocabParallelEmbedding) else None
