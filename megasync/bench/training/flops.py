"""What a training step of a model costs by its sizes: parameters, and operations of attention. No torch in here.

Leaves out the sizes themselves (megasync/hf/shapes.py) and what is measured (rank.py).

    6 * num_active_parameters(SHAPES["30b-a3b"])      # operations a token, forward and backward, without attention
"""

from __future__ import annotations

from typing import Any

from megasync.hf.shapes import Shapes


def read_shapes(hf_config: dict[str, Any]) -> Shapes:
    """Those of a config.json."""
    return Shapes(**{name: hf_config[name] for name in Shapes._fields if name in hf_config})


def num_parameters(shapes: Shapes) -> int:
    """All of them, tied embeddings once."""
    return _num_parameters(shapes, shapes.num_experts)


def num_active_parameters(shapes: Shapes) -> int:
    """Those that one token meets."""
    return _num_parameters(shapes, shapes.num_experts_per_tok)


def attention_flops(shapes: Shapes, sequence_length: int) -> int:
    """Of the two products with the causal attention matrix, a token, forward and backward."""
    return 6 * shapes.num_hidden_layers * _attention_size(shapes) * (sequence_length + 1)


def _attention_size(shapes: Shapes) -> int:
    return shapes.num_attention_heads * shapes.head_dim if shapes.head_dim else shapes.hidden_size


def _num_parameters(shapes: Shapes, num_experts: int) -> int:
    """With so many experts of those that there are."""
    attention_size = _attention_size(shapes)
    kv_size = 2 * shapes.num_key_value_heads * attention_size // shapes.num_attention_heads
    attention = (2 * attention_size + kv_size) * shapes.hidden_size
    if shapes.num_experts:
        norms = 2 * shapes.head_dim
        mlp = shapes.num_experts * shapes.hidden_size + num_experts * 3 * shapes.hidden_size * shapes.moe_intermediate_size
    else:
        norms, mlp = shapes.hidden_size + kv_size, 3 * shapes.hidden_size * shapes.intermediate_size  # not norms, but biases
    layer = attention + norms + mlp + 2 * shapes.hidden_size
    embeddings = shapes.vocab_size * shapes.hidden_size * (1 if shapes.tie_word_embeddings else 2)
    return shapes.num_hidden_layers * layer + embeddings + shapes.hidden_size
