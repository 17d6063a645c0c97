"""Lengths of prompts and responses: of a run's data, from a mean as quantiles, or from a run's metrics. No torch in here.

Responses are modelled as lognormal, cut off at rollout.max_new_tokens.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from megasync.config.data_section import DataFile
from megasync.config.errors import ConfigError
from megasync.config.schema import Config
from megasync.data.data import load_examples
from megasync.data.prompts import Prompts
from megasync.report.log import read_metrics

SPREAD = 0.8  # standard deviation of the logarithm of a response's length
METRIC = "response/tokens_mean"
PLANNED_EXAMPLES = 32  # are read of data.train
PROMPT_TOKENS = 128  # where data.train cannot be read


def lengths_of_data(config: Config) -> list[tuple[int, int]]:
    """Tokens of prompt and answer of the first examples of data.train; empty where it or the tokenizer cannot be read."""
    data = config.data
    try:
        file = next(iter(data.train_sources.values()), None) or DataFile(path=str(data.train), split=data.split)
        keys = file.prompt_key or data.prompt_key, file.answer_key or data.answer_key
        examples = load_examples(file.path, *keys, split=file.split, is_supervised=True)
        prompts = Prompts(config.model.path, data)
        samples = [sample for example in itertools.islice(examples, PLANNED_EXAMPLES) for sample in prompts.samples(example)]
    except (ValueError, OSError):
        return []
    return [(len(sample.prompt_ids), len(sample.response_ids)) for sample in samples]


def quantiles(mean: float, longest: int, count: int = 64) -> tuple[int, ...]:
    """`count` lengths of at least 1 and at most `longest`, ascending, whose mean is `mean` as nearly as the cut allows."""
    normal = statistics.NormalDist()
    shape = [math.exp(SPREAD * normal.inv_cdf((index + 0.5) / count)) for index in range(count)]
    low, high = 0.0, 1e3 * longest
    for _ in range(60):
        scale = (low + high) / 2
        if statistics.fmean(min(scale * each, longest) for each in shape) < mean:
            low = scale
        else:
            high = scale
    return tuple(max(1, min(longest, round(high * each))) for each in shape)


def mean_response_tokens(config: Config, given: float | None, run: Path | None) -> float:
    """The given number, else the mean of the last steps of `run`, else half of rollout.max_new_tokens.

    Raises:
        ConfigError: the run has no such metric, or the number is out of bounds.
    """
    longest = config.rollout.max_new_tokens
    if given is not None:
        if not 1 <= given <= longest:
            allowed = f"1 to rollout.max_new_tokens = {longest}"
            raise ConfigError(f"--mean-response-tokens {given:g} is out of bounds", allowed=allowed)
        return given
    if run is None:
        return longest / 2
    found = [float(line[METRIC]) for line in read_metrics(run) if METRIC in line]
    if not found:
        remedy = "name the folder of a run with rollouts, or write --mean-response-tokens N"
        raise ConfigError(f"{run}: its metrics hold no {METRIC}", remedy=remedy)
    return min(float(longest), statistics.fmean(found[-10:]))


def decode_steps(lengths: Sequence[int], num_samples: int, at_once: int) -> list[tuple[int, int]]:
    """(steps, running samples) of the generation of a batch alone, whose lengths have these quantiles, in the order of time.

    The sum of steps x running is about num_samples x mean of the lengths. Samples above `at_once` begin when others have ended.
    """
    running = min(num_samples, at_once)
    total = num_samples * statistics.fmean(lengths)
    tail, begin = [], 0
    for index, length in enumerate(sorted(lengths)):
        alive = max(1, round(running * (1 - index / len(lengths))))
        if length > begin:
            tail.append((length - begin, alive))
            begin = length
    in_tail = sum(steps * alive for steps, alive in tail)
    full = max(0.0, total - in_tail)
    return [(round(full / running), running), *tail] if full >= running else tail
