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

    @classmethod
    def read(cls, hf_config: dict[str, Any]) -> Shapes:
        """Those of a config.json."""
        return cls(**{name: hf_config[name] for name in cls._fields if name in hf_config})

    @property
    def attention_size(self) -> int:
        return self.num_attention_heads * self.head_dim if self.head_dim else self.hidden_size

    def _num_parameters(self, num_experts: int) -> int:
        """With so many experts of those that there are."""
        kv_size = 2 * self.num_key_value_heads * self.attention_size // self.num_attention_heads
        attention = (2 * self.attention_size + kv_size) * self.hidden_size
        if self.num_experts:
            norms = 2 * self.head_dim
            mlp = self.num_experts * self.hidden_size + num_experts * 3 * self.hidden_size * self.moe_intermediate_size
        else:
            norms, mlp = self.hidden_size + kv_size, 3 * self.hidden_size * self.intermediate_size  # not norms, but biases
        layer = attention + norms + mlp + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * layer + embeddings + self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All of them, tied embeddings once."""
        return self._num_parameters(self.num_experts)

    @property
    def num_active_parameters(self) -> int:
        """Those that one token meets."""
        return self._num_parameters(self.num_experts_per_tok)

    def attention_flops(self, sequence_length: int) -> int:
        """Of the two products with the causal attention matrix, a token, forward and backward."""
        return 6 * self.num_hidden_layers * self.attention_size * (sequence_length + 1)

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
    "3b": Shapes(2048, 11008, 36, 16, 2, 151936, True),
    "7b": Shapes(3584, 18944, 28, 28, 4, 152064, False),
    "30b-a3b": Shapes(2048, 6144, 48, 32, 4, 151936, False, 128, 128, 8, 768),
    "30b-a3b-6": Shapes(2048, 6144, 6, 32, 4, 151936, False, 128, 128, 8, 768),  # six layers of it
    "tiny": Shapes(128, 256, 2, 4, 2, 512, True),
    "tiny-moe": Shapes(128, 256, 2, 4, 2, 512, False, 32, 4, 2, 64),
}
