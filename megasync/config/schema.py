"""All keys of a run's config, joined once. No torch in here.

Leaves out reading YAML and overrides (load.py) and checks that need the model or the data (checks/check.py).
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic_core import PydanticCustomError

from bridge.config import ByteSize, OnUpdate, SpeculationConfig, SyncConfig
from engine.algorithm import AlgorithmConfig
from engine.config import OFFLOAD_KINDS, EngineConfig, FilePath, ModelConfig, OffloadKind, OneOrMore, Section, named_or_own
from megasync.config.data_section import MAX_TEMPERATURE, MIN_TEMPERATURE, DataConfig, MinP, Share
from megasync.config.judge_section import JudgeConfig, JudgeConfigs
from megasync.config.service_section import ServiceConfig
from megasync.config.teacher_section import TeacherConfig

LOGGERS = ("tensorboard", "wandb", "trackio")
MOST_ADAPTER_SLOTS = 8  # each takes memory of a replica; beyond them a sync waits for the oldest samples
RAY_ADDRESS = re.compile(r"local|auto|(ray://)?([\w.-]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})")


def _ray_address(value: str) -> str:
    match = RAY_ADDRESS.fullmatch(value)
    if not match or (match[3] and not 0 < int(match[3]) < 2**16):
        choices = "local, auto, HOST:PORT, ray://HOST:PORT"
        raise PydanticCustomError("ray_address", "a Ray address is expected", {"choices": choices, "example": "auto"})
    return value


def _reward(value: object) -> object:
    """Checks a name, or a mapping of names to weights; megasync/rewards/resolve.py looks the functions up later."""
    if isinstance(value, str):
        return value
    problem = ""
    if not isinstance(value, dict) or not value:
        problem = "a name, or a mapping of names to weights, is expected"
    elif wrong := [name for name, weight in value.items() if not _is_weight(weight)]:
        problem = f"the weight of {wrong[0]} is {value[wrong[0]]!r}, a finite number is expected"
    elif not any(value.values()):
        problem = "all weights are 0, so that there is nothing to learn"
    if problem:
        choices = "exact_match, math_verify, reasoning_gym, token_count, judge:NAME, package.module:function, {NAME: WEIGHT, ...}"
        example = "'{exact_match: 1.0, my_package.my_module:my_reward: 0.2}'"
        raise PydanticCustomError("reward", "{problem}", {"problem": problem, "choices": choices, "example": example})
    return value


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _each_once(value: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(value))


def _stop_texts(value: tuple[str, ...]) -> tuple[str, ...]:
    if not all(value):
        raise PydanticCustomError("stop", "a stop string must not be empty", {"choices": "", "example": "[</answer>]"})
    return value


class RunConfig(Section):
    """The run's folder is `dir`/`name`."""

    name: str = "run"
    """One folder below `dir`."""
    dir: FilePath = "runs"
    """Holds the folders of runs."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the data order, of sampling and of dropout."""
    deterministic: bool = False
    """true: two runs with the same seed on the same kind of machine give bitwise equal metrics, times excepted."""
    steps: PositiveInt = 100
    """Number of batches to train on."""
    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    """How the terminal shows progress."""
    stop_at_accuracy: Annotated[float, Field(ge=0, le=1)] = 0.0
    """sft: stop once the held-out accuracy reaches this value; 0: run all steps."""
    hung_rank_timeout_seconds: Annotated[float, Field(ge=5)] = 300.0
    """The run ends if a trainer rank sends no heartbeat for this many seconds, because it hangs or its machine is lost."""
    loggers: Annotated[
        tuple[Annotated[str, named_or_own(LOGGERS, "Class")], ...], OneOrMore[0], AfterValidator(_each_once)
    ] = ("tensorboard",)
    """Loggers that receive config, metrics and samples in addition to the run's own files: tensorboard, wandb, trackio, or your
    own package.module:Class (docs/your_own.md); []: none. wandb runs offline if it finds no API key."""
    callbacks: Annotated[tuple[Annotated[str, named_or_own(())], ...], OneOrMore[0], AfterValidator(_each_once)] = ()
    """Your own package.module:function each, which rank 0 calls after a step with its metrics (docs/your_own.md)."""
    export_hf: bool = False
    """Write the final weights as a Hugging Face folder, `hf` in the run's folder."""
    trainer_nodes: NonNegativeInt = 0
    """With `megasync submit`: number of nodes that the trainer's ranks are spread over evenly (Ray's STRICT_SPREAD); 0: as few
    nodes as have room (PACK)."""
    log_samples: NonNegativeInt = 2
    """Number of prompts of each step, and of each evaluation set, whose first response samples.jsonl keeps, with its reward."""

    @property
    def folder(self) -> Path:
        return Path(self.dir) / self.name


class RolloutConfig(Section):
    """Generation by vLLM, rewards and evaluation."""

    placement: Literal["separate", "colocated"] = "separate"
    """separate: replicas have GPUs of their own. colocated: replicas share the trainer's GPUs and take turns with it, or in
    `megasync serve` stay beside it; requires max_staleness 0."""
    offload_trainer: Annotated[tuple[OffloadKind, ...], *OneOrMore] = OFFLOAD_KINDS
    """colocated: trainer state that leaves the GPUs while vLLM uses them: to host memory, except
    gradients, which are dropped."""
    replicas: PositiveInt = 1
    """Number of vLLM engines that generate in parallel."""
    tensor_parallel: PositiveInt = 1
    """Tensor-parallel vLLM workers per replica."""
    dtype: Literal["model", "fp8"] = "model"
    """Of the replicas' weights. model: model.dtype. fp8: linears of layers and experts are quantised on their way to the replicas
    to float8_e4m3fn, with a scale for each output channel, and their inputs for each token; GPUs need compute capability 8.9,
    experts need GPUs. Embeddings, norms, routers and the head stay in model.dtype. A sync has half the bytes, and log-probs a
    larger gap, which algorithm.importance_correction weighs. Checkpoints and the commands that serve them have model.dtype."""
    max_staleness: NonNegativeInt = 0
    """How many weight versions the oldest token of a sample may be behind the weights that train on it. 0: synchronous; above 0:
    generation continues while the trainer works."""
    on_update: OnUpdate = "drain"
    """How a weight sync treats running samples. drain: wait until they finish, or with engine.lora.sync=adapter let them finish
    under the adapter that they began with; continue: pause them and resume with the new weights; restart: generate them again
    with the new weights."""
    cache_on_update: Literal["recompute", "keep"] = "keep"
    """on_update=continue: keep the KV cache of paused samples, or recompute it with the new weights, which costs one prefill per
    sample."""
    min_replicas: PositiveInt = 1
    """If fewer replicas are alive, the run waits for restarts; otherwise it continues with the remaining ones."""
    answer_timeout_seconds: PositiveFloat = 120.0
    """A replica that does not answer for this many seconds is restarted; the other replicas take over its samples."""
    start_timeout_seconds: PositiveFloat = 600.0
    """Time limit for the start of a replica. A slower start is killed; a slow restart is tried again."""
    restart_timeout_seconds: PositiveFloat = 600.0
    """How long the run waits for replicas to restart before it stops."""
    oversample: Annotated[float, Field(ge=1, le=2)] = 1.0
    """max_staleness=0: begin this many times the prompts of a batch, train on those that are done first, and abort the others,
    with which the next step begins, and for which it waits. Prompts with long responses then come a step later than others."""
    group_size: PositiveInt = 8
    """Samples per prompt."""
    max_new_tokens: PositiveInt = 1024
    """Maximum number of generated tokens per sample, the end token included."""
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)] = 1.0
    """Sampling temperature of training rollouts; evaluation sets have their own. vLLM would raise lower values to 0.01."""
    top_p: Share = 1.0
    """Nucleus sampling: keep the most likely tokens whose probabilities add up to this value. Affects log-probs as top_k does."""
    top_k: NonNegativeInt = 0
    """Sample from this many most likely tokens; 0: all. vLLM normalises log-probs over the kept tokens, the trainer over the
    whole vocabulary: if the kept tokens have probability p, the importance ratio (trainer / rollout) is multiplied by p."""
    min_p: MinP = 0.0
    """Drop tokens less likely than min_p times the most likely token. Affects log-probs as top_k does."""
    stop: Annotated[tuple[str, ...], OneOrMore[0], AfterValidator(_stop_texts)] = ()
    """Stop strings; the response includes the one that ended it. vLLM then detokenises while it generates and notices the end
    slightly later, so that equal runs may differ in the last bits."""
    speculation: SpeculationConfig = SpeculationConfig()
    engine_arguments: dict[str, Any] = Field(default_factory=dict)
    """Further fields of vLLM's EngineArgs, by name; fields that another key sets are refused."""
    max_model_len: PositiveInt | None = None
    """Maximum number of tokens of prompt and response together; null: the model's limit."""
    max_num_seqs: PositiveInt = 256
    """Maximum number of samples that one replica generates concurrently."""
    kv_cache_bytes: Annotated[ByteSize, Field(gt=0)] | None = None
    """KV cache per vLLM worker, such as 4GiB; null: derived from gpu_memory_utilization, on CPUs 1 GiB."""
    gpu_memory_utilization: Share = 0.85
    """Fraction of the GPU's memory that vLLM may use."""
    enforce_eager: bool = False
    """true: no CUDA graphs and no compiled kernels, for a faster start and slower generation. Always true on CPUs."""
    reward: Annotated[str | dict[str, float], BeforeValidator(_reward)] = "exact_match"
    """exact_match, math_verify, reasoning_gym, token_count, judge:NAME with a name of `judges`, or your own
    package.module:function; a mapping {NAME: WEIGHT} for a weighted sum of several."""
    filter: Annotated[str, named_or_own(("",))] = ""
    """Your own package.module:function, which decides which groups are trained; others are replaced, as algorithm.filter_groups
    does (docs/your_own.md)."""
    reward_processes: PositiveInt = 4
    """Maximum number of processes for plain reward functions, and as many again for async ones."""
    reward_timeout_seconds: PositiveFloat = 60.0
    """Time limit for one call of a reward; after it the reward's process is killed."""
    reward_on_failure: Literal["stop", "zero"] = "stop"
    """If a reward raises, times out, crashes or does not return a finite number. stop: the run stops; zero: the reward counts as
    0, and reward/failures counts the call."""
    reward_concurrency: PositiveInt = 64
    """Maximum number of concurrent calls of an async reward in one process."""
    episode: str = ""
    """package.module:name of an async function of (task, model) or of an environment class, which runs the turns of each sample;
    empty: one turn, prompt and response."""
    episode_max_turns: PositiveInt = 16
    """Maximum number of turns per episode; with episodes max_new_tokens is the limit of one turn."""
    episode_timeout_seconds: PositiveFloat = 120.0
    """Time limit for an episode's own code and tools, over all turns; the model's generation time is not counted."""
    episode_on_failure: Literal["retry", "zero", "drop", "stop"] = "retry"
    """If an episode raises, times out, crashes or does not return a finite number. retry: three attempts in all, then
    the run stops; zero: its reward is 0; drop: its group continues without it; stop: the run stops."""
    episode_processes: PositiveInt = 2
    """Maximum number of episode processes; with episode_placement=cluster, per node."""
    episode_placement: Literal["local", "cluster"] = "local"
    """Where episode processes run. local: on the node of trainer rank 0; cluster: spread over all nodes of the Ray cluster."""
    episode_concurrency: PositiveInt = 256
    """Maximum number of episodes that one process runs concurrently; further ones wait."""
    episode_memory_bytes: Annotated[ByteSize, Field(ge=2**28)] | None = None
    """Limit of the address space of an episode process, such as 8GiB; an episode that exceeds it fails; null: no limit."""
    episode_open_files: Annotated[int, Field(ge=64)] = 16384
    """Limit of open files and sockets of an episode process; an episode that exceeds it fails."""
    record: Literal["episodes", "all", "none"] = "episodes"
    """Trained samples that the run's folder keeps for `megasync replay`. episodes: only multi-turn samples; all: single-turn
    samples, too; none. One file per step, a few bytes per token."""
    evaluate_every_steps: NonNegativeInt = 0
    """Evaluate on data.eval every this many steps; 0: only before the first and after the last step."""
    evaluate_at_start: bool = True
    """false: no evaluation before the first step."""
    ray_address: Annotated[str, AfterValidator(_ray_address)] = "local"
    """local: the run starts its own Ray; auto, HOST:PORT or ray://HOST:PORT: use a running Ray cluster."""

    @property
    def is_colocated(self) -> bool:
        return self.placement == "colocated"

    @property
    def max_sampled_tokens(self) -> int:
        """Maximum number of sampled tokens per sample, over all turns."""
        return self.max_new_tokens * (self.episode_max_turns if self.episode else 1)


class CheckpointConfig(Section):
    """Checkpoints, from which a run can be resumed."""

    every_steps: NonNegativeInt = 0
    """Write a checkpoint every this many steps and after the last one; 0: only when the run
    is stopped, or its rollouts or evaluations fail."""
    keep: PositiveInt = 3
    """Number of newest checkpoints to keep; older ones are deleted."""
    resume: Literal["auto", "newest_weights", "never"] = "auto"
    """auto: resume from the newest checkpoint in the run's folder. newest_weights: take newer weights from the version log
    (sync.log=deltas), if it has any, with the checkpoint's optimizer state, so that the steps after the checkpoint are not
    trained again. never: start a new run."""
    asynchronous: bool = False
    """Copy the state to host memory, then write it while training continues."""

    @property
    def resumes(self) -> bool:
        """Whether the run resumes from the results in its folder."""
        return self.resume != "never"


class Config(Section):
    """All keys of a run's config."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    sync: SyncConfig = SyncConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    teacher: TeacherConfig = TeacherConfig()
    data: DataConfig = DataConfig()
    judges: JudgeConfigs = Field(default_factory=dict)
    checkpoint: CheckpointConfig = CheckpointConfig()
    service: ServiceConfig = ServiceConfig()

    @property
    def pooled_judges(self) -> dict[str, JudgeConfig]:
        """Judges of `rollout.reward` that replicas of their own serve, by name."""
        reward = self.rollout.reward
        named = {reward} if isinstance(reward, str) else reward.keys()
        return {name: judge for name, judge in self.judges.items() if judge.path and f"judge:{name}" in named}

    @property
    def adapter_slots(self) -> int:
        """How many versions of a run's adapter replicas hold, so that a sync waits for no sample, and each ends as it began."""
        lora, rollout = self.engine.lora, self.rollout
        is_several = lora.rank > 0 and lora.sync == "adapter" and rollout.on_update == "drain"
        return min(rollout.max_staleness + 1, MOST_ADAPTER_SLOTS) if is_several else 1

    @property
    def keeps_versions(self) -> bool:
        """Whether the run's version log can rebuild the weights of every step."""
        return self.algorithm.name == "grpo" and self.sync.log == "deltas"

    @property
    def input_paths(self) -> dict[str, str]:
        """Paths that a run reads, by full key; keys without a path are left out."""
        model, lora = self.model.path, self.engine.lora.adapter_path
        inputs = {"model.path": model, "engine.lora.adapter_path": lora, **self.teacher.paths, **self.data.paths}
        inputs["rollout.speculation.path"] = self.rollout.speculation.path
        inputs |= {f"judges.{name}.path": judge.path for name, judge in self.judges.items()}
        return {key: path for key, path in inputs.items() if path}
