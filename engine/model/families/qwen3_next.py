"""Qwen3-Next (model_type qwen3_next): Qwen 3.5's layers with experts, whose fused projections Hugging Face holds by key heads.

Of each key head in_proj_qkvz has queries, keys, values and gates, in_proj_ba strengths and decays; here each part is whole.
Source: transformers 5.19 models/qwen3_next/modeling_qwen3_next.py:fix_query_key_value_ordering.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from engine.attention.delta_net import MIXED, by_key_heads, split_sizes
from engine.model.families.qwen3_5 import DELTA_NET, FUSED, Qwen35MoeBridge

from mbridge.core.bridge import register_model


NAME = "qwen3_next"


@register_model(NAME)
class Qwen3NextBridge(Qwen35MoeBridge):
    _ATTENTION_MAPPING: ClassVar = {
        **Qwen35MoeBridge._ATTENTION_MAPPING,
        "self_attention.in_proj.weight": [f"{DELTA_NET}in_proj_{part}.weight" for part in ("qkvz", "ba")],
    }

    def _weight_to_hf_format(self, name: str, weight: torch.Tensor) -> tuple[list[str], list[torch.Tensor]]:
        if not name.endswith(FUSED[0]):
            return super()._weight_to_hf_format(name, weight)
        fused = by_key_heads(weight, split_sizes(self.config), self.config.linear_num_key_heads)
        return self._weight_name_mapping_mcore_to_hf(name), fused

    def _weight_to_mcore_format(self, name: str, weights: list[torch.Tensor]) -> torch.Tensor:
        if not name.endswith(FUSED[0]):
            return super()._weight_to_mcore_format(name, weights)
        heads, sizes = self.config.linear_num_key_heads, split_sizes(self.config)
        parts: list[torch.Tensor] = []
        for fused, of_it in zip(weights, (sizes[: MIXED + 1], sizes[MIXED + 1 :]), strict=True):
            by_head = fused.to(self.dtype).view(heads, -1, fused.shape[1])
            parts += [part.flatten(0, 1) for part in torch.split(by_head, [size // heads for size in of_it], 1)]
        return torch.cat(parts)
