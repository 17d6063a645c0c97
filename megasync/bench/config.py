"""The keys of `bench` and `bench_train` and what they choose from. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

NEED_GPUS = ("packed", "mbridge packed")
WAYS = ("floor", "stream", "unverified", *NEED_GPUS, "per_tensor", "disk", "lora merged", "lora adapter")  # ways.py
CPU_WAYS = ("stream", "per_tensor", "disk", "lora merged", "lora adapter")  # all that are worth it there
GPU_WAYS = tuple(way for way in WAYS if way not in ("per_tensor", "disk"))


@dataclass(frozen=True)
class BenchConfig:
    """What `megasync.bench` measures of sync and rollout. Sizes are those of the Qwen3 that it writes where no model.path is."""

    num_ranks: int = 2  # trainer ranks
    rounds: int = 5  # that count, after one to warm up
    ways: tuple[str, ...] = ("all",)  # of a sync, those that are possible here; stream is always among them
    update: str = "step"  # what changes the weights before each sync: an optimizer step, or negate (all signs; quick, for ddp)
    shapes: str = "none"  # one of SHAPES: random weights, nowhere on the disk, in the place of the sizes below
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int = 4
    head_dim: int = 64
    vocabulary_size: int = 32768
    lora_rank: int = 32  # of the adapters in the rows `lora merged` and `lora adapter`, on all linears; 0: without them
    num_prompts: int = 16  # rollout: one completion each, of rollout.max_new_tokens
    prompt_tokens: int = 16


@dataclass(frozen=True)
class TrainBenchConfig:
    """What `python -m megasync.bench train` measures."""

    shapes: str = "3b"  # one of SHAPES, where model.path is empty
    num_ranks: int = 2
    steps: int = 4  # that count
    warm_up_steps: int = 2  # before, kernels are compiled in them
    num_microbatches: int = 4  # of each data-parallel rank in a step
    num_sequences: int = 4  # packed in a micro-batch
    sequence_length: int = 2048
    variants: tuple[str, ...] = ("ddp", "megatron_fsdp", "ddp_no_fusions", "megatron_fsdp_no_fusions", "ddp_dot_product")
    variant_seconds: float = 300.0  # a variant that takes longer is ended
    profile: tuple[str, ...] = ("none",)  # variants that, with CUDA, take one more step to see which kernels take longest
    offload: tuple[str, ...] = ("none",)  # variants whose state is moved to host memory and back at the end, and timed


class Variant(NamedTuple):
    """One way to train."""

    wrap: str
    fusions: bool = True  # as engine.fusions says; else none
    dot_product: bool = False  # megatron-core's DotProductAttention, all activations recomputed: else it does not fit


VARIANTS = {
    "ddp": Variant("ddp"),
    "megatron_fsdp": Variant("megatron_fsdp"),
    "ddp_no_fusions": Variant("ddp", fusions=False),
    "megatron_fsdp_no_fusions": Variant("megatron_fsdp", fusions=False),
    "ddp_dot_product": Variant("ddp", dot_product=True),
    "megatron_fsdp_dot_product": Variant("megatron_fsdp", dot_product=True),
}
