"""Held-out results of a run, a checkpoint or a Hugging Face folder: avg@k and pass@k with confidence intervals.

    megasync evaluate runs/rl                                          # the run's own sets, as its eval/... metrics
    megasync evaluate runs/rl --data test.jsonl --samples 8 --temperature 1.0 --to answers.jsonl
    megasync evaluate models/mine --data test.jsonl --reward math_verify data.prompt_key=problem

Prompts, chat template, stop texts, dtype and reward are those of the run's config.yaml. Exit codes: 0 done; 2 nothing was
started; 1 failed on the way. Leaves out metrics of training.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasync.checks.judges import check_judges
from megasync.config.data_section import EvalSet
from megasync.config.errors import ConfigError, main_errors, refuse_if
from megasync.config.schema import Config
from megasync.config.teacher_section import TeacherConfig
from megasync.data.data import load_examples
from megasync.data.load import RunData, load_data
from megasync.data.prompts import Prompts
from megasync.episodes.task import EpisodeResult
from megasync.rewards.pool import Scored
from megasync.rewards.resolve import require_packages, resolve_rewards
from megasync.rollouts.evaluation import HELD_OUT, Evaluation, evaluations, requests_of
from megasync.rollouts.group import Group
from megasync.rollouts.requests import task_of
from megasync.rollouts.turns import ATTEMPTS
from megasync.tools.evaluate.estimates import Estimate, estimates
from megasync.tools.serving import answers, options
from megasync.tools.serving.replicas import Serve, machine_errors, scratch_folder, served
from megasync.tools.serving.source import Source, find_source

if TYPE_CHECKING:
    from bridge.replicas.pool import ReplicaPool

OF_SETS = ("samples", "temperature", "max_new_tokens", "limit", "pass_reward")  # options that replace keys of all sets


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = options.sampling_parser("evaluate", "avg@k and pass@k on held-out examples.")
    parser.add_argument("--data", metavar="FILE", help="as data.train takes (default: the sets of the run's data.eval)")
    parser.add_argument("--reward", help="as rollout.reward (default: the run's)")
    help_ = "a response with this reward or more passes (default: 1)"
    parser.add_argument("--pass-reward", type=_pass_reward, metavar="R", help=help_)
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    given = parser.parse_intermixed_args(list(arguments))
    if given.split and not given.data:
        parser.error(f"--split {given.split}: is of --data; add --data FOLDER, or leave it out: a run's sets have their own")
    return given


def _pass_reward(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: a number above 0")
    return number


def main(arguments: Sequence[str], serve: Serve = served) -> int:
    """The exit code. `serve`: replicas that have the config's weights."""
    given = parse(arguments)
    with scratch_folder() as scratch, contextlib.ExitStack() as files:
        with main_errors():
            overrides = [*given.overrides, *([f"rollout.reward={given.reward}"] if given.reward else [])]
            source = find_source(given.what, scratch, given.step, overrides)
            with named_by_options(with_sets(source, given), given):
                config, data = prepared(source, given)
            chosen = evaluations(config, data)
            config = options.with_model_len(source, config, chosen, data.prompts)
            file = files.enter_context(answers.opened(given.to)) if given.to else None
        for note in [*options.unused_overrides(given.overrides), *data.notes]:
            print(note, file=sys.stderr)
        found: dict[str, Any] = {"weights": source.name, "model": config.model.path, "reward": config.rollout.reward, "sets": {}}
        found |= {"episode": config.rollout.episode} if config.rollout.episode else {}
        with machine_errors(), serve(config) as pool:
            for number, each in enumerate(chosen):
                got = answers_of(config, pool, each, data.prompts)
                rewards = answers.score(config, each, data.prompts, got)
                found["sets"][each.name] = result(each, rewards, got)
                if file is not None:
                    answers.write(file, answers.lines(each, data.prompts, got, rewards), empties=number == 0)
    print(json.dumps(found, indent=2) if given.json else table(found))
    return 0


def prepared(source: Source, given: argparse.Namespace) -> tuple[Config, RunData]:
    """The config and the examples of the sets, checked.

    Raises:
        ConfigError: something in them cannot be used.
    """
    config = with_sets(source, given)
    if given.data:  # its errors name the keys and options that it is read by
        keys = config.data.prompt_key, config.data.answer_key
        load_examples(given.data, *keys, split=given.split, split_key="--split", is_supervised=True, trains=False)
    options.check_servable(config)
    resolve_rewards(config.rollout.reward)
    check_judges(config)
    for name in config.pooled_judges:
        remedy = f"serve it with `vllm serve`, and write judges.{name}.path= judges.{name}.endpoint=http://HOST:PORT/v1"
        raise ConfigError(f"judges.{name}.path = {config.judges[name].path}: only a run starts a judge's replicas", remedy=remedy)
    require_packages(config.rollout.reward)
    if not options.has_default_length(source, given):
        return config, load_data(config, trains=False)
    data = load_data(options.of_rollout(config, max_new_tokens=1), trains=False)
    examples = [*data.held_out, *(example for examples in data.eval_sets.values() for example in examples)]
    return options.with_room(config, data.prompts, examples), data


def with_sets(source: Source, given: argparse.Namespace) -> Config:
    """The config with the sets that are to be evaluated: --data alone, or the run's own, each with the options given.

    Raises:
        ConfigError: there is none.
    """
    data = source.config.data
    sets = data.eval_sets or ({HELD_OUT: EvalSet(path=data.eval)} if isinstance(data.eval, str) and data.eval else {})
    if given.data:
        sets = {Path(given.data).stem or "data": EvalSet(path=given.data, split=given.split)}
    refuse_if(not sets, f"{source.name}: names no evaluation sets", remedy="write --data FILE")
    changes = {name: getattr(given, name) for name in OF_SETS if getattr(given, name) is not None}
    sets = {name: each.model_copy(update=changes) for name, each in sets.items()}
    if (given.samples or 1) > 1 and given.temperature is None:  # greedy samples would all be the same
        drawn = {"temperature": source.config.rollout.temperature}
        sets = {name: each if each.temperature else each.model_copy(update=drawn) for name, each in sets.items()}
    no_teacher = {"teacher": TeacherConfig()}  # nobody asks it, and its folder may be gone
    return source.config.model_copy(update={"data": data.model_copy(update={"eval": sets}), **no_teacher})


@contextlib.contextmanager
def named_by_options(config: Config, given: argparse.Namespace) -> Iterator[None]:
    """A ConfigError of the block names the options in place of the keys of sets that they replace; beside --data they all do."""
    names = [name for name in OF_SETS if given.data or getattr(given, name) is not None]
    sets = rf"data\.eval\.({'|'.join(map(re.escape, config.data.eval_sets))})"

    def renamed(text: str) -> str:
        if names:
            text = re.sub(rf"{sets}\.({'|'.join(names)})\b( ?=)? ?", _option, text)
        return re.sub(rf"{sets}(?=:)", lambda _: f"--data {given.data}", text) if given.data else text

    try:
        yield
    except ConfigError as error:
        lines = {name: renamed(text) for name, text in error.lines.items()}
        raise ConfigError(renamed(error.headline), **lines) from error


def _option(key: re.Match[str]) -> str:
    """The option of a key, and the space before its value or the next word."""
    return f"--{key[2].replace('_', '-')}" + (" " if key[0][-1] in "= " else "")


# ---------------------------------------------------------------------------------------------------------------- answers


def answers_of(config: Config, pool: ReplicaPool, evaluation: Evaluation, prompts: Prompts) -> answers.Answers:
    """Answers to all examples, in order: responses, or episodes where the run has such, with the seeds of its own evaluation."""
    requests = requests_of(evaluation, prompts, config.run.seed)
    if not config.rollout.episode:
        return pool.generate(requests).result()
    tasks = [task_of(prompts, *pair) for pair in zip(evaluation.examples, requests, strict=True)]
    return play(config, pool, requests, tasks)


def play(config: Config, pool: ReplicaPool, requests: Sequence[Any], tasks: Sequence[Any]) -> list[list[EpisodeResult]]:
    """
    Raises:
        RuntimeError: too few replicas are left, or an episode failed and rollout.episode_on_failure is stop.
    """
    from bridge.messages import FOLDER_VERSION
    from megasync.episodes.pool import EpisodePool
    from megasync.rollouts.rollout import stream_settings
    from megasync.rollouts.stream import RolloutStream
    from megasync.rollouts.turns import episode_settings

    players = EpisodePool(config)
    settings = stream_settings(config, scores_groups=False), _no_group, _no_scores, _note
    stream = RolloutStream(pool, *settings, episodes=(players, episode_settings(config)))
    try:
        stream.run(stream.serve(FOLDER_VERSION))
        played = stream.run(stream.generate(list(requests), list(tasks)))
    finally:
        stream.close()
        players.close()
    if played is None:
        raise RuntimeError(f"fewer than rollout.min_replicas = {config.rollout.min_replicas} replicas are left")
    return played  # type: ignore[return-value] # they had tasks


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _no_group(ordinal: int) -> Group:
    raise AssertionError(f"group {ordinal}: nothing is trained here")


async def _no_scores(group: Group, _: Sequence[int]) -> list[Scored]:
    raise AssertionError(f"group {group.key}: the stream scores groups that are trained")


# ---------------------------------------------------------------------------------------------------------------- results


def result(evaluation: Evaluation, rewards: Sequence[Sequence[float]], got: answers.Answers) -> dict[str, Any]:
    """The result of one set, for --json and the table."""
    sampling, done = evaluation.sampling, [one for group in got for one in group]
    return {
        "prompts": len(rewards),
        "samples": sampling.num_samples,
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_new_tokens,
        "pass_reward": evaluation.pass_reward,
        "truncated": sum(one.finish_reason == "length" for one in done) / len(done),
        "failed": sum(isinstance(one, EpisodeResult) and one.num_failures >= ATTEMPTS for one in done),
        **{name: asdict(each) for name, each in estimates(rewards, evaluation.pass_reward).items()},
    }


def table(found: dict[str, Any]) -> str:
    """A few lines for each set."""
    shown = [f"{found['weights']}: " + (f"episode {found['episode']}" if "episode" in found else f"reward {found['reward']}")]
    for name, values in found["sets"].items():
        sampled = f"temperature {values['temperature']:g}" if values["temperature"] else "greedy"
        samples = f"{values['samples']} sample{'' if values['samples'] == 1 else 's'} each"
        shown.append(f"{name}: {values['prompts']} prompts, {samples}, {sampled}, {values['truncated']:.1%} cut off")
        if values["failed"]:
            number = values["prompts"] * values["samples"]
            shown.append(f"  {values['failed']} of {number} episodes failed: they count with reward 0")
        shown += [f"  {metric:<8} {Estimate(**values[metric])}" for metric in values if "@" in metric]
    return "\n".join([*shown, "in brackets the 95 % confidence interval over prompts"])
