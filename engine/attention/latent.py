"""Multi-latent attention (DeepSeek-V2, arXiv:2405.04434): queries, keys and values out of low ranks, rotation in a part of heads.

megatron-core's attention with projections of its own: those to the low ranks are whole on every tensor-parallel rank, over the
rank's own tokens, as megatron-core has them with TransformerEngine alone. With its column-parallel ones
(multi_latent_attention.py:680) the part of the keys that all heads share gets the gradient of one rank's heads only.
Norms in low ranks have rms_norm_eps, as in vLLM; transformers has 1e-6 there. Rotations are those of a micro-batch, made once.
Leaves out core attention (core.py) and how frequencies are scaled (rope.py). Sources: megatron-core 0.16.1
transformer/multi_latent_attention.py; transformers 5.19, modeling_deepseek_v3.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from engine.runtime import device, workarounds
from engine.attention import fused, rope
from engine.attention.core import RMSNorm
from engine.config import LATENT_FAMILIES
from engine.runtime.megatron import (
    ColumnParallelLinear,
    MLASelfAttention,
    MLATransformerConfig,
    MultiLatentAttention,
    tensor_parallel,
)
from engine.batch.packed import PackedSequences

from mbridge.core.llm_bridge import LLMBridge

Tables = tuple[torch.Tensor, torch.Tensor]


class Rotation(NamedTuple):
    """The rotation of a model's rotary embedding."""

    frequencies: torch.Tensor  # float32 [turned elements of a head / 2]
    factor: float  # of cosine and sine

    def tables(self, position_ids: torch.Tensor) -> Tables:
        """Cosine and sine, each float32 [T, 1, turned / 2]. `position_ids`: int64 [1, T], within each token's own sequence."""
        angles = position_ids[0, :, None, None].float() * self.frequencies
        return angles.cos() * self.factor, angles.sin() * self.factor


def rotation(hf_config: Any) -> Rotation | None:
    """None for a model without multi-latent attention."""
    if hf_config.model_type not in LATENT_FAMILIES:
        return None
    scaled = rope.scaling(hf_config)
    if scaled is None:
        size = hf_config.qk_rope_head_dim
        scaled = 1.0 / hf_config.rope_theta ** (torch.arange(0, size, 2).float() / size), 1.0
    return Rotation(scaled[0].to(device.compute_device()), scaled[1])


def config_arguments(hf_config: Any) -> dict[str, Any]:
    """Fields of megatron-core's MLATransformerConfig, for mbridge's set_extra_args; none for other models."""
    if hf_config.model_type not in LATENT_FAMILIES:
        return {}
    workarounds.use_latent_attention_without_te()
    is_scaled = rope.scaling(hf_config) is not None
    return {
        "rope_type": "rope",
        # of these the softmax's scale is made (multi_latent_attention.py:121), as in transformers
        "rotary_scaling_factor": hf_config.rope_parameters["factor"] if is_scaled else 1.0,
        "mscale_all_dim": hf_config.rope_parameters.get("mscale_all_dim") or 0.0,
        "attention_backend": "auto",  # as the other families: it is set for the process (language_module.py:102)
        "mtp_num_layers": None,
        "disable_bf16_reduced_precision_matmul": False,
    }


def complete_tables(tables: dict[str, Any], layer: str) -> None:
    """Add what mbridge 0.15.1's bridge (models/deepseek_v3.py) lacks to what a class is made of out of it.

    Names of the norms, which are those of linears with TransformerEngine; a padded vocabulary; folders in float32; and a field of
    megatron-core's config that has another name in 0.16.1.
    `layer`: what the names of a layer's tensors begin with.
    """
    for name in ("q", "kv"):
        tables["_ATTENTION_MAPPING"][f"self_attention.{name}_layernorm.weight"] = [f"{layer}self_attn.{name}_a_layernorm.weight"]
    for name in ("_get_safetensor_io", "_model_provider", "_weight_to_hf_format"):
        tables[name] = getattr(LLMBridge, name)
    tables["TransformerConfigClass"] = staticmethod(_transformer_config)


def _transformer_config(**fields: Any) -> Any:
    del fields["max_position_embeddings"]  # which is for the frequencies of YaRN: rope.py has them
    return MLATransformerConfig(**fields)


def use_latent_attention(layer: Any) -> None:
    """Put our attention into megatron-core's spec of a transformer layer, where that has its own."""
    if layer.submodules.self_attention.module is MLASelfAttention:
        layer.submodules.self_attention.module = LatentAttention


class ReplicatedLinear(torch.nn.Module):
    """Whole on each tensor-parallel rank, without bias. Under sequence parallelism a rank's gradient is that of its tokens."""

    def __init__(self, num_inputs: int, num_outputs: int, config: Any) -> None:
        super().__init__()
        self.input_size, self.output_size, self.sequence_parallel = num_inputs, num_outputs, config.sequence_parallel
        weight = torch.empty(num_outputs, num_inputs, dtype=config.params_dtype, device=device.compute_device())
        self.weight = torch.nn.Parameter(weight)
        if config.perform_initialization:
            config.init_method(self.weight)
        if config.sequence_parallel:  # finalize_model_grads.py:354 sums parameters with this flag over tensor-parallel ranks
            self.weight.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.linear(inputs, self.weight)


class LatentAttention(MultiLatentAttention):  # type: ignore[misc]
    """In place of MLASelfAttention, with its names. Takes packed sequences whose `rotary` is Rotation.tables."""

    def __init__(self, config: Any, submodules: Any, **options: Any) -> None:
        super().__init__(config, submodules, attention_type="self", **options)
        self.core_attention.rotates = False  # that turns whole heads
        self.rotate = fused.rotate if config.no_rope_freq else fused.rotate_plainly
        hidden, rank, heads = config.hidden_size, config.q_lora_rank, config.num_attention_heads
        if rank is None:
            self.linear_q_proj = self._heads(hidden, heads * self.q_head_dim)
        else:
            self.linear_q_down_proj = ReplicatedLinear(hidden, rank, config)
            self.q_layernorm = RMSNorm(config, rank, config.layernorm_epsilon)
            self.linear_q_up_proj = self._heads(rank, heads * self.q_head_dim)
        self.linear_kv_down_proj = ReplicatedLinear(hidden, config.kv_lora_rank + config.qk_pos_emb_head_dim, config)
        self.kv_layernorm = RMSNorm(config, config.kv_lora_rank, config.layernorm_epsilon)
        self.linear_kv_up_proj = self._heads(config.kv_lora_rank, heads * (config.qk_head_dim + config.v_head_dim))

    def _heads(self, num_inputs: int, num_outputs: int) -> Any:
        """A projection to this rank's heads."""
        options = {"bias": False, "gather_output": False, "skip_bias_add": False, "is_expert": False}
        init = self.config.init_method
        return ColumnParallelLinear(
            num_inputs, num_outputs, config=self.config, init_method=init, tp_group=self.tp_group, **options
        )

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: None,
        position_ids: None,
        packed_seq_params: PackedSequences,
        inference_context: None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        """[own tokens, 1, hidden] to query and key [T, heads, plain + turned] and value [T, heads, v], of this rank's heads."""
        assert packed_seq_params.rotary is not None
        config, heads = self.config, self.num_attention_heads_per_partition
        sizes = [config.qk_head_dim, config.v_head_dim]
        low, shared = self.linear_kv_down_proj(hidden_states).split([config.kv_lora_rank, config.qk_pos_emb_head_dim], -1)
        if config.sequence_parallel:  # backwards the sum over ranks, of which each has some heads
            shared = tensor_parallel.gather_from_sequence_parallel_region(shared, group=self.tp_group)
        high, _ = self.linear_kv_up_proj(self.kv_layernorm(low))
        key, value = high.view(-1, heads, sum(sizes)).split(sizes, -1)
        query = self._queries(hidden_states).view(-1, heads, self.q_head_dim)
        query, turned = torch.split(query, [config.qk_head_dim, config.qk_pos_emb_head_dim], -1)
        turned, shared = self.rotate(_halves(turned), _halves(shared), packed_seq_params.rotary)
        query, key = torch.cat([query, turned], -1), torch.cat([key, shared.expand(-1, heads, -1)], -1)
        return query, key, value, None, None

    def _queries(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[own tokens, 1, hidden] to [T, 1, heads * (plain + turned)]."""
        if self.config.q_lora_rank is None:
            queries, _ = self.linear_q_proj(hidden_states)
        else:
            queries, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)))
        return queries  # type: ignore[no-any-return]


def _halves(pairs: torch.Tensor) -> torch.Tensor:
    """Elements that are turned together, from beside each other to a half apart."""
    return torch.cat((pairs[..., 0::2], pairs[..., 1::2]), -1)
