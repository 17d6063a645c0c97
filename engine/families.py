"""What tells families apart and mbridge 0.15.1 does not know: whose bridge one takes, and fields that others write otherwise.

Leaves out the layers (model.py) and rotary embeddings (rope.py).
"""

from __future__ import annotations

from typing import Any

from engine import upstream

BRIDGE_OF = {"mistral": "llama"}  # families with the layers and names of another, which mbridge does not list


def complete(hf_config: Any) -> None:
    """Set the fields that mbridge and the engine read, where this family or version of transformers has them otherwise."""
    hf_config.rope_theta = upstream.rope_theta(hf_config)
    hf_config.head_dim = upstream.head_dim(hf_config)
    if hf_config.model_type == "mixtral":
        hf_config.moe_intermediate_size = hf_config.intermediate_size
        hf_config.norm_topk_prob = True  # transformers 5.19, modeling_mixtral.py:MixtralTopKRouter
