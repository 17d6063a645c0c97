"""The sizes of a model, by its config.json. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """What parallel sizes must divide; the field names are those of config.json."""

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
    max_position_embeddings: int = 0  # 0: no limit is given
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    shared_expert_intermediate_size: int = 0  # 0: there is no expert that all tokens go through, or it is as large as the others
    first_k_dense_replace: int = 0  # layers before those with experts
    q_lora_rank: int = 0  # 0: queries have no low rank
    kv_lora_rank: int = 0  # 0, and so the next three: no multi-latent attention
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    @property
    def split_sizes(self) -> tuple[str, ...]:
        """Which of the sizes above tensor parallelism cuts in the layers' feed-forward parts."""
        if not self.num_experts:
            return ("intermediate_size",)
        return ("moe_intermediate_size", *(("intermediate_size",) if self.first_k_dense_replace else ()))

    def cached_numbers(self, num_workers: int) -> int:
        """That a worker of vLLM keeps of a token in a layer."""
        if self.kv_lora_rank:
            return self.kv_lora_rank + self.qk_rope_head_dim
        size = self.head_dim or self.hidden_size // self.num_attention_heads
        return 2 * max(1, self.num_key_value_heads // num_workers) * size
