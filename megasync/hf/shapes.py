"""Sizes of well-known models, for random models of those sizes (assets.py, bench/). No torch in here."""

from __future__ import annotations

from typing import Any, NamedTuple


class Shapes(NamedTuple):
    """Sizes of a Qwen2.5; with experts, of a Qwen3 mixture of them."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    tie_word_embeddings: bool
    head_dim: int = 0  # this and the rest: 0 without experts
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0

    def hf_config(self, sequence_length: int) -> dict[str, Any]:
        """A config.json."""
        family: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
        if self.num_experts:
            family = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True}
        return {
            **family,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "initializer_range": 0.02,
            "max_position_embeddings": sequence_length,
            **{name: value for name, value in self._asdict().items() if value or name == "tie_word_embeddings"},
        }


SHAPES = {
    "135m": Shapes(576, 1536, 30, 9, 3, 49152, True),
    "3b": Shapes(2048, 11008, 36, 16, 2, 151936, True),
    "7b": Shapes(3584, 18944, 28, 28, 4, 152064, False),
    "30b-a3b": Shapes(2048, 6144, 48, 32, 4, 151936, False, 128, 128, 8, 768),
    "30b-a3b-6": Shapes(2048, 6144, 6, 32, 4, 151936, False, 128, 128, 8, 768),  # six layers of it
    "tiny": Shapes(128, 256, 2, 4, 2, 512, True),
    "tiny-moe": Shapes(128, 256, 2, 4, 2, 512, False, 32, 4, 2, 64),
}
