"""What a plan is for: the config's layout over a number of ranks, and the work of a step. Pure functions; no torch in here.

Leaves out the model's parameters (meta/ranks.py).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from megasync.config.schema import Config
from megasync.planning.hardware import Hardware
from megasync.planning.lengths import PROMPT_TOKENS, quantiles


@dataclass(frozen=True)
class Request:
    """What a plan is asked for, beside the config."""

    num_ranks: int
    hardware: Hardware
    mean_response_tokens: float
    prompt_tokens: int = PROMPT_TOKENS
    lengths: tuple[int, ...] = ()  # of responses, where they are known; else quantiles around the mean


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
    def data(self) -> int:
        """Ranks that train on other samples."""
        return self.num_ranks // (self.tensor * self.pipeline * self.context)

    @property
    def shards(self) -> int:
        """Ranks that share the optimizer's state, and with Megatron-FSDP all else, of what is not experts."""
        return self.data * self.context

    @property
    def expert_shards(self) -> int:
        """Likewise, of experts."""
        return max(1, self.num_ranks // (self.tensor * self.pipeline * self.expert))

    def stage_rank(self, stage: int) -> int:
        """The first rank of a pipeline stage: pipeline is megatron-core's outermost axis."""
        return stage * (self.num_ranks // self.pipeline)

    def in_flight(self, stage: int, num_microbatches: int) -> float:
        """Micro-batches whose activations a stage holds at once (schedules.py: 1F1B, interleaved where there are chunks)."""
        if self.virtual == 1:
            return min(num_microbatches, self.pipeline - stage)
        chunks = (self.pipeline - stage - 1) * 2 + (self.virtual - 1) * self.pipeline + 1
        return min(num_microbatches, chunks / self.virtual)

    def describe(self) -> str:
        names = {
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "context": self.context,
            "expert": self.expert,
            "data": self.data,
        }
        shown = " x ".join(f"{name} {size}" for name, size in names.items() if size > 1 and name != "expert")
        experts = f", experts over {self.expert} ranks" if self.expert > 1 else ""
        return f"{self.num_ranks} trainer ranks{': ' + shown if shown else ''}{experts}"


@dataclass(frozen=True)
class Busy:
    """Processes that compute at the same time: what shares the cores of a CPU."""

    training: int
    generation: int

    @staticmethod
    def of(config: Config, grid: Grid) -> Busy:
        """Trainer and replicas in turns with `max_staleness` 0, else all at once."""
        rollout = config.rollout
        workers = rollout.replicas * rollout.tensor_parallel if config.algorithm.name == "grpo" else 0
        if not rollout.max_staleness:
            return Busy(grid.num_ranks, max(1, workers))
        return Busy(grid.num_ranks + workers, grid.num_ranks + workers)


@dataclass(frozen=True)
class Work:
    """Of one step."""

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
        limit = rollout.max_model_len or (request.prompt_tokens + rollout.max_new_tokens)
        lengths = request.lengths or quantiles(request.mean_response_tokens, rollout.max_new_tokens)
        limit = limit if is_grpo else request.prompt_tokens + max(lengths)
        sizes = config.algorithm.num_minibatches, config.engine.tokens_per_microbatch, limit
        return Work(request.prompt_tokens, lengths, samples, *sizes)

    @property
    def mean_tokens(self) -> float:
        """Of a sample, prompt and response."""
        return self.prompt_tokens + sum(self.lengths) / len(self.lengths)

    @property
    def response_tokens(self) -> float:
        return self.num_samples * sum(self.lengths) / len(self.lengths)

    @property
    def tokens(self) -> float:
        return self.num_samples * self.mean_tokens

    def tokens_of_rank(self, grid: Grid) -> float:
        """Of one data-parallel rank in one optimizer step, over all its context and tensor ranks."""
        return self.tokens / self.num_minibatches / grid.data

    def microbatch_tokens(self, grid: Grid) -> int:
        """Of the largest micro-batch of many batches: a rank's tokens, which vary, are shared evenly by as few as hold them."""
        samples, limit = math.ceil(self.num_samples / self.num_minibatches / grid.data), self.tokens_per_microbatch
        usual, spread = samples * self.mean_tokens, math.ceil(2 * math.sqrt(samples) * statistics.pstdev(self.lengths))
        low, most = math.ceil(max(1, usual - spread)), math.ceil(usual + spread)
        even = limit if most // limit > (low - 1) // limit else math.ceil(most / math.ceil(most / limit))
        least = min(self.longest, most)  # a longer sample than the limit has one of its own
        return max(1, min(limit, max(least, even)))

    def num_microbatches(self, grid: Grid) -> int:
        """Of a rank in one optimizer step."""
        return max(1, math.ceil(self.tokens_of_rank(grid) / self.tokens_per_microbatch))

    def sequences(self, num_tokens: int, multiple: int) -> tuple[int, ...]:
        """`num_tokens` as sequences of the mean length, each a multiple of `multiple`; of which there are at most 64."""
        count = max(1, min(64, round(num_tokens / self.mean_tokens)))
        each = max(multiple, round(num_tokens / count / multiple) * multiple)
        return (each,) * count
