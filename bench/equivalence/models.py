"""Tiny models of each family with random weights, samples for them, and what transformers computes.

A family that engine/config.py:FAMILIES has got needs its fields in tables.yaml.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.equivalence.cases import TABLES, Model
from engine.batch.plan import plan_microbatches
from engine.config import DELTA_NET_FAMILIES, GEMMA
from engine.model.families import kimi_k2
from engine.sample import Sample

SHARED: dict[str, Any] = TABLES["all_families"]  # fields of config.json
FIELDS: dict[str, dict[str, Any]] = TABLES["families"]
VOCABULARY = SHARED["vocab_size"]
LONGEST_PROMPT, LONGEST_RESPONSE = 14, 16
kimi_k2.register_model()
SEQUENCES = 8  # of a step for each of the micro-batches of one rank


def write_model(model: Model, root: Path, seed: int) -> Path:
    """The model's folder below `root`, without a tokenizer: written if it is not there.

    Raises:
        ValueError: the family has no fields there.
    """
    folder = root / model.name
    if (folder / "model.safetensors").is_file():
        return folder
    if model.family not in FIELDS:
        raise ValueError(f"{model.family} has no tiny model in bench/equivalence/tables.yaml")
    fields = {**SHARED, "num_hidden_layers": model.num_layers, **FIELDS[model.family]}
    if model.tied is not None:
        fields["tie_word_embeddings"] = model.tied
    built = AutoModelForCausalLM.from_config(AutoConfig.for_model(model.family, **fields), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in built.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            is_norm = name.endswith("norm.weight")
            is_centred = model.family == GEMMA or (model.family in DELTA_NET_FAMILIES and "linear_attn" not in name)
            center = 0.0 if is_centred else 1.0  # of the weights of norms
            tensor.copy_(center + 0.1 * noise if is_norm else (0.1 if tensor.ndim > 1 else 0.05) * noise)
    built.save_pretrained(folder)
    return folder


def step_samples(seed: int, step: int, micro_batches: int) -> list[Sample]:
    """Samples of one step: in each the same lengths in another order, with other tokens; groups of four, as rewards need them."""
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
