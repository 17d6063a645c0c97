"""All keys of a run's config, joined once. No torch in here.

Leaves out reading YAML and overrides (load.py) and what needs the model and the data (check.py).
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic_core import PydanticCustomError

from bridge.config import ByteSize, OnUpdate, SyncConfig
from engine.config import OFFLOAD_KINDS, AlgorithmConfig, EngineConfig, FilePath, ModelConfig, OffloadKind, OneOrMore, Section
from megasync.config.data_section import MAX_TEMPERATURE, MIN_TEMPERATURE, DataConfig, MinP, Share

RAY_ADDRESS = re.compile(r"local|auto|(ray://)?([\w.-]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})")


def _ray_address(value: str) -> str:
    match = RAY_ADDRESS.fullmatch(value)
    if not match or (match[3] and not 0 < int(match[3]) < 2**16):
        choices = "local, auto, HOST:PORT, ray://HOST:PORT"
        raise PydanticCustomError("ray_address", "the address of a Ray is expected", {"choices": choices, "example": "auto"})
    return value


def _reward(value: object) -> object:
    """A name, or names with weights; what they name is looked up later (megasync/rewards/resolve.py)."""
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
        choices = "exact_match, math_verify, reasoning_gym, token_count, package.module:function, {NAME: WEIGHT, ...}"
        example = "'{exact_match: 1.0, my_package.my_module:my_reward: 0.2}'"
        raise PydanticCustomError("reward", "{problem}", {"problem": problem, "choices": choices, "example": example})
    return value


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _each_once(value: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(value))


def _stop_texts(value: tuple[str, ...]) -> tuple[str, ...]:
    if not all(value):
        raise PydanticCustomError("stop", "a text that ends a response is not empty", {"choices": "", "example": "[</answer>]"})
    return value


class RunConfig(Section):
    """The run's folder is `dir`/`name`."""

    name: str = "run"
    """One folder below `dir`."""
    dir: FilePath = "runs"
    """Holds the folders of runs."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of the order of data, of sampling and of dropout."""
    deterministic: bool = False
    """Two runs of one seed on machines of one kind have the same bits in every metric but times."""
    steps: PositiveInt = 100
    """Batches that are trained on."""
    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    """How the terminal shows progress."""
    stop_at_accuracy: Annotated[float, Field(ge=0, le=1)] = 0.0
    """sft: stop once held-out accuracy is there; 0: run all steps."""
    hung_rank_timeout_seconds: Annotated[float, Field(ge=5)] = 300.0
    """A trainer rank that gives no sign of life for so long, because it was stopped or its machine is gone, ends the run."""
    loggers: Annotated[tuple[Literal["tensorboard", "wandb", "trackio"], ...], OneOrMore[0], AfterValidator(_each_once)] = (
        "tensorboard",
    )
    """Get config, metrics and samples beside the run's own files; [] for none. wandb runs offline where it finds no key."""
    export_hf: bool = False
    """Write the final weights as a Hugging Face folder, `hf` in the run's folder."""
    trainer_nodes: NonNegativeInt = 0
    """Through submit: on how many nodes of the cluster the trainer's ranks are, as many on each (Ray's STRICT_SPREAD); 0: on as
    few as have room (PACK)."""
    log_samples: NonNegativeInt = 2
    """How many responses of a step, and of each evaluation set, samples.jsonl keeps with prompt, reward and answer."""

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
    cache_on_update: Literal["recompute", "keep"] = "keep"
    """continue: what held samples have cached is kept, or computed anew with the new weights: a prefill each."""
    min_replicas: PositiveInt = 1
    """With fewer left the run waits for replicas to be restarted; with more it goes on meanwhile."""
    answer_timeout_seconds: PositiveFloat = 120.0
    """A replica that gives no answer for so long is restarted, and others take its samples over."""
    start_timeout_seconds: PositiveFloat = 600.0
    """Of a replica's start; one that takes longer is ended, and at a restart tried again."""
    restart_timeout_seconds: PositiveFloat = 600.0
    """How long the run waits for replicas to be restarted before it stops."""
    group_size: PositiveInt = 8
    """Samples a prompt."""
    max_new_tokens: PositiveInt = 1024
    """Of one sample, its end included."""
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)] = 1.0
    """Of training rollouts, from 0.01 on, to which vLLM raises what is lower; data.eval has its own."""
    top_p: Share = 1.0
    """Sample from the likeliest tokens that have this share of the probability together; to log-probs the same as top_k."""
    top_k: NonNegativeInt = 0
    """Sample from so many likeliest tokens; 0: all. vLLM normalises over the tokens that are kept, the trainer over all: where
    these have a share p of the probability, the importance ratio (trainer over rollout) is p times that without the cut."""
    min_p: MinP = 0.0
    """Leave out tokens that are less likely than this times the likeliest; to log-probs the same as top_k."""
    stop: Annotated[tuple[str, ...], OneOrMore[0], AfterValidator(_stop_texts)] = ()
    """Texts that end a response, which keeps them. vLLM then detokenises, and equal runs may differ in last bits, since the
    core learns of the end a little later."""
    engine_arguments: dict[str, Any] = Field(default_factory=dict)
    """Fields of vLLM's EngineArgs, by name, other than those that a key of ours sets."""
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
    """exact_match, math_verify, reasoning_gym, token_count, or package.module:function of your own; several as NAME: WEIGHT."""
    reward_processes: PositiveInt = 4
    """At most so many for plain functions, and as many for async ones."""
    reward_timeout_seconds: PositiveFloat = 60.0
    """Of one call of a reward; its process is ended then."""
    reward_on_failure: Literal["stop", "zero"] = "stop"
    """When a reward raises, is late, dies or returns no finite number; zero: the sample gets 0 from it, and it is counted."""
    reward_concurrency: PositiveInt = 64
    """Samples that one process waits for at the same time in an async function."""
    episode: str = ""
    """package.module:name, an async function of (task, model) or an environment class: what each sample plays with the model,
    turn by turn; empty: one turn."""
    episode_max_turns: PositiveInt = 16
    """Of one episode; max_new_tokens is then of one turn."""
    episode_timeout_seconds: PositiveFloat = 120.0
    """What an episode's own code and tools may take, all turns together; the model's time is not counted."""
    episode_on_failure: Literal["retry", "zero", "drop", "stop"] = "retry"
    """When an episode raises, is late, dies or returns no finite number. retry: it begins anew, up to three times, then the run
    stops; zero: its reward is 0; drop: its group is without it."""
    episode_processes: PositiveInt = 2
    """At most so many; with episode_placement cluster so many on each node."""
    episode_placement: Literal["local", "cluster"] = "local"
    """Where they run. local: beside the trainer's first rank; cluster: spread over all nodes of the run's Ray."""
    episode_concurrency: PositiveInt = 256
    """Episodes that one process plays at the same time; others wait."""
    episode_memory_bytes: Annotated[ByteSize, Field(ge=2**28)] | None = None
    """Address space of one process, such as 8GiB; an episode that wants more fails; null: no limit."""
    episode_open_files: Annotated[int, Field(ge=64)] = 16384
    """Files and sockets that one process may have open at the same time; an episode that wants more fails."""
    record: Literal["episodes", "all", "none"] = "episodes"
    """What of the trained samples is kept in the run's folder, with all that `megasync replay` needs to sample them again: none,
    episodes, or samples of one turn, too. A file a step, of a few bytes a token."""
    evaluate_every_steps: NonNegativeInt = 0
    """0: only before the first and after the last step, when data.eval is set."""
    evaluate_at_start: bool = True
    """false: no evaluation before the first step."""
    ray_address: Annotated[str, AfterValidator(_ray_address)] = "local"
    """local: a Ray of the run's own; auto, HOST:PORT or ray://HOST:PORT: one that runs."""

    @property
    def is_colocated(self) -> bool:
        return self.placement == "colocated"

    @property
    def max_sampled_tokens(self) -> int:
        """Of one sample, all of its turns together."""
        return self.max_new_tokens * (self.episode_max_turns if self.episode else 1)


class CheckpointConfig(Section):
    """What a run can be resumed from."""

    every_steps: NonNegativeInt = 0
    """0: none; else also after the last step."""
    keep: PositiveInt = 3
    """How many of the newest stay."""
    resume: Literal["auto", "newest_weights", "never"] = "auto"
    """auto: go on from the newest checkpoint in the run's folder; newest_weights: the steps after it are not trained again where
    sync.log=deltas has the weights that they made, and the optimizer is the checkpoint's."""
    asynchronous: bool = False
    """Copy to host memory, and write while training goes on."""

    @property
    def resumes(self) -> bool:
        """Whether the run goes on from what its folder has."""
        return self.resume != "never"


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

    @property
    def keeps_versions(self) -> bool:
        """Whether the weights of every step can be had again, from the run's log of versions."""
        return self.algorithm.name == "grpo" and self.sync.log == "deltas"

    @property
    def input_paths(self) -> dict[str, str]:
        """What a run reads, by full key; those that are given."""
        inputs = {"model.path": self.model.path, "engine.lora.adapter_path": self.engine.lora.adapter_path, **self.data.paths}
        return {key: path for key, path in inputs.items() if path}
