"""Qwen 3.5's text models (model_type qwen3_5_text, qwen3_5_moe_text), a family that mbridge 0.15.1 lacks.

Three of four layers have a gated delta net (attention/delta_net.py), the others attention whose queries come with an output gate
and whose heads are rotated in part. Norms have weights around 0. With experts: routed ones and a shared one with a gate.
A bridge of a family gives: megatron-core's config; names of both sides; how Hugging Face's tensors make up a fused one, and
which of its rows a tensor-parallel rank has. The export runs these functions on meta tensors. Leaves out vision layers and
layers of multi-token prediction.
Of mbridge it takes LLMBridge and Qwen2MoEBridge's names of experts, of megatron-core fields that 0.19 has, too.
Source: transformers 5.19 models/qwen3_5/modeling_qwen3_5.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from engine.attention.delta_net import MIXED, GatedDeltaNet, merge_ranks, split_ranks, split_sizes
from engine.attention.windows import FULL


from mbridge.core.bridge import register_model
from mbridge.core.llm_bridge import LLMBridge
from mbridge.models.qwen2moe import Qwen2MoEBridge

LAYER = "model.layers.{layer_number}."
DELTA_NET = LAYER + "linear_attn."
FUSED = ("in_proj.weight", "conv1d")  # tensors of several parts; tensor parallelism splits each part


def use_layers(layer: Any, config: Any, number: int) -> None:
    """Put a gated delta net into megatron-core's spec of a transformer layer, where the model has one there."""
    if config.linear_attention_freq[number]:
        layer.submodules.self_attention.module = GatedDeltaNet
        layer.submodules.self_attention.submodules = None


def part_sizes(name: str, config: Any) -> list[int]:
    """Rows of each part of a fused tensor, over all tensor-parallel ranks. `name`: megatron-core's."""
    return split_sizes(config) if name.endswith(FUSED[0]) else split_sizes(config)[:MIXED]


@register_model("qwen3_5_text")
class Qwen35Bridge(LLMBridge):  # type: ignore[misc]
    """The bridge of dense models, in which every layer has an MLP."""

    _ATTENTION_MAPPING: ClassVar = {
        **LLMBridge._ATTENTION_MAPPING,
        "self_attention.in_proj.weight": [f"{DELTA_NET}in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")],
        "self_attention.conv1d": [f"{DELTA_NET}conv1d.weight"],
        "self_attention.A_log": [f"{DELTA_NET}A_log"],
        "self_attention.dt_bias": [f"{DELTA_NET}dt_bias"],
        "self_attention.norm": [f"{DELTA_NET}norm.weight"],
        "self_attention.out_proj.weight": [f"{DELTA_NET}out_proj.weight"],
    }

    def _build_config(self) -> Any:
        return self._build_base_config(**self._own_fields())

    def _own_fields(self) -> dict[str, Any]:
        """Fields for megatron-core's TransformerConfig."""
        fields = ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")
        return {
            "qk_layernorm": True,
            "layernorm_zero_centered_gamma": True,
            "attention_output_gate": True,
            "linear_attention_freq": [int(kind != FULL) for kind in self.hf_config.layer_types],
            **{f"linear_{name}": getattr(self.hf_config, f"linear_{name}") for name in fields},
        }

    def _get_gptmodel_args(self) -> dict[str, Any]:
        return {**super()._get_gptmodel_args(), "rotary_percent": self.hf_config.partial_rotary_factor}

    def _weight_to_hf_format(self, name: str, weight: torch.Tensor) -> tuple[list[str], list[torch.Tensor]]:
        hf_names = self._weight_name_mapping_mcore_to_hf(name)
        if name.endswith(FUSED[0]):
            sizes = part_sizes(name, self.config)
            return hf_names, list(torch.split(weight, [sum(sizes[:MIXED]), *sizes[MIXED:]]))
        if name.endswith("linear_qkv.weight"):
            query, key, value = torch.split(self._groups(weight), self._heads_of_group(), 1)
            query = torch.unflatten(query, 1, (2, -1)).transpose(1, 2)  # a head's queries lie beside its gate there
            return hf_names, [part.reshape(-1, weight.shape[1]) for part in (query, key, value)]
        return super()._weight_to_hf_format(name, weight)  # type: ignore[no-any-return]

    def _weight_to_mcore_format(self, name: str, weights: list[torch.Tensor]) -> torch.Tensor:
        weights = [weight.to(self.dtype) for weight in weights]
        if name.endswith(FUSED[0]):
            return torch.cat(weights)
        if name.endswith("linear_qkv.weight"):
            groups, size = self.config.num_query_groups, self.config.kv_channels
            query, key, value = (weight.view(groups, -1, size, weight.shape[1]) for weight in weights)
            query = torch.unflatten(query, 1, (-1, 2)).transpose(1, 2).flatten(1, 2)
            return torch.cat((query, key, value), 1).flatten(0, 2)
        return super()._weight_to_mcore_format(name, weights)  # type: ignore[no-any-return]

    def _weight_merge_across_tp(self, name: str, weights: list[torch.Tensor], param: Any) -> torch.Tensor:
        if name.endswith(FUSED):
            return merge_ranks(weights, part_sizes(name, self.config))
        return super()._weight_merge_across_tp(name, weights, param)  # type: ignore[no-any-return]

    def _weight_split_across_tp(
        self, name: str, weights: torch.Tensor, param: torch.Tensor, tp_split_size: int
    ) -> Iterable[torch.Tensor]:
        if name.endswith(FUSED):
            return split_ranks(weights, part_sizes(name, self.config), tp_split_size)
        return super()._weight_split_across_tp(name, weights, param, tp_split_size)  # type: ignore[no-any-return]

    def _groups(self, weight: torch.Tensor) -> torch.Tensor:
        """linear_qkv [rows, n] as [groups, heads, head dim, n]: a group's queries, their gates, its key and its value."""
        return weight.view(self.config.num_query_groups, -1, self.config.kv_channels, weight.shape[1])

    def _heads_of_group(self) -> list[int]:
        return [2 * self.config.num_attention_heads // self.config.num_query_groups, 1, 1]


@register_model("qwen3_5_moe_text")
class Qwen35MoeBridge(Qwen35Bridge):
    """With experts in every layer."""

    _MLP_MAPPING = Qwen2MoEBridge._MLP_MAPPING
    _weight_name_mapping_mlp = Qwen2MoEBridge._weight_name_mapping_mlp

    def _own_fields(self) -> dict[str, Any]:
        return {
            **super()._own_fields(),
            "moe_ffn_hidden_size": self.hf_config.moe_intermediate_size,
            "moe_router_topk": self.hf_config.num_experts_per_tok,
            "num_moe_experts": self.hf_config.num_experts,
            "moe_router_score_function": "softmax",
        }
