"""What the YAML keys `model`, `engine` and `algorithm` mean. No torch in here: configs are checked without it.

Leaves out loading and checking, which is megasync/config.py's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """`path` is a Hugging Face folder (config.json, *.safetensors, tokenizer); `dtype` that of weights and activations."""

    path: str = ""
    dtype: str = "bfloat16"  # float32 | bfloat16


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the parallel groups; data parallelism takes what is left of the world size."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    sequence: bool = False  # shard activations between tensor-parallel linears over the sequence


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay, global-norm clipping, linear warm-up and a decay."""

    name: str = "adam"
    learning_rate: float = 1e-6
    min_learning_rate: float = 0.0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip_grad_norm: float = 1.0  # 0 switches clipping off
    warmup_steps: int = 0
    decay: str = "constant"  # constant | linear | cosine
    decay_steps: int | None = None  # optimizer steps until the rate is at its minimum; None: all of the run


LORA_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters beside frozen linears (LoRA, arXiv:2106.09685). `rank` 0: none, all weights are trained."""

    rank: int = 0
    alpha: float = 32.0
    dropout: float = 0.0  # of what goes into the adapters, in training and for the old log-probs (with the same masks)
    targets: tuple[str, ...] = LORA_TARGETS  # linears of megatron-core's layers
    rslora: bool = False  # rank-stabilised, arXiv:2312.03732: alpha / sqrt(rank) in place of alpha / rank
    sync: str = "merged"  # merged: whole weights, W + scale B A, travel to the replicas | adapter: A and B alone
    adapter_path: str = ""  # a PEFT folder to start from; empty: B is zero, so that training starts at the base model

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


OFFLOAD_KINDS = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class EngineConfig:
    """How the model is wrapped, cut and stepped."""

    wrap: str = "megatron_fsdp"  # megatron_fsdp | ddp: the one flag
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    overrides: dict[str, Any] = field(default_factory=dict)  # fields of megatron-core's DistributedDataParallelConfig
    tokens_per_microbatch: int = 16384
    recompute: str = "none"  # none | full
    fusions: str = "auto"  # auto: one kernel for each memory-bound piece of a step, with CUDA | all: everywhere | none
    offload: tuple[str, ...] = OFFLOAD_KINDS  # goes to host memory while vLLM uses the trainer's GPUs (rollout.placement)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(frozen=True)
class AlgorithmConfig:
    """The loss. GRPO: arXiv:2402.03300; clip-higher and token mean: DAPO, arXiv:2503.14476."""

    name: str = "grpo"  # grpo | sft
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coefficient: float = 0.0  # above 0: k3 estimate of the KL to the start model (with lora.adapter_path) is added to the loss
    importance_correction: str = "tis"  # none | tis: truncated importance sampling, trainer over rollout
    importance_cap: float = 2.0
    loss_aggregation: str = "token_mean"  # token_mean | sequence_mean
    normalize_advantage_by_std: bool = True
    num_minibatches: int = 1  # optimizer steps a batch
    # auto: with one optimizer step a batch its own forward pass gives them | separate: a forward pass before the first step
    old_log_probs: str = "auto"
    non_finite: str = "stop"  # stop: a loss or gradient that is not finite ends the run | skip: its optimizer step is left out
