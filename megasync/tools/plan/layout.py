"""The request of a plan, the config's layout over the ranks, and the work of a step. Pure functions; no torch in here.

Leaves out the model's parameters (meta/ranks.py).
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import dataclass

from megasync.config.errors import ConfigError
from megasync.config.schema import Config
from megasync.launch.devices import gpu_names, visible_devices
from megasync.launch.num_ranks import default_num_ranks, num_replica_gpus, num_teacher_gpus
from megasync.tools.plan.hardware import KINDS, Hardware, hardware, kind_of
from megasync.tools.plan.lengths import PROMPT_TOKENS, lengths_of_data, mean_response_tokens, quantiles


@dataclass(frozen=True)
class Request:
    """The facts that a plan needs beside the config."""

    num_ranks: int
    hardware: Hardware
    mean_response_tokens: float
    prompt_tokens: int = PROMPT_TOKENS
    lengths: tuple[int, ...] = ()  # of responses, where they are known; else quantiles around the mean

    @staticmethod
    def of(config: Config, given: argparse.Namespace) -> Request:
        """`given`: the command's flags.

        Raises:
            ConfigError: the GPUs are too few or of an unknown kind, or a flag is out of bounds.
        """
        names = gpu_names()
        kind = given.gpu or next(filter(None, map(kind_of, names)), None)
        if kind is None:
            problem = f"{names[0]}: its speed is not known" if names else "this machine has no GPU"
            raise ConfigError(problem, choices=", ".join(KINDS), remedy="name a kind, such as --gpu h100")
        mean = mean_response_tokens(config, given.mean_response_tokens, given.run)
        prompts, answers = zip(*found, strict=True) if (found := lengths_of_data(config)) else ((PROMPT_TOKENS,), ())
        prompt = given.mean_prompt_tokens or round(statistics.fmean(prompts))
        if config.algorithm.name != "sft" or given.mean_response_tokens or given.run or not answers:
            answers = ()
        else:
            mean = statistics.fmean(answers)
        return Request(_num_ranks(config, given.gpus), hardware(kind), mean, prompt, answers)


def _num_ranks(config: Config, num_gpus: int | None) -> int:
    """All GPUs but the replicas'; without a number those of this machine, or as few as the layout and the replicas need."""
    parallel = config.engine.parallel
    fewest = parallel.tensor * parallel.pipeline * math.lcm(parallel.context, parallel.expert)
    beside = num_replica_gpus(config) + num_teacher_gpus(config)
    return default_num_ranks(config, num_gpus or len(visible_devices()) or fewest + beside)


@dataclass(frozen=True)
class Grid:
    """Sizes of the groups of `num_ranks` trainer ranks."""

    num_ranks: int
    tensor: int
    pipeline: int
    virtual: int
    context: int
    expert: int

    @staticmethod
    def of(config: Config, num_ranks: int) -> Grid:
        parallel = config.engine.parallel
        sizes = parallel.tensor, parallel.pipeline, parallel.virtual_pipeline, parallel.context, parallel.expert
        return Grid(num_ranks, *sizes)

    @property
    def split(self) -> int:
        """Ranks that share the work of one sample."""
        return self.tensor * self.pipeline * self.context

    @property
    def data(self) -> int:
        """Groups of ranks that train on different samples."""
        return self.num_ranks // self.split

    @property
    def shards(self) -> int:
        """Ranks that share the optimizer's state, and with Megatron-FSDP weights and gradients, of all but experts."""
        return self.data * self.context

    @property
    def expert_shards(self) -> int:
        """The same, of experts."""
        return max(1, self.num_ranks // (self.tensor * self.pipeline * self.expert))

    def stage_rank(self, stage: int) -> int:
        """The first rank of a pipeline stage: pipeline is megatron-core's outermost axis."""
        return stage * (self.num_ranks // self.pipeline)

    def in_flight(self, stage: int, num_microbatches: int) -> float:
        """Micro-batches whose activations a stage holds at once (schedules.py: 1F1B, interleaved with several chunks)."""
        if self.virtual == 1:
            return min(num_microbatches, self.pipeline - stage)
        chunks = (self.pipeline - stage - 1) * 2 + (self.virtual - 1) * self.pipeline + 1
        return min(num_microbatches, chunks / self.virtual)

    def describe(self) -> str:
        names = ("tensor", "pipeline", "context", "expert", "data")
        shown = [f"{name} {size}" for name in names if (size := getattr(self, name)) > 1]
        return f"{self.num_ranks} trainer ranks{': ' if shown else ''}{', '.join(shown)}"


@dataclass(frozen=True)
class Work:
    """The work of one step."""

    prompt_tokens: int  # of a sample, mean
    lengths: tuple[int, ...]  # of responses, quantiles
    num_samples: int
    num_minibatches: int
    tokens_per_microbatch: int
    longest: int

    @staticmethod
    def of(config: Config, request: Request) -> Work:
        rollout, is_grpo = config.rollout, config.algorithm.name == "grpo"
        samples = config.data.batch_size * (rollout.group_size if is_grpo else 1)
        lengths = request.lengths or quantiles(request.mean_response_tokens, rollout.max_new_tokens)
        limit = request.prompt_tokens + max(lengths)
        if is_grpo:
            limit = rollout.max_model_len or (request.prompt_tokens + rollout.max_new_tokens)
        sizes = config.algorithm.num_minibatches, config.engine.tokens_per_microbatch, limit
        return Work(request.prompt_tokens, lengths, samples, *sizes)

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of a sample, prompt and response."""
        return self.prompt_tokens + sum(self.lengths) / len(self.lengths)

    @property
    def tokens(self) -> float:
        return self.num_samples * self.mean_tokens

    def microbatch_tokens(self, grid: Grid) -> int:
        """Tokens of the largest micro-batch of many batches: a rank's tokens, which vary, are split evenly over the fewest."""
        samples, limit = math.ceil(self.num_samples / self.num_minibatches / grid.data), self.tokens_per_microbatch
        usual, spread = samples * self.mean_tokens, math.ceil(2 * math.sqrt(samples) * statistics.pstdev(self.lengths))
        low, high = math.ceil(max(1, usual - spread)), math.ceil(usual + spread)
        even = limit if high // limit > (low - 1) // limit else math.ceil(high / math.ceil(high / limit))
        smallest = min(self.longest, high)  # a longer sample than the limit has a micro-batch of its own
        return max(1, min(limit, max(smallest, even)))

    def num_microbatches(self, grid: Grid) -> int:
        """Micro-batches of a rank in one optimizer step."""
        return max(1, math.ceil(self.tokens / self.num_minibatches / grid.data / self.tokens_per_microbatch))

    def sequences(self, num_tokens: int, multiple: int) -> tuple[int, ...]:
        """`num_tokens` as at most 64 sequences of about the mean length, each a multiple of `multiple`."""
        count = max(1, min(64, round(num_tokens / self.mean_tokens)))
        each = max(multiple, round(num_tokens / count / multiple) * multiple)
        return (each,) * count
