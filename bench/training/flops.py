"""What a training step of a model costs by its sizes: parameters, and operations of attention. No torch in here.

Leaves out the sizes themselves (megasync/models/model_shape.py) and the measurements (rank.py).

    6 * num_active_parameters(SHAPES["30b-a3b"])      # operations a token, forward and backward, without attention
"""

from __future__ import annotations

import math
import re
from typing import Any

from bench.common.model import tensors_of
from megasync.models.model_shape import Shapes

EXPERT = re.compile(r"\.experts\.(\d+)\.")


def read_shapes(hf_config: dict[str, Any]) -> Shapes:
    """Those of a config.json."""
    return Shapes(**{name: hf_config[name] for name in Shapes._fields if name in hf_config})


def num_parameters(shapes: Shapes, num_experts: int) -> int:
    """With so many experts of those that there are, tied embeddings once."""
    tensors = tensors_of(shapes.hf_config(1))
    experts = {name: EXPERT.search(name) for name in tensors}
    return sum(math.prod(tensors[name]) for name, found in experts.items() if found is None or int(found[1]) < num_experts)


def num_active_parameters(shapes: Shapes) -> int:
    """Those that one token meets."""
    return num_parameters(shapes, shapes.num_experts_per_tok)


def attention_flops(shapes: Shapes, sequence_length: int) -> int:
    """Of the two products with the causal attention matrix, a token, forward and backward."""
    size = shapes.num_attention_heads * shapes.head_dim if shapes.head_dim else shapes.hidden_size
    return 6 * shapes.num_hidden_layers * size * (sequence_length + 1)
