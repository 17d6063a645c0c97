"""Examples answered by replicas and scored by rewards, just as a run's own evaluations are (rollouts/evaluation.py).

A mean over prompts comes with its 95 % confidence interval, the normal one of the central limit theorem, over prompts and not
over samples, since samples of one prompt are alike (E. Miller, Adding Error Bars to Evals, arXiv:2411.00640, sections 2.1 and
2.2). It is for some dozen prompts or more; where all prompts have one value its width is 0. Leaves out which examples there are,
and the replicas (replicas.py).

    estimate([1.0, 0.0, 1.0, 1.0])      # Estimate(mean=0.75, low=0.26, high=1.24, num_prompts=4)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import stat
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from megasync.checks.data import check_data, check_engine_arguments
from megasync.checks.exact import check_exact
from megasync.checks.sizes import check_cache, check_cache_memory, check_served
from megasync.config.data_section import MAX_TEMPERATURE, MIN_TEMPERATURE
from megasync.config.errors import ConfigError, refuse_if
from megasync.config.schema import Config
from megasync.episodes.resolve import resolve_episode
from megasync.episodes.task import Played
from megasync.hf.folder import check_model_folder
from megasync.launch.devices import visible_devices
from megasync.launch.scope import check_ray
from megasync.rewards.pool import RewardPool
from megasync.rollouts.evaluation import Evaluation, pass_at_k, requests_of, standard_error
from megasync.rollouts.requests import begins_thinking, reward_inputs, sample_line
from megasync.rollouts.turns import ATTEMPTS

if TYPE_CHECKING:
    from bridge.generation import Completion
    from bridge.replicas.pool import ReplicaPool
    from megasync.data.data import Example
    from megasync.data.prompts import Prompts
    from megasync.rewards.functions import RewardInput
    from megasync.serving.source import Source

Answers = Sequence[Sequence["Completion | Played"]]
# Of these sections what has an effect where weights are served and not trained, and of the two others what has none.
SERVING: dict[str, tuple[str, ...]] = {
    "run": ("seed", "deterministic"),
    "model": ("dtype", "exact"),
    "engine": ("head_dtype", "tokens_per_microbatch"),
    "sync": ("canary_tolerance",),
    "algorithm": (),
    "checkpoint": (),
}
TRAINING = (
    *("data.train", "data.split", "data.batch_size", "data.shuffle", "rollout.placement", "rollout.offload_trainer"),
    *("rollout.max_staleness", "rollout.on_update", "rollout.cache_on_update", "rollout.record"),
    *("rollout.evaluate_every_steps", "rollout.evaluate_at_start"),
)
Z = statistics.NormalDist().inv_cdf(0.975)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which weights, and how they are sampled from."""
    parser.add_argument("what", type=Path, metavar="RUN|CHECKPOINT|HF_FOLDER", help="such as runs/rl")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the run's config, such as rollout.replicas=2")
    parser.add_argument("--step", type=int, help="the checkpoint of this step of a run (default: the newest)")
    parser.add_argument("--samples", type=positive, metavar="K", help="responses a prompt (default: 1)")
    parser.add_argument("--temperature", type=_temperature, metavar="T", help="0: greedy, for one sample")
    parser.add_argument("--max-new-tokens", type=positive, metavar="N", help="of one response (default: rollout.max_new_tokens)")
    parser.add_argument("--to", type=Path, metavar="FILE.jsonl", help="one line a response")


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
    shape, on_gpus = check_model_folder(config.model.path), bool(visible_devices())
    check_exact(config, shape, on_gpus=on_gpus)
    check_served(config, shape, on_gpus=on_gpus)
    check_cache_memory(config)
    check_data(config)
    check_engine_arguments(config)
    check_ray(config)
    if config.rollout.episode:
        resolve_episode(config.rollout.episode)


def unused_overrides(overrides: Sequence[str]) -> list[str]:
    """A line on the keys, given for this command, that are of training alone; none where there are no such keys."""
    unused = []
    for key in (override.partition("=")[0] for override in overrides):
        section, *inner = key.split(".")
        used = SERVING.get(section)
        if key in TRAINING or (used is not None and (not used if not inner else inner[0] not in used)):
            unused.append(key)
    return [f"without effect: {', '.join(unused)}: nothing is trained here"] if unused else []


def with_length(source: Source, config: Config, evaluations: Sequence[Evaluation], prompts: Prompts) -> Config:
    """Where nothing is given rollout.max_model_len of a folder is that of the longest of what is asked: the cache has to hold it.

    How long an episode gets nobody knows: it may have what it has in a run. ConfigError where the cache cannot hold a sequence.
    """
    shape = check_model_folder(config.model.path)
    if config.rollout.max_model_len is not None or source.is_of_run:
        check_cache(config, shape)
        return config
    lengths = [
        len(prompts.prompt_ids(example)) + each.sampling.max_new_tokens for each in evaluations for example in each.examples
    ]
    lengths = [config.engine.tokens_per_microbatch] if config.rollout.episode else lengths
    most = min(max(lengths), shape.max_position_embeddings or max(lengths))
    found = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_model_len": most})})
    check_cache(found, shape)
    return found


def takes_what_fits(source: Source, given: argparse.Namespace) -> bool:
    """Whether a response may be as long as the model has room for: of a folder, where nobody says how long."""
    is_said = given.max_new_tokens or any(each.startswith("rollout.max_new_tokens=") for each in given.overrides)
    return not (source.is_of_run or is_said)


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
    print(f"{message}: responses of up to {room} tokens; --max-new-tokens says otherwise", file=sys.stderr)
    return with_new_tokens(config, room)


def with_new_tokens(config: Config, number: int) -> Config:
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_new_tokens": number})})


def check_lengths(config: Config, evaluation: Evaluation, prompts: Prompts) -> None:
    """ConfigError for a prompt that leaves no room for its response."""
    limit = config.rollout.max_model_len or check_model_folder(config.model.path).max_position_embeddings
    for example in evaluation.examples if limit else ():
        length, response = len(prompts.prompt_ids(example)), evaluation.sampling.max_new_tokens
        message = f"prompt {example.line}: its {length} tokens and {response} new ones are more than the {limit} that fit"
        remedy = f"write --max-new-tokens {max(1, limit - length)}, or shorten it"
        refuse_if(length + response > limit, message, remedy=remedy)


def ask(pool: ReplicaPool, evaluation: Evaluation, prompts: Prompts, run_seed: int) -> Answers:
    """Completions of every example, in order; the same as those of a run's evaluation with this name and seed.

    Episodes are played by megasync/evaluate.py.
    """
    return pool.generate(requests_of(evaluation, prompts, run_seed)).result()


def score(config: Config, evaluation: Evaluation, prompts: Prompts, answers: Answers) -> list[list[float]]:
    """What `rollout.reward` gives for each; of an episode only where it did not say itself what it was worth.

    Raises:
        RewardError: a reward failed, and rollout.reward_on_failure is stop.
    """
    limit, inputs = evaluation.sampling.max_new_tokens, list[list["RewardInput"]]()
    for example, group in zip(evaluation.examples, answers, strict=True):
        asked = [one for one in group if own_reward(one) is None]
        ids = [np.array(one.final_ids, np.int32) if isinstance(one, Played) else one.token_ids for one in asked]
        thinking = begins_thinking(prompts, example)
        inputs.append(reward_inputs(example, asked, prompts.texts(ids), limit, thinking=thinking) if asked else [])
    scored: list[list[float]] = asyncio.run(_score_all(config, inputs)) if any(inputs) else [[] for _ in inputs]
    rewards = [iter(of_group) for of_group in scored]
    pairs = zip(answers, rewards, strict=True)
    return [[next(found) if (own := own_reward(one)) is None else own for one in group] for group, found in pairs]


def own_reward(done: Completion | Played) -> float | None:
    """What an episode said that it was worth."""
    return done.reward if isinstance(done, Played) else None


def has_failed(done: Completion | Played) -> bool:
    """An episode of which every attempt failed."""
    return isinstance(done, Played) and done.num_failures >= ATTEMPTS


async def _score_all(config: Config, groups: list[list[RewardInput]]) -> list[list[float]]:
    with RewardPool(config.rollout) as rewards:
        scored = iter(await asyncio.gather(*map(rewards.score_group, filter(None, groups))))
    return [[each.total for each in next(scored)] if group else [] for group in groups]


def lines(
    evaluation: Evaluation, prompts: Prompts, answers: Answers, rewards: Sequence[Sequence[float]] | None
) -> Iterator[dict[str, Any]]:
    """One for each response, as in samples.jsonl; without rewards where there are none."""
    for place, (example, group) in enumerate(zip(evaluation.examples, answers, strict=True)):
        for sample, completion in enumerate(group):
            reward = rewards[place][sample] if rewards is not None else 0.0
            line = {**sample_line(prompts, example, completion, reward, evaluation.name), "sample": sample}
            left_out = ("versions", *(("reward", "set") if rewards is None else ()))
            yield {name: value for name, value in line.items() if name not in left_out}


def write(file: TextIO, found: Iterator[dict[str, Any]], *, empties: bool) -> None:
    """`empties`: of former answers, if it is a file (and no pipe). OSError where the disk is full, or nobody reads any more."""
    if empties and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.truncate(0)
    file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in found)
    file.flush()


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """Refused before anything is asked where it cannot be written. What is in it stays until there are answers."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--to {path}: cannot be written: {error.strerror}", remedy="name a file of yours") from error
    try:
        yield file
    finally:
        with suppress(OSError):  # of what `write` could not write, and told
            file.close()


@dataclass(frozen=True)
class Estimate:
    """`low` and `high` are None for one prompt alone."""

    mean: float
    low: float | None
    high: float | None
    num_prompts: int


def estimate(values: Sequence[float]) -> Estimate:
    """Of one value a prompt, at least one."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Estimate(mean, None, None, 1)
    half = Z * standard_error(values)
    return Estimate(mean, mean - half, mean + half, len(values))


def estimates(rewards: Sequence[Sequence[float]], pass_reward: float) -> dict[str, Estimate]:
    """avg@n of the n samples of every prompt, and pass@k for k = n and the powers of two below it."""
    num_samples = len(rewards[0])
    passed = [sum(reward >= pass_reward for reward in group) for group in rewards]
    found = {f"avg@{num_samples}": estimate([statistics.fmean(group) for group in rewards])}
    for k in sorted({2**power for power in range(num_samples.bit_length()) if 2**power < num_samples} | {num_samples}):
        found[f"pass@{k}"] = estimate([pass_at_k(num_samples, count, k) for count in passed])
    return found
