"""The keys of `bench`, `bench_train` and `bench_equivalence`, beside those of a run. No torch in here."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from engine.config import OneOrMore, Section
from megasync.config.schema import Config

Method = Literal["floor", "stream", "unverified", "packed", "mbridge packed", "per_tensor", "disk", "lora merged", "lora adapter"]
METHODS: tuple[Method, ...] = get_args(Method)  # sync/methods.py describes them
NEED_GPUS = ("packed", "mbridge packed")
CPU_METHODS = ("stream", "per_tensor", "disk", "lora merged", "lora adapter")  # what `all` means on CPUs
GPU_METHODS = tuple(name for name in METHODS if name not in ("per_tensor", "disk"))
ShapeName = Literal["100m", "135m", "3b", "7b", "30b-a3b", "30b-a3b-6", "tiny", "tiny-moe"]  # of megasync/models/model_shape.py


class BenchConfig(Section):
    """Settings of `python -m bench sync` and `rollout`."""

    num_ranks: PositiveInt = 2
    """Trainer ranks."""
    rounds: PositiveInt = 5
    """Measured, after one that warms up."""
    methods: Annotated[tuple[Literal["all", Method], ...], *OneOrMore] = ("all",)
    """sync: how weights are brought over; stream is always among them, and what this machine or config does not allow never."""
    update: Literal["step", "negate"] = "step"
    """How the weights change before each sync: by an optimizer step, or by a change of all signs (quick, for ddp)."""
    shapes: ShapeName | None = "100m"
    """Where model.path is empty: random weights of these shapes, on GPUs without files of them."""
    lora_rank: NonNegativeInt = 32
    """Of the adapters of the methods `lora merged` and `lora adapter`, on all linears; 0: without them, and rollout compares a
    replica with vLLM's own offline generation."""
    num_prompts: PositiveInt = 16
    """rollout: of random tokens, one response each."""
    prompt_tokens: PositiveInt = 16
    """rollout: tokens of each prompt."""
    median_tokens: PositiveInt | None = None
    """rollout: lengths of responses are lognormal around it, at most rollout.max_new_tokens; null: all have that length."""


class TrainBenchConfig(Section):
    """How `python -m bench train` measures the keys of `engine`."""

    shapes: ShapeName = "3b"
    """Of the random model, where model.path is empty."""
    num_ranks: PositiveInt = 2
    """Trainer ranks."""
    steps: PositiveInt = 4
    """Measured steps."""
    warm_up_steps: NonNegativeInt = 2
    """Steps before them, in which kernels are compiled."""
    num_microbatches: PositiveInt = 4
    """Micro-batches of each data-parallel rank in a step."""
    num_sequences: PositiveInt = 4
    """Sequences packed into a micro-batch."""
    sequence_length: Annotated[int, Field(ge=2)] = 2048
    """Tokens of each sequence."""


Names = Annotated[tuple[str, ...], *OneOrMore]


class EquivalenceBenchConfig(Section):
    """Layouts and families that `python -m bench equivalence` compares with one rank, with transformers and with vLLM."""

    families: Names = ("all",)
    """Values of `model_type` in config.json; all: every one that the engine trains."""
    layouts: Names = ("all",)
    """Names of layouts (bench/equivalence/tables.yaml); all: every one."""
    wraps: Names = ("all",)
    """Values of engine.wrap; all: every one."""
    steps: PositiveInt = 10
    """Optimizer steps of each case."""
    micro_batches: PositiveInt = 4
    """Of each data-parallel rank in a step."""
    vllm: Names = ("all",)
    """Of the families those whose weights are read back from vLLM, in one layout under every wrap; all: every one; none: none."""
    case_seconds: PositiveFloat = 180.0
    """A case that takes longer is ended and counts as failed."""


class BenchRoot(Config):
    """A run's config with what the benches add."""

    bench: BenchConfig = BenchConfig()
    bench_train: TrainBenchConfig = TrainBenchConfig()
    bench_equivalence: EquivalenceBenchConfig = EquivalenceBenchConfig()
