"""The sizes of a model by its config.json; of well-known ones, for random models of them (tools/assets, bench/). No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

# vllm 0.32, transformers_utils/model_arch_config_convertor.py:396 and config/model.py:2579
MODEL_MAX_LENGTH = "model_max_length"  # counts alone, where it is given
LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", MODEL_MAX_LENGTH, "max_target_positions"),
    *("max_sequence_length", "max_seq_length", "seq_len"),
)
MAX_FACTOR = 2**20
UNSCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")  # types of rotary embeddings


@dataclass(frozen=True)
class ModelShape:
    """Sizes that parallel sizes must divide; the field names are those of config.json."""

    model_type: str
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    intermediate_size: int
    hidden_size: int
    num_experts: int = 0  # 0, and so the next two: no mixture of experts
    moe_intermediate_size: int = 0
    num_experts_per_tok: int = 0
    max_position_embeddings: int = 0  # by `longest_sequence`; 0: no limit is given
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    shared_expert_intermediate_size: int = 0  # 0: there is no expert that all tokens go through, or it is as large as the others
    first_k_dense_replace: int = 0  # layers before those with experts
    q_lora_rank: int = 0  # 0: queries have no low rank
    kv_lora_rank: int = 0  # 0, and so the next three: no multi-latent attention
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    num_delta_net_layers: int = 0  # of all layers those with a gated delta net; 0, and so the rest: there are none
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0

    @property
    def num_cached_layers(self) -> int:
        """Whose keys and values vLLM keeps of each token. A gated delta net has a state of one size, which is not counted."""
        return self.num_hidden_layers - self.num_delta_net_layers

    @property
    def split_sizes(self) -> tuple[str, ...]:
        """Which of the sizes above tensor parallelism cuts in the layers' feed-forward parts."""
        if not self.num_experts:
            return ("intermediate_size",)
        return ("moe_intermediate_size", *(("intermediate_size",) if self.first_k_dense_replace else ()))

    def cached_numbers(self, num_workers: int) -> int:
        """Numbers that a vLLM worker caches of a token in a layer."""
        if self.kv_lora_rank:
            return self.kv_lora_rank + self.qk_rope_head_dim
        size = self.head_dim or self.hidden_size // self.num_attention_heads
        return 2 * max(1, self.num_key_value_heads // num_workers) * size


def longest_sequence(fields: Mapping[str, Any]) -> tuple[str, int]:
    """The field that limits the length of a sequence in vLLM, with its factor, and the limit in tokens; ("", 0): no limit."""
    given = {name: fields[name] for name in LENGTHS if fields.get(name) is not None}
    field = MODEL_MAX_LENGTH if MODEL_MAX_LENGTH in given else min(given, key=given.__getitem__, default="")
    factor = _length_factor(fields)
    return field if factor == 1 else f"{field} and the factor {factor:g}", int(given.get(field, 0) * factor)


def _length_factor(fields: Mapping[str, Any]) -> float:
    """The factor by which rotary embeddings extend sequences; 1 for Gemma 3, whose positions include it."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling")
    rope = rope if isinstance(rope, dict) and "gemma3" not in str(fields.get("model_type")) else {}
    by_layer_type = [each for each in rope.values() if isinstance(each, dict)]
    scaled = [each for each in by_layer_type or [rope] if (each.get("rope_type") or each.get("type")) not in UNSCALED]
    factor = next((each["factor"] for each in reversed(scaled) if "factor" in each), 1)
    return factor if type(factor) in (int, float) and 1 <= factor < MAX_FACTOR else 1


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
    "100m": Shapes(768, 2048, 12, 12, 4, 32768, True),
    "135m": Shapes(576, 1536, 30, 9, 3, 49152, True),
    "3b": Shapes(2048, 11008, 36, 16, 2, 151936, True),
    "7b": Shapes(3584, 18944, 28, 28, 4, 152064, False),
    "30b-a3b": Shapes(2048, 6144, 48, 32, 4, 151936, False, 128, 128, 8, 768),
    "30b-a3b-6": Shapes(2048, 6144, 6, 32, 4, 151936, False, 128, 128, 8, 768),  # six layers of it
    "tiny": Shapes(128, 256, 2, 4, 2, 512, True),
    "tiny-moe": Shapes(128, 256, 2, 4, 2, 512, False, 32, 4, 2, 64),
}
