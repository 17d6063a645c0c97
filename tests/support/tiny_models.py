"""Writes tiny Hugging Face folders for tests: random weights (norms and biases too) and a character tokenizer.

Leaves out anything trained: the models speak gibberish, but a wrong weight changes their tokens.

    python tests/support/tiny_models.py FOLDER qwen3 tied
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY_SIZE = 128
FAMILIES = {
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
LLAMA3 = {  # rope_parameters that scale some of the frequencies of a head of 32
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SERVED = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}  # what vLLM has kernels for multi-latent attention for
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 128}

DELTA_SERVED = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}  # and for gated delta nets
DELTA = {  # every second layer has attention
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
EXPERTS = {"num_hidden_layers": 2, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
BIASED = {"num_hidden_layers": 3, "moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 3}
BIASED |= {"routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0}
FIELDS: dict[str, dict[str, object]] = {  # of config.json, where a family's differ from the others'
    "deepseek_v3": {
        **BIASED,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        # queries and keys of 40, of which 16 are turned, and values of 20
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 20,
        "num_key_value_heads": 4,
    },
    "gemma3_text": {  # every second layer slides, by frequencies of its own
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "glm4_moe": {**BIASED, "attention_bias": True},
    "mixtral": {"num_hidden_layers": 2, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 96},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 96},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
}
WITHOUT_HEAD_DIM = ("deepseek_v3", "qwen2", "qwen2_moe")


def write_tokenizer(folder: Path) -> None:
    """One token a printable ASCII character; ids 0, 1, 2 are <pad>, <eos>, <bos>; none is added by itself."""
    characters = ["<pad>", "<eos>", "<bos>"] + [chr(code) for code in range(32, 127)]
    characters += [f"<x{index}>" for index in range(len(characters), VOCABULARY_SIZE)]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(characters)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>").save_pretrained(
        folder
    )


def build_tiny_model(family: str, tied: bool, seed: int, dtype: torch.dtype, **config: object) -> PreTrainedModel:
    """4 layers, hidden 128, 4 heads of 32, 2 KV heads; `config` overrides fields of the Hugging Face config."""
    config_class, model_class = FAMILIES[family]
    fields: dict[str, object] = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    if family in WITHOUT_HEAD_DIM:
        del fields["head_dim"]
    fields |= copy.deepcopy(FIELDS.get(family, {}))  # transformers adds to rope_parameters
    fields |= copy.deepcopy(config)
    model = model_class(config_class(**fields))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = name.endswith("norm.weight")
            is_centred = family == "gemma3_text" or ("qwen3_5" in family and "linear_attn" not in name)
            center = 0.0 if is_centred else 1.0  # of the weights of norms
            parameter.copy_(center + 0.1 * noise if is_norm else (0.1 if parameter.ndim > 1 else 0.05) * noise)
        for module in model.to(dtype).modules():
            if hasattr(module, "e_score_correction_bias"):  # float32 in folders of any dtype
                module.e_score_correction_bias = 0.2 * torch.randn(module.e_score_correction_bias.shape, generator=generator)
    return model


def write_tiny_model(
    folder: str | Path,
    family: str = "qwen3",
    tied: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: object,
) -> Path:
    """Write config.json, model.safetensors and the tokenizer into `folder`, which is returned."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    build_tiny_model(family, tied, seed, dtype, **config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


if __name__ == "__main__":
    print(write_tiny_model(sys.argv[1], sys.argv[2], tied="tied" in sys.argv[3:]))
