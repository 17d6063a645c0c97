"""The cost of a step's parts, in multiplications by weights and of attention. Pure functions; no torch in here.

Each counts a token's, forward; the backward pass has twice as many, of all parts. `config` is megatron-core's TransformerConfig.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def _attention_columns(config: Any) -> float:
    """Weights of a layer's attention, or of its gated delta net, over the hidden size; a mean over layers."""
    heads = config.num_attention_heads
    if config.linear_attention_freq:
        share = sum(config.linear_attention_freq) / config.num_layers
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        attention = 3 * heads * config.kv_channels + 2 * config.num_query_groups * config.kv_channels
        return float(share * (2 * keys + 3 * values + 2 * config.linear_num_value_heads) + (1 - share) * attention)
    if not config.multi_latent_attention:
        return float(2 * heads * config.kv_channels + 2 * config.num_query_groups * config.kv_channels)
    query_size, low = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim), config.q_lora_rank
    queries = low + low * query_size / config.hidden_size if low else query_size
    up = config.kv_lora_rank * heads * (config.qk_head_dim + config.v_head_dim) / config.hidden_size
    return float(queries + config.kv_lora_rank + config.qk_pos_emb_head_dim + up + heads * config.v_head_dim)


def _attention_size(config: Any) -> float:
    """The dim of queries over all heads, or the mean of the dims of queries and of values."""
    if not config.multi_latent_attention:
        return float(config.num_attention_heads * config.kv_channels)
    return float(config.num_attention_heads * (config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim) / 2)


def _layer_columns(config: Any) -> int:
    """Weights of a layer that a token meets, over the hidden size."""
    attention = _attention_columns(config)
    if not config.num_moe_experts:
        return int(attention + 3 * config.ffn_hidden_size)
    shared = config.moe_shared_expert_intermediate_size or 0
    return int(attention + config.num_moe_experts + 3 * (config.moe_router_topk * config.moe_ffn_hidden_size + shared))


def output_cost(config: Any, vocabulary_size: int) -> float:
    """The output layer's cost over that of a transformer layer, without the attention matrix."""
    return vocabulary_size / _layer_columns(config)


def attention_costs(lengths: npt.NDArray[np.int64], windows: Sequence[int]) -> npt.NDArray[np.int64]:
    """The size of sequences' causal attention matrices, averaged over layers: without a window the square of the tokens.

    `windows`: of each layer the tokens that one attends to, 0 where it has no window.
    """
    total = np.zeros_like(lengths)
    for window, count in Counter(windows).items():
        seen = np.minimum(lengths, window) if window else lengths
        total += seen * (2 * lengths - seen) // len(windows) * count
    return total


def attention_length(config: Any, vocabulary_size: int) -> float:
    """Tokens of a sequence whose causal attention matrices cost as much as all else, the output layer too; without windows."""
    columns = config.num_layers * _layer_columns(config) + vocabulary_size
    return float(config.hidden_size * columns / (config.num_layers * _attention_size(config)))
