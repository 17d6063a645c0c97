"""Multiplications of a model's passes, by token, from the engine's counts (engine/batch/costs.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.attention import windows
from engine.batch import costs


@dataclass(frozen=True)
class ModelCosts:
    """Multiplications of a token's forward pass by weights, and of attention in units of them."""

    layers: float  # of all layers, by weights
    mlp: float  # of them those of MLPs or experts
    output: float  # of the output layer
    attention_length: float  # tokens of a sequence whose attention costs as much as all else
    windows: tuple[int, ...]
    num_layers: int
    hidden_size: int
    experts_per_token: int  # 0: no experts
    widths: Mapping[str, int]  # inputs and outputs of a token in a layer, by linear

    @staticmethod
    def of(bridge: Any) -> ModelCosts:
        """`bridge`: mbridge's, of the whole model."""
        config, vocabulary = bridge.config, bridge.hf_config.vocab_size
        columns = vocabulary / costs.output_cost(config, vocabulary)
        width = config.moe_router_topk * config.moe_ffn_hidden_size if config.num_moe_experts else config.ffn_hidden_size
        heads, groups = config.num_attention_heads * config.kv_channels, config.num_query_groups * config.kv_channels
        copies = config.moe_router_topk if config.num_moe_experts else 1
        return ModelCosts(
            layers=config.hidden_size * columns * config.num_layers,
            mlp=3.0 * config.hidden_size * width * config.num_layers,
            output=float(config.hidden_size * vocabulary),
            attention_length=costs.attention_length(config, vocabulary),
            windows=tuple(windows.layer_windows(bridge.hf_config.to_dict())),
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            experts_per_token=config.moe_router_topk if config.num_moe_experts else 0,
            widths={
                "linear_qkv": config.hidden_size + heads + 2 * groups,
                "linear_proj": heads + config.hidden_size,
                "linear_fc1": copies * config.hidden_size + 2 * width,
                "linear_fc2": width + copies * config.hidden_size,
            },
        )

    def attention_of_token(self, context: float) -> float:
        """Multiplications of one token that attends to so many, in all layers."""
        width = self.widths["linear_proj"] - self.hidden_size
        return 2 * width * sum(min(context, window or context) for window in self.windows)

    def attention(self, lengths: tuple[int, ...]) -> float:
        """Multiplications a token, mean over sequences of these lengths."""
        sizes = np.array(lengths, np.int64)
        whole = self.layers + self.output
        return float(whole * costs.attention_costs(sizes, self.windows).sum() / self.attention_length / sizes.sum())
