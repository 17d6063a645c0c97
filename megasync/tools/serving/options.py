"""The options that `megasync evaluate` and `megasync generate` share, and what follows from them before anything starts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasync.checks.data import check_data, check_engine_arguments
from megasync.checks.exact import exact_errors
from megasync.checks.served_sizes import cache_errors, check_cache_memory, served_errors
from megasync.checks.speculation import speculation_errors
from megasync.config.data_section import MAX_TEMPERATURE, MIN_TEMPERATURE
from megasync.config.errors import refuse, refuse_if
from megasync.config.schema import Config
from megasync.episodes.resolve import resolve_episode
from megasync.launch.devices import visible_devices
from megasync.launch.machine import check_temporary_folder
from megasync.launch.scope import check_ray
from megasync.models.folder import check_model_folder
from megasync.rollouts.evaluation import Evaluation

if TYPE_CHECKING:
    from megasync.data.data import Example
    from megasync.data.prompts import Prompts
    from megasync.tools.serving.source import Source

TRAINING_KEYS = (  # and those below them; where weights are served and not trained they have no effect
    *("algorithm", "checkpoint", "run.steps", "run.name", "run.dir", "sync", "data.train", "data.split", "data.batch_size"),
    *("data.shuffle", "engine.optimizer", "engine.parallel", "engine.wrap", "engine.lora", "engine.recompute", "teacher"),
    *("rollout.placement", "rollout.offload_trainer", "rollout.max_staleness", "rollout.on_update", "rollout.cache_on_update"),
    *("rollout.dtype", "rollout.record", "rollout.evaluate_every_steps", "rollout.evaluate_at_start"),
)


def sampling_parser(verb: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"megasync {verb}", description=description)
    parser.add_argument("what", type=Path, metavar="RUN|CHECKPOINT|HF_FOLDER", help="such as runs/rl")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the run's config, such as rollout.replicas=2")
    help_ = "the checkpoint of this step of a run (default: the newest); 0: the model it starts from"
    parser.add_argument("--step", type=int, help=help_)
    parser.add_argument("--samples", type=positive, metavar="K", help="responses a prompt (default: 1)")
    parser.add_argument("--temperature", type=_temperature, metavar="T", help="0: greedy, for one sample")
    parser.add_argument("--max-new-tokens", type=positive, metavar="N", help="of one response (default: rollout.max_new_tokens)")
    parser.add_argument("--split", default="", help="of --data, where it is a folder with several")
    parser.add_argument("--limit", type=positive, metavar="N", help="the first N examples")
    parser.add_argument("--to", type=Path, metavar="FILE.jsonl", help="one line a response")
    return parser


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return number


def _temperature(text: str) -> float:
    number = float(text)
    if not (number == 0 or MIN_TEMPERATURE <= number <= MAX_TEMPERATURE):
        raise argparse.ArgumentTypeError(f"{text}: 0 or {MIN_TEMPERATURE} to {MAX_TEMPERATURE}")
    return number


def check_servable(config: Config) -> None:
    """ConfigError where model, sets, vLLM's arguments or the address of a Ray cannot be used."""
    check_temporary_folder()
    shape, on_gpus = check_model_folder(config.model.path), bool(visible_devices())
    of_replicas = (exact_errors(config, shape, on_gpus=on_gpus), served_errors(config, shape, on_gpus=on_gpus))
    refuse([*chain(*of_replicas), *speculation_errors(config, shape, on_gpus=on_gpus)])
    check_cache_memory(config)
    check_data(config)
    check_engine_arguments(config)
    check_ray(config)
    if config.rollout.episode:
        resolve_episode(config.rollout.episode)


def unused_overrides(overrides: Sequence[str]) -> list[str]:
    """A line on the keys, given for this command, that are of training alone; none where there are no such keys."""
    keys = [override.partition("=")[0] for override in overrides]
    unused = [key for key in keys if any(f"{key}.".startswith(f"{each}.") for each in TRAINING_KEYS)]
    return [f"without effect: {', '.join(unused)}: nothing is trained here"] if unused else []


def has_default_length(source: Source, given: argparse.Namespace) -> bool:
    """Whether a response may be as long as the model has room for: of a folder, where no length is given."""
    is_given = given.max_new_tokens or any(each.startswith("rollout.max_new_tokens=") for each in given.overrides)
    return not (source.is_of_run or is_given)


def with_room(config: Config, prompts: Prompts, examples: Sequence[Example]) -> Config:
    """With the most new tokens that fit behind the longest of these prompts, up to the default.

    It prints a note where they are fewer. ConfigError where nothing fits.
    """
    positions, default = check_model_folder(config.model.path).max_position_embeddings, config.rollout.max_new_tokens
    limit = min(filter(None, (config.rollout.max_model_len, positions)), default=0)
    longest = max((len(prompts.prompt_ids(example)) for example in examples), default=0)
    room = limit - longest
    if not limit or room >= default:
        return config
    message = f"the longest prompt has {longest} tokens, of {limit} that fit"
    refuse_if(room < 1, f"{message}: there is no room for a response", remedy="shorten it, or leave it out")
    print(f"{message}: responses of up to {room} tokens; --max-new-tokens changes that", file=sys.stderr)
    return of_rollout(config, max_new_tokens=room)


def with_model_len(source: Source, config: Config, evaluations: Sequence[Evaluation], prompts: Prompts) -> Config:
    """For a folder: rollout.max_model_len is the longest sequence, unless given, so that the KV cache holds it. An episode's
    length is unknown: it has the one of a run. ConfigError where the cache cannot hold a sequence.
    """
    shape = check_model_folder(config.model.path)
    if config.rollout.max_model_len is None and not source.is_of_run:
        pairs = [(example, each.sampling) for each in evaluations for example in each.examples]
        longest = max(len(prompts.prompt_ids(example)) + sampling.max_new_tokens for example, sampling in pairs)
        longest = config.engine.tokens_per_microbatch if config.rollout.episode else longest
        config = of_rollout(config, max_model_len=min(longest, shape.max_position_embeddings or longest))
    refuse(cache_errors(config, shape))
    return config


def of_rollout(config: Config, **keys: Any) -> Config:
    """With other values of these keys of `rollout`."""
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=keys)})
