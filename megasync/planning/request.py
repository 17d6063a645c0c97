"""What a plan is asked for: ranks and hardware by flags, config and this machine. No torch in here."""

from __future__ import annotations

import argparse
import math
import statistics

from megasync.config.errors import ConfigError
from megasync.config.schema import Config
from megasync.launch.devices import gpu_names, visible_devices
from megasync.launch.num_ranks import NUM_CPU_RANKS, default_num_ranks, num_replica_gpus
from megasync.planning.hardware import hardware, kind_of
from megasync.planning.lengths import PROMPT_TOKENS, lengths_of_data, mean_response_tokens
from megasync.planning.shapes import Request


def find_request(config: Config, given: argparse.Namespace) -> Request:
    """`given`: the command's flags.

    Raises:
        ConfigError: the GPUs are too few, or a flag is out of bounds.
    """
    names = gpu_names()
    kind = given.gpu or next(filter(None, map(kind_of, names)), "cpu")
    if names and given.gpu is None and kind == "cpu":
        raise ConfigError(f"{names[0]}: nothing is known of it", remedy="name the kind that is most alike, such as --gpu a100")
    num_ranks = _num_ranks(config, given.gpus, kind)
    mean = mean_response_tokens(config, given.mean_response_tokens, given.run)
    prompts, answers = zip(*found, strict=True) if (found := lengths_of_data(config)) else ((PROMPT_TOKENS,), ())
    if config.algorithm.name != "sft" or given.mean_response_tokens or given.run:
        answers = ()  # those of rollouts are not known yet
    prompt = given.mean_prompt_tokens or round(statistics.fmean(prompts))
    return Request(num_ranks, hardware(kind), statistics.fmean(answers) if answers else mean, prompt, answers)


def _num_ranks(config: Config, num_gpus: int | None, kind: str) -> int:
    """All GPUs but the replicas'; without a number those of this machine, or as few as the layout and the replicas need."""
    parallel = config.engine.parallel
    least = parallel.tensor * parallel.pipeline * math.lcm(parallel.context, parallel.expert)
    if kind == "cpu":
        return num_gpus or max(NUM_CPU_RANKS, least)
    gpus = num_gpus or len(visible_devices()) or least + num_replica_gpus(config)
    return default_num_ranks(config, gpus)
