"""The whole configuration: dataclasses joined once, and what every key may be. No torch in here.

Leaves out reading YAML and overrides (config_load.py) and what needs the model and the data (config_check.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from bridge.config import SyncConfig
from engine.config import LORA_TARGETS, OFFLOAD_KINDS, AlgorithmConfig, EngineConfig, ModelConfig
from megasync.bench.config import VARIANTS, WAYS, BenchConfig, TrainBenchConfig
from megasync.model_shapes import SHAPES


@dataclass(frozen=True)
class RunConfig:
    """The run's folder is `dir`/`name`."""

    name: str = "run"
    dir: str = "runs"
    seed: int = 0
    steps: int = 100
    progress: str = "auto"  # auto | rich | plain | none
    stop_at_accuracy: float = 0.0  # sft: stop once held-out accuracy is there; 0: run all steps
    export_hf: bool = False  # sft: write the final weights as a Hugging Face folder, `hf` in the run's folder

    @property
    def folder(self) -> Path:
        return Path(self.dir) / self.name


@dataclass(frozen=True)
class RolloutConfig:
    """Generation. `max_staleness` is the whole of asynchrony: 0 synchronous, 1 one-step-off."""

    placement: str = "separate"  # separate | colocated: on the trainer's GPUs, in turns with it; needs max_staleness 0
    replicas: int = 1
    tensor_parallel: int = 1
    max_staleness: int = 0
    group_size: int = 8  # samples a prompt
    max_new_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    max_model_len: int | None = None
    max_num_seqs: int = 256
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.85
    enforce_eager: bool = False  # true: no CUDA graphs, no compiled kernels: slower tokens, a shorter start; on CPUs always
    reward: str = "exact_match"
    evaluate_every_steps: int = 0  # 0: only before the first and after the last step, when data.eval is set
    ray_address: str = "local"  # local: a Ray of the run's own; else an address

    @property
    def is_colocated(self) -> bool:
        return self.placement == "colocated"


@dataclass(frozen=True)
class DataConfig:
    """JSONL files, one object a line."""

    train: str = ""
    eval: str = ""  # held-out file; empty: none
    prompt_key: str = "question"
    answer_key: str = "answer"
    batch_size: int = 256  # prompts a step (sft: examples a step)
    shuffle: bool = True
    chat_template: bool = False  # wrap the prompt as one user turn of the tokenizer's chat template


@dataclass(frozen=True)
class CheckpointConfig:
    """`every_steps` 0: none. `keep`: how many of the newest stay."""

    every_steps: int = 0
    keep: int = 3
    resume: str = "auto"  # auto | never


@dataclass(frozen=True)
class Config:
    """Everything a run is told."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    bench_train: TrainBenchConfig = field(default_factory=TrainBenchConfig)


CHOICES: dict[str, tuple[str, ...]] = {
    "run.progress": ("auto", "rich", "plain", "none"),
    "model.dtype": ("float32", "bfloat16"),
    "engine.wrap": ("megatron_fsdp", "ddp"),
    "engine.recompute": ("none", "full"),
    "engine.fusions": ("auto", "all", "none"),
    "engine.offload": OFFLOAD_KINDS,
    "engine.lora.sync": ("merged", "adapter"),
    "engine.lora.targets": LORA_TARGETS,
    "engine.optimizer.name": ("adam",),
    "engine.optimizer.decay": ("constant", "linear", "cosine"),
    "rollout.placement": ("separate", "colocated"),
    "sync.transport": ("auto", "shm", "nccl", "ipc"),
    "sync.verify": ("none", "digest", "readback"),
    "algorithm.name": ("grpo", "sft"),
    "algorithm.importance_correction": ("none", "tis"),
    "algorithm.loss_aggregation": ("token_mean", "sequence_mean"),
    "algorithm.old_log_probs": ("auto", "separate"),
    "algorithm.non_finite": ("stop", "skip"),
    "checkpoint.resume": ("auto", "never"),
    "bench.ways": ("all", *WAYS),
    "bench.update": ("step", "negate"),
    "bench.shapes": ("none", *SHAPES),
    "bench_train.shapes": tuple(SHAPES),
    "bench_train.variants": tuple(VARIANTS),
    "bench_train.profile": ("none", *VARIANTS),
    "bench_train.offload": ("none", *VARIANTS),
}


@dataclass(frozen=True)
class Range:
    """Finite numbers from `least` to `most`, borders included unless an `above` or `below` is set instead."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def holds(self, number: float) -> bool:
        return (
            (self.least is None or number >= self.least)
            and (self.above is None or number > self.above)
            and (self.most is None or number <= self.most)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        borders = (("at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below))
        return " and ".join(f"{word} {border:g}" for word, border in borders if border is not None)


_COUNT = Range(least=1)
_NOT_NEGATIVE = Range(least=0)
_POSITIVE = Range(above=0)
_MOMENT = Range(least=0, below=1)
_SHARE = Range(above=0, most=1)

RANGES: dict[str, Range] = {
    "run.seed": Range(least=0, below=2**32),
    "run.steps": _COUNT,
    "run.stop_at_accuracy": Range(least=0, most=1),
    "engine.parallel.tensor": _COUNT,
    "engine.parallel.pipeline": _COUNT,
    "engine.parallel.context": _COUNT,
    "engine.parallel.expert": _COUNT,
    "engine.tokens_per_microbatch": _COUNT,
    "engine.lora.rank": _NOT_NEGATIVE,
    "engine.lora.alpha": _POSITIVE,
    "engine.lora.dropout": Range(least=0, below=1),
    "engine.optimizer.learning_rate": _NOT_NEGATIVE,
    "engine.optimizer.min_learning_rate": _NOT_NEGATIVE,
    "engine.optimizer.weight_decay": _NOT_NEGATIVE,
    "engine.optimizer.beta1": _MOMENT,
    "engine.optimizer.beta2": _MOMENT,
    "engine.optimizer.epsilon": _POSITIVE,
    "engine.optimizer.clip_grad_norm": _NOT_NEGATIVE,
    "engine.optimizer.warmup_steps": _NOT_NEGATIVE,
    "engine.optimizer.decay_steps": _COUNT,
    "rollout.replicas": _COUNT,
    "rollout.tensor_parallel": _COUNT,
    "rollout.max_staleness": _NOT_NEGATIVE,
    "rollout.group_size": _COUNT,
    "rollout.max_new_tokens": _COUNT,
    "rollout.temperature": _POSITIVE,
    "rollout.top_p": _SHARE,
    "rollout.max_model_len": _COUNT,
    "rollout.max_num_seqs": _COUNT,
    "rollout.kv_cache_bytes": _COUNT,
    "rollout.gpu_memory_utilization": _SHARE,
    "rollout.evaluate_every_steps": _NOT_NEGATIVE,
    "sync.bucket_bytes": Range(least=4096),
    "sync.timeout_seconds": _POSITIVE,
    "algorithm.clip_low": Range(least=0, most=1),
    "algorithm.clip_high": _NOT_NEGATIVE,
    "algorithm.kl_coefficient": _NOT_NEGATIVE,
    "algorithm.importance_cap": _POSITIVE,
    "algorithm.num_minibatches": _COUNT,
    "data.batch_size": _COUNT,
    "checkpoint.every_steps": _NOT_NEGATIVE,
    "checkpoint.keep": _COUNT,
    "bench.num_ranks": _COUNT,
    "bench.rounds": _COUNT,
    "bench.hidden_size": _COUNT,
    "bench.intermediate_size": _COUNT,
    "bench.num_layers": _COUNT,
    "bench.num_heads": _COUNT,
    "bench.num_kv_heads": _COUNT,
    "bench.head_dim": _COUNT,
    "bench.vocabulary_size": _COUNT,
    "bench.lora_rank": _NOT_NEGATIVE,
    "bench.num_prompts": _COUNT,
    "bench.prompt_tokens": _COUNT,
    "bench_train.num_ranks": _COUNT,
    "bench_train.steps": _COUNT,
    "bench_train.warm_up_steps": _NOT_NEGATIVE,
    "bench_train.num_microbatches": _COUNT,
    "bench_train.num_sequences": _COUNT,
    "bench_train.sequence_length": Range(least=2),
    "bench_train.variant_seconds": _POSITIVE,
}
