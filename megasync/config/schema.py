"""All keys of a run's config, joined once. No torch in here.

Leaves out reading YAML and overrides (load.py) and what needs the model and the data (check.py).
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic_core import PydanticCustomError

from bridge.config import ByteSize, OnUpdate, SyncConfig
from engine.config import OFFLOAD_KINDS, AlgorithmConfig, EngineConfig, ModelConfig, OffloadKind, OneOrMore, Section

Share = Annotated[float, Field(gt=0, le=1)]
RAY_ADDRESS = re.compile(r"local|auto|(ray://)?([\w.-]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})")


def _ray_address(value: str) -> str:
    match = RAY_ADDRESS.fullmatch(value)
    if not match or (match[3] and not 0 < int(match[3]) < 2**16):
        choices = "local, auto, HOST:PORT, ray://HOST:PORT"
        raise PydanticCustomError("ray_address", "the address of a Ray is expected", {"choices": choices, "example": "auto"})
    return value


def _reward(value: object) -> object:
    """A name, or names with weights; what they name is looked up later (megasync/rollouts/rewards/resolve.py)."""
    if isinstance(value, str):
        return value
    problem = ""
    if not isinstance(value, dict) or not value:
        problem = "a name, or a mapping of names to weights, is expected"
    elif wrong := [name for name, weight in value.items() if not _is_weight(weight)]:
        problem = f"the weight of {wrong[0]} is {value[wrong[0]]!r}, a finite number is expected"
    elif not any(value.values()):
        problem = "every weight is 0, which leaves nothing to learn"
    if problem:
        choices = "exact_match, math_verify, token_count, package.module:function, {NAME: WEIGHT, ...}"
        example = "'{exact_match: 1.0, my_package.my_module:my_reward: 0.2}'"
        raise PydanticCustomError("reward", "{problem}", {"problem": problem, "choices": choices, "example": example})
    return value


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class RunConfig(Section):
    """The run's folder is `dir`/`name`."""

    name: str = "run"
    """One folder below `dir`."""
    dir: str = "runs"
    """Holds the folders of runs."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of the order of data, of sampling and of dropout."""
    steps: PositiveInt = 100
    """Batches that are trained on."""
    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    """How the terminal shows progress."""
    stop_at_accuracy: Annotated[float, Field(ge=0, le=1)] = 0.0
    """sft: stop once held-out accuracy is there; 0: run all steps."""
    export_hf: bool = False
    """Write the final weights as a Hugging Face folder, `hf` in the run's folder."""

    @property
    def folder(self) -> Path:
        return Path(self.dir) / self.name


class RolloutConfig(Section):
    """Generation by vLLM."""

    placement: Literal["separate", "colocated"] = "separate"
    """colocated: on the trainer's GPUs, in turns with it; needs max_staleness 0."""
    offload_trainer: Annotated[tuple[OffloadKind, ...], *OneOrMore] = OFFLOAD_KINDS
    """colocated: what goes to host memory while vLLM uses the trainer's GPUs."""
    replicas: PositiveInt = 1
    """Engines that generate side by side."""
    tensor_parallel: PositiveInt = 1
    """vLLM workers of one replica."""
    max_staleness: NonNegativeInt = 0
    """The whole of asynchrony: by how many versions the oldest token of a sample may be behind the weights that train on it."""
    on_update: OnUpdate = "drain"
    """What a sync does to running samples: waits for them, holds them and lets them continue, or restarts them after it."""
    cache_on_update: Literal["recompute", "keep"] = "recompute"
    """continue: whether the keys and values that held samples have cached are computed anew with the new weights."""
    min_replicas: PositiveInt = 1
    """With fewer left the run waits for replicas to be restarted; with more it goes on meanwhile."""
    answer_timeout_seconds: PositiveFloat = 120.0
    """A replica that gives no answer for so long is restarted, and others take its samples over."""
    restart_timeout_seconds: PositiveFloat = 600.0
    """How long the run waits for replicas to be restarted before it stops."""
    group_size: PositiveInt = 8
    """Samples a prompt."""
    max_new_tokens: PositiveInt = 1024
    """Of one sample, its end included."""
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Of training rollouts, from 0.01 on, to which vLLM raises what is lower; evaluations are greedy."""
    top_p: Share = 1.0
    """Sample from the likeliest tokens that have this share of the probability together."""
    max_model_len: PositiveInt | None = None
    """Most tokens of a prompt with its response; null: what the model allows."""
    max_num_seqs: PositiveInt = 256
    """Samples that one replica generates at the same time."""
    kv_cache_bytes: Annotated[ByteSize, Field(gt=0)] | None = None
    """Of each worker, such as 4GiB; null: by gpu_memory_utilization, on a CPU 1 GiB."""
    gpu_memory_utilization: Share = 0.85
    """Share of a GPU that vLLM takes."""
    enforce_eager: bool = False
    """true: no CUDA graphs, no compiled kernels: slower tokens, a shorter start; on CPUs always."""
    reward: Annotated[str | dict[str, float], BeforeValidator(_reward)] = "exact_match"
    """exact_match, math_verify, token_count, or a function of your own as package.module:function; several as NAME: WEIGHT."""
    reward_processes: PositiveInt = 4
    """At most so many for plain functions, and as many for async ones."""
    reward_timeout_seconds: PositiveFloat = 60.0
    """Of one call of a reward; its process is ended then."""
    reward_on_failure: Literal["stop", "zero"] = "stop"
    """When a reward raises, is late, dies or returns no finite number; zero: the sample gets 0 from it, and it is counted."""
    reward_concurrency: PositiveInt = 64
    """Samples that one process waits for at the same time in an async function."""
    evaluate_every_steps: NonNegativeInt = 0
    """0: only before the first and after the last step, when data.eval is set."""
    ray_address: Annotated[str, AfterValidator(_ray_address)] = "local"
    """local: a Ray of the run's own; auto, HOST:PORT or ray://HOST:PORT: one that runs."""

    @property
    def is_colocated(self) -> bool:
        return self.placement == "colocated"


class DataConfig(Section):
    """JSONL files, one object a line."""

    train: str = ""
    """The file to train on."""
    eval: str = ""
    """Held-out file; empty: none."""
    prompt_key: str = "question"
    answer_key: str = "answer"
    batch_size: PositiveInt = 256
    """Prompts a step; sft: examples a step."""
    shuffle: bool = True
    """Another order in each epoch; false: the file's."""
    too_long: Literal["drop", "refuse"] = "drop"
    """What happens to examples that have more tokens than model, vLLM or a micro-batch take."""
    chat_template: bool = False
    """Wrap the prompt as one user turn of the tokenizer's chat template."""


class CheckpointConfig(Section):
    """What a run can be resumed from."""

    every_steps: NonNegativeInt = 0
    """0: none; else also after the last step."""
    keep: PositiveInt = 3
    """How many of the newest stay."""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on from the newest checkpoint in the run's folder."""


class Config(Section):
    """Everything a run is told."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    sync: SyncConfig = SyncConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
