"""Writes tiny Hugging Face folders for tests: random weights (norms and biases too) and a character tokenizer.

Leaves out anything trained: the models speak gibberish, but a wrong weight changes their tokens.

    python tests/support/tiny_models.py FOLDER qwen3 tied
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from engine.config import DELTA_NET_FAMILIES
from engine.model.families import kimi_k2

kimi_k2.register_model()
VOCABULARY_SIZE = 128
FAMILIES = {
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
    "kimi_k2": (kimi_k2.KimiK2Config, AutoModelForCausalLM._model_mapping[kimi_k2.KimiK2Config]),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "olmo3": (Olmo3Config, Olmo3ForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
    "seed_oss": (SeedOssConfig, SeedOssForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
}
WITH_VISION: dict[str, tuple[str, Any, Any]] = {  # the language model's family, and classes
    "gemma3": ("gemma3_text", Gemma3Config, Gemma3ForConditionalGeneration),
    "qwen2_5_vl": ("qwen2", Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen3_5": ("qwen3_5_text", Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": ("qwen3_5_moe_text", Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
    "qwen3_vl": ("qwen3", Qwen3VLConfig, Qwen3VLForConditionalGeneration),
}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4}
VISIONS: dict[str, dict[str, object]] = {
    "gemma3": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16}
    | {"patch_size": 4},
    "qwen2_5_vl": {**VISION, "fullatt_block_indexes": [0]},
    "qwen3_5": {**VISION, "num_position_embeddings": 16},
    "qwen3_5_moe": {**VISION, "num_position_embeddings": 16},
    "qwen3_vl": {**VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}
IMAGES = {  # sections of a head of 32 that images' rotary embeddings have
    "qwen2_5_vl": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 6, 6]},
    "qwen3_vl": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True},
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
LATENT = {  # queries and keys have 40 dimensions, 16 of them rotary; values have 20
    **BIASED,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
}
FIELDS: dict[str, dict[str, object]] = {  # of config.json, where a family's differ from the others'
    "deepseek_v3": {**LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
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
    "glm4_moe_lite": {**LATENT, "rms_norm_eps": 1e-6},
    "gpt_oss": {  # every second layer slides
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    },
    "kimi_k2": {**LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "mixtral": {"num_hidden_layers": 2, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo3": {  # every fourth layer does not slide, and has frequencies and a scale of its own
        "sliding_window": 8,
        "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "qwen2_moe": {**EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 96},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 96},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 96},
}
WITHOUT_HEAD_DIM = ("deepseek_v3", "glm4_moe_lite", "kimi_k2", "olmo3", "qwen2", "qwen2_5_vl", "qwen2_moe")


def write_tokenizer(folder: Path) -> None:
    """One token a printable ASCII character; ids 0, 1, 2 are <pad>, <eos>, <bos>; none is added by itself."""
    characters = ["<pad>", "<eos>", "<bos>"] + [chr(code) for code in range(32, 127)]
    characters += [f"<x{index}>" for index in range(len(characters), VOCABULARY_SIZE)]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(characters)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>").save_pretrained(
        folder
    )


def write_templates(folder: Path) -> None:
    """Chat templates of a model that has another one for conversations with tools."""
    (folder / "chat_template.jinja").write_text("plain")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")


def build_tiny_model(family: str, tied: bool, seed: int, dtype: torch.dtype, **config: object) -> PreTrainedModel:
    """4 layers, hidden 128, 4 heads of 32, 2 KV heads; `config` overrides fields of the Hugging Face config."""
    (text, *_), (config_class, model_class) = WITH_VISION.get(family, (family,)), FAMILIES.get(family) or WITH_VISION[family][1:]
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
    fields |= copy.deepcopy(FIELDS.get(text, {}))  # transformers adds to rope_parameters
    fields |= {"rope_parameters": copy.deepcopy(IMAGES[family])} if family in IMAGES else {}
    fields |= copy.deepcopy(config)
    if family in WITH_VISION:
        vision = copy.deepcopy({**VISIONS[family], "out_hidden_size": fields["hidden_size"]})
        fields = {"text_config": fields, "vision_config": vision, "tie_word_embeddings": tied}
    model = model_class(config_class(**fields))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # vision layers last: the others have the values that they have in a folder of their own
        for name, parameter in sorted(model.named_parameters(), key=lambda item: is_of_vision(item[0])):
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = name.endswith("norm.weight")
            is_centred = text == "gemma3_text" or (text in DELTA_NET_FAMILIES and "linear_attn" not in name)
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


def is_of_vision(name: str) -> bool:
    return any(part in name for part in ("visual.", "vision_tower.", "multi_modal_projector."))


def load_model(folder: str | Path) -> Any:
    """transformers' model in float32, vision layers too where the folder has some."""
    has_vision = "vision_config" in json.loads((Path(folder) / "config.json").read_text())
    auto_class = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
    return auto_class.from_pretrained(folder, dtype=torch.float32).eval()


def rename(folder: Path) -> Path:
    """Rewrite a folder of "gemma3" or "qwen2_5_vl" with the names that transformers 4.52 wrote; returns it."""
    prefixes = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
    if json.loads((folder / "config.json").read_text())["model_type"] == "qwen2_5_vl":
        prefixes = {"model.": "model.language_model."}
    prefixes |= {each: f"model.{each}" for each in ("visual.", "vision_tower.", "multi_modal_projector.")}
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        tensors[prefixes.get(old, "") + name.removeprefix(old)] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def publish(folder: Path) -> Path:
    """Rewrite a folder with vision layers as those on the hub are; returns it."""
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    if fields["model_type"] in ("qwen3_5", "qwen3_5_moe"):
        return _publish_qwen3_5(folder)
    text = fields["text_config"]
    if fields["model_type"] == "gemma3":  # text_config leaves out what is its class's default
        kept = ("hidden_size", "intermediate_size", "model_type", "num_hidden_layers", "sliding_window", "vocab_size")
        own = ("num_attention_heads", "num_key_value_heads", "head_dim", "query_pre_attn_scalar", "sliding_window_pattern")
        text["sliding_window_pattern"] = text.pop("_sliding_window_pattern")
        local, rope = (text["rope_parameters"][kind] for kind in ("sliding_attention", "full_attention"))
        thetas = {"rope_local_base_freq": local["rope_theta"], "rope_theta": rope.pop("rope_theta")}
        fields["text_config"] = {**{name: text[name] for name in (*kept, *own)}, **thetas, "rope_scaling": rope}
    else:
        rope = text.pop("rope_parameters")
        text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "tie_word_embeddings": fields["tie_word_embeddings"]}
    if fields["model_type"] == "qwen2_5_vl":
        rope["type"] = rope.pop("rope_type") and "mrope"
        fields = {**fields.pop("text_config"), **fields}
    path.write_text(json.dumps(fields))
    return folder


def _publish_qwen3_5(folder: Path) -> Path:
    """A tensor of all experts of a layer, few numbers in float32, a layer that predicts further tokens, rotary embeddings of
    images.
    """
    tensors, path = load_file(folder / "model.safetensors"), folder / "config.json"
    fields = json.loads(path.read_text())
    text = fields["text_config"]
    text["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    text |= {"mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32", "attn_output_gate": True, "dtype": fields["dtype"]}
    for name in [name for name in tensors if name.endswith(("A_log", "linear_attn.norm.weight"))]:
        tensors[name] = tensors[name].float()
    for layer in range(text["num_hidden_layers"] if "num_experts" in text else 0):
        experts = f"model.language_model.layers.{layer}.mlp.experts."
        parts = {
            part: torch.stack([tensors.pop(f"{experts}{number}.{part}_proj.weight") for number in range(text["num_experts"])])
            for part in ("gate", "up", "down")
        }
        tensors[f"{experts}gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), 1)
        tensors[f"{experts}down_proj"] = parts["down"]
    tensors["mtp.fc.weight"] = torch.ones(text["hidden_size"], 2 * text["hidden_size"]).to(getattr(torch, fields["dtype"]))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path.write_text(json.dumps(fields))
    return folder


if __name__ == "__main__":
    print(write_tiny_model(sys.argv[1], sys.argv[2], tied="tied" in sys.argv[3:]))
