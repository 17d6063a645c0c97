"""Tiny models of each family with random weights, samples for them, and what transformers computes.

Each has 4 layers, 4 heads and 2 KV heads of 32 (deepseek_v3: low ranks that vLLM has kernels for), and a vocabulary that two
ranks do not divide; experts are 4, of which a token goes through 2. A family that engine/config.py:FAMILIES has got needs its
line in FIELDS here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.batch.plan import plan_microbatches
from engine.config import GEMMA
from engine.sample import Sample
from megasync.bench.equivalence.cases import Model

VOCABULARY = 131
HIDDEN_SIZE, HEAD_SIZE, NUM_HEADS, NUM_KV_HEADS = 128, 32, 4, 2
LONGEST_PROMPT, LONGEST_RESPONSE = 14, 16
SEQUENCES = 8  # of a step for each of the micro-batches of one rank
LLAMA3 = {  # rope_parameters that scale some of a head's frequencies
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
MOE = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
FIELDS: dict[str, dict[str, Any]] = {  # of config.json, by family
    "deepseek_v3": {
        "moe_intermediate_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "num_key_value_heads": NUM_HEADS, "head_dim": 64, "q_lora_rank": 48, "kv_lora_rank": 512,
        "qk_nope_head_dim": 24, "qk_rope_head_dim": 64, "v_head_dim": 20,
    },
    "gemma3_text": {
        "query_pre_attn_scalar": 24, "sliding_window": 8, "sliding_window_pattern": 2, "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "glm4_moe": {
        "moe_intermediate_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "attention_bias": True,
        "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0,
    },
    "llama": {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 8},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 96, "norm_topk_prob": False},
    "qwen3_moe": {**MOE, "norm_topk_prob": True, "tie_word_embeddings": True},
}  # fmt: skip


def write_model(model: Model, root: Path, seed: int) -> Path:
    """The model's folder below `root`, without a tokenizer: written if it is not there.

    Raises:
        ValueError: the family has no line in FIELDS.
    """
    folder = root / model.name
    if (folder / "model.safetensors").is_file():
        return folder
    if model.family not in FIELDS:
        raise ValueError(f"{model.family} has no tiny model in megasync/bench/equivalence/models.py")
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 160,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        **FIELDS[model.family],
    }
    if model.tied is not None:
        fields["tie_word_embeddings"] = model.tied
    built = AutoModelForCausalLM.from_config(AutoConfig.for_model(model.family, **fields), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in built.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            is_norm = name.endswith("norm.weight")
            center = 0.0 if model.family == GEMMA else 1.0  # of the weights of norms
            tensor.copy_(center + 0.1 * noise if is_norm else (0.1 if tensor.ndim > 1 else 0.05) * noise)
    built.save_pretrained(folder)
    return folder


def step_samples(seed: int, step: int, micro_batches: int) -> list[Sample]:
    """Of one step: the same lengths at each in another order, with other tokens; groups of four, as rewards want them."""
    prompts, responses = _lengths(seed, micro_batches)
    draw = np.random.default_rng((seed, 1, step))
    order = draw.permutation(len(prompts))
    samples = []
    for index, (prompt, response) in enumerate(zip(prompts[order], responses[order], strict=True)):
        tokens = draw.integers(3, VOCABULARY, prompt + response)
        finish = "length" if index % 5 == 1 else "stop"
        sample = Sample(tokens[:prompt], tokens[prompt:], np.full(response, -4.8), reward=draw.random(), group=index // 4)
        samples.append(replace(sample, finish_reason=finish))
    return samples


def scored_samples(seed: int) -> list[Sample]:
    """Sequences all of whose tokens but the first are scored."""
    draw = np.random.default_rng((seed, 2))
    rows = [draw.integers(3, VOCABULARY, length) for length in draw.integers(2, LONGEST_PROMPT + LONGEST_RESPONSE, 8)]
    return [Sample(row[:1], row[1:]) for row in rows]


def _lengths(seed: int, micro_batches: int) -> tuple[Any, Any]:
    draw, count = np.random.default_rng((seed, 3)), SEQUENCES * micro_batches
    return draw.integers(2, LONGEST_PROMPT + 1, count), draw.integers(1, LONGEST_RESPONSE + 1, count)


def microbatch_tokens(seed: int, micro_batches: int, data_size: int, num_minibatches: int = 1) -> int:
    """The fewest tokens with which each data-parallel rank has so many micro-batches, or close to it, and can hold a sample."""
    prompts, responses = _lengths(seed, micro_batches)
    lengths = prompts + responses
    limit = max(-(-int(lengths.sum()) // (num_minibatches * data_size * micro_batches)), LONGEST_RESPONSE + 1)
    while num_minibatches == 1 and len(plan_microbatches(lengths, data_size, limit)[0]) > micro_batches:
        limit += 1
    return limit


def transformers_log_probs(folder: Path, samples: list[Sample]) -> list[float]:
    """Natural log-probs of all response tokens, in fp32, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: list[float] = []
    for sample in samples:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids])).long()[None]
        start = len(sample.prompt_ids)
        with torch.no_grad():
            values = torch.log_softmax(model(ids).logits[0].float(), -1)[start - 1 : -1]
        found += values.gather(-1, ids[0, start:, None]).squeeze(-1).tolist()
    return found
