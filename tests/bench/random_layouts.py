"""Random layouts with random features for test_equivalence.py. Pure functions."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

from engine.wrap.ddp_fields import DDP
from bench.equivalence.cases import NUM_LAYERS, WRAPS, Case, Keys, Model

PENALTY: Keys = {"algorithm.truncated": "penalise", "algorithm.overlong_buffer": 4}


def draw_case(draw: random.Random, families: tuple[str, ...], numbers_of_ranks: tuple[int, ...]) -> Case:
    """Any of what the keys of `engine` and `algorithm` choose from; the config's check may refuse it.

    Where a choice is the default, its key is left out.
    """
    num_ranks = draw.choice(numbers_of_ranks)
    num_layers = draw.choice((NUM_LAYERS, NUM_LAYERS + 1))
    keys: Keys = {"engine.wrap": draw.choice(WRAPS), **_sizes(draw, num_ranks, num_layers)}
    for features in (_memory, _objective, _adapters, _overrides):
        keys |= features(draw, keys)
    if not _has_micro_batches_of_one_rank(num_ranks, keys):
        keys.pop("algorithm.load_balancing", None)  # its loss is one of a micro-batch's tokens together
    return Case(Model(draw.choice(families), draw.random() < 0.5, num_layers), "", num_ranks, keys)


def _has_micro_batches_of_one_rank(num_ranks: int, keys: Keys) -> bool:
    sizes = [int(keys.get(f"engine.parallel.{name}", 1)) for name in ("tensor", "pipeline", "virtual_pipeline")]
    return sizes[0] * sizes[1] == num_ranks and sizes[2] == 1


def _sizes(draw: random.Random, num_ranks: int, num_layers: int) -> Keys:
    """Sizes whose products divide the ranks, most of them."""
    left, keys = num_ranks, Keys()
    for name in draw.sample(("tensor", "pipeline", "context"), 3):
        size = draw.choice([size for size in (1, 2, 4) if left % size == 0])
        left //= size
        if size > 1:
            keys[f"engine.parallel.{name}"] = size
    expert = draw.choice((1, 1, 2, 4))
    keys |= {"engine.parallel.expert": expert} if expert > 1 else {}
    if "engine.parallel.tensor" in keys and draw.random() < 0.6:
        keys["engine.parallel.sequence"] = True
    if "engine.parallel.context" in keys and draw.random() < 0.5:
        keys["engine.parallel.context_attention"] = "ulysses"
    return keys | _stages(draw, keys.get("engine.parallel.pipeline", 1), num_layers)


def _stages(draw: random.Random, pipeline: int, num_layers: int) -> Keys:
    if pipeline == 1:
        return {}
    keys: Keys = {"engine.parallel.virtual_pipeline": 2} if draw.random() < 0.4 else {}
    num_chunks = pipeline * keys.get("engine.parallel.virtual_pipeline", 1)
    if draw.random() < 0.3 and num_chunks <= num_layers:
        ends = [0, *sorted(draw.sample(range(1, num_layers), num_chunks - 1)), num_layers]
        keys["engine.parallel.pipeline_layers"] = [end - start for start, end in pairwise(ends)]
    return keys


def _memory(draw: random.Random, _: Keys) -> Keys:
    """Keys that change where and when something is computed, not what."""
    keys = Keys()
    recompute = draw.choice(("none", "none", "selective", "full"))
    if recompute != "none":
        keys["engine.recompute"] = recompute
    if recompute == "selective" and draw.random() < 0.7:
        modules = draw.sample(("layernorm", "core_attn", "mlp", "moe", "mlp_act"), draw.choice((1, 2)))
        keys["engine.recompute_modules"] = modules
    keys |= {"engine.logits_chunk_tokens": draw.choice((5, 16))} if draw.random() < 0.4 else {}
    keys |= {"engine.fusions": "all"} if draw.random() < 0.4 else {}
    keys |= {"engine.balance": "cost"} if draw.random() < 0.3 else {}
    keys |= {"engine.optimizer.offload": True} if draw.random() < 0.2 else {}
    return keys


def _objective(draw: random.Random, _: Keys) -> Keys:
    name = draw.choice(("sft", "grpo"))
    keys: Keys = {"algorithm.name": name}
    keys |= {"algorithm.loss_aggregation": "sequence_mean"} if draw.random() < 0.4 else {}
    keys |= {"algorithm.num_minibatches": 2} if draw.random() < 0.3 else {}
    keys |= {"algorithm.load_balancing": 0.1} if draw.random() < 0.15 else {}
    keys |= {"algorithm.router_bias_update_rate": 0.01} if draw.random() < 0.1 else {}
    if name == "grpo":
        keys |= {"algorithm.kl_coefficient": 0.1} if draw.random() < 0.4 else {}
        keys |= {"algorithm.ratio_level": "sequence"} if draw.random() < 0.3 else {}
        keys |= {"algorithm.old_log_probs": "separate"} if draw.random() < 0.3 else {}
        keys |= {"algorithm.dual_clip": 1.5} if draw.random() < 0.2 else {}
        keys |= {"algorithm.baseline": "leave_one_out"} if draw.random() < 0.2 else {}
        keys |= {"algorithm.normalize_advantage_by_std": False} if draw.random() < 0.2 else {}
        keys |= draw.choice((Keys(), {"algorithm.truncated": "mask"}, PENALTY)) | _correction(draw)
    return keys


def _correction(draw: random.Random) -> Keys:
    kind = draw.choice(("tis", "tis", "mask", "none"))
    keys: Keys = {"algorithm.importance_correction": kind} if kind != "tis" else {}
    level = draw.choice(("token", "sequence", "geometric"))
    return keys | ({"algorithm.importance_level": level} if kind != "none" and level != "token" else {})


def _adapters(draw: random.Random, _: Keys) -> Keys:
    if draw.random() > 0.3:
        return {}
    targets = draw.choice((None, ["linear_qkv", "linear_proj"], ["linear_proj", "linear_fc2"]))
    return {"engine.lora.rank": draw.choice((2, 4)), **({"engine.lora.targets": targets} if targets else {})}


def _overrides(draw: random.Random, keys: Keys) -> Keys:
    """A field of DistributedDataParallelConfig that leaves results as they are."""
    if draw.random() > 0.3:
        return {}
    fields: tuple[tuple[str, Any], ...] = (("bucket_size", 20_000), ("overlap_grad_reduce", True), ("overlap_param_gather", True))
    if keys["engine.wrap"] != DDP:
        fields += (("data_parallel_sharding_strategy", "optim_grads"), ("data_parallel_sharding_strategy", "optim"))
    return {"engine.overrides": dict([draw.choice(fields)])}
