"""Cost of a training step from a model's config.json: parameters, and operations of attention. No torch in here.

Leaves out the measurements (rank.py).

    6 * num_active_parameters(folder)      # operations a token, forward and backward, without attention
"""

from __future__ import annotations

import math
from pathlib import Path

from megasync.models.folder import model_fields, model_shape
from megasync.models.tensors import EMBEDDINGS, TIED_HEAD, expected_tensors, is_tied


def num_parameters(folder: str | Path) -> int:
    """All, tied embeddings once."""
    sizes = _sizes(folder)
    if is_tied(model_shape(folder), model_fields(folder)):
        del sizes[TIED_HEAD]
    return sum(sizes.values())


def num_active_parameters(folder: str | Path) -> int:
    """The parameters that one token is multiplied by: of experts its own, and no embeddings, which are looked up."""
    shape, total = model_shape(folder), 0
    for name, size in _sizes(folder).items():
        if name != EMBEDDINGS:
            total += size * shape.num_experts_per_tok // shape.num_experts if ".experts." in name else size
    return total


def attention_flops(folder: str | Path, sequence_length: int) -> int:
    """A token's, forward and backward: two products with the causal attention matrix, three with a delta net's state."""
    shape = model_shape(folder)
    width = shape.num_attention_heads * (shape.head_dim or shape.hidden_size // shape.num_attention_heads)
    states = shape.linear_num_value_heads * shape.linear_key_head_dim * shape.linear_value_head_dim
    return 6 * shape.num_cached_layers * width * (sequence_length + 1) + 18 * shape.num_delta_net_layers * states


def _sizes(folder: str | Path) -> dict[str, int]:
    tensors = expected_tensors(model_shape(folder), model_fields(folder))
    return {name: math.prod(size) for name, size in tensors.items()}
