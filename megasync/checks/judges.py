"""Judges: rules of their keys, and one request to each that `rollout.reward` names, before anything starts. No torch in here.

check_judges(config)                    # ConfigError
lines = ask_judges(config, inputs)      # each endpoint is asked once
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from jinja2 import meta

from engine.rules import divisors
from megasync.checks.data import beside_errors
from megasync.checks.served_sizes import is_served_here, unserved_errors
from megasync.config.errors import ConfigError, combined, nearest_name, refuse
from megasync.config.judge_section import ENVIRONMENT, JudgeConfig
from megasync.config.schema import Config
from megasync.launch.devices import visible_devices
from megasync.models.folder import check_weights, model_shape, read_json_object
from megasync.rewards.failures import shown
from megasync.rewards.functions import RewardInput
from megasync.rewards.judges.judge import endpoint_settings, sampling_of
from megasync.rewards.judges.prompt import Messages, PromptError, messages
from megasync.rewards.judges.reply import UnparsedError, read_score
from megasync.rewards.resolve import JUDGE, named_judges, weights
from megasync.served.endpoint import Endpoint
from megasync.served.pool import chat_form
from megasync.served.protocol import ServedError

SECONDS = 60.0  # for an endpoint's first reply


def check_judges(config: Config) -> None:
    """ConfigError for a judge that is named and not declared, or whose keys do not go together."""
    named_judges(config.rollout.reward, config.judges)
    refuse(_chosen_errors(config))
    refuse(error for name, judge in config.judges.items() for error in _judge_errors(config, f"judges.{name}", judge))


def _chosen_errors(config: Config) -> Iterator[ConfigError]:
    """Errors for rewards that a source or an evaluation set names and `rollout.reward` does not have."""
    names = list(weights(config.rollout.reward))
    for key, chosen in config.data.chosen_rewards.items():
        for name in (name for name in chosen if name not in names):
            lines = {"choices": ", ".join(names), "nearest": nearest_name(name, names), "remedy": "add it to rollout.reward"}
            yield ConfigError(f"{key} = {name}: rollout.reward does not name it", **lines)


def _judge_errors(config: Config, key: str, judge: JudgeConfig) -> Iterator[ConfigError]:
    if bool(judge.path) == bool(judge.endpoint):
        problem = "has both a path and an endpoint" if judge.path else "has neither a path nor an endpoint"
        yield ConfigError(f"{key}: {problem}", remedy=f"write {key}.path=FOLDER or {key}.endpoint=http://HOST:PORT/v1")
    for name in judge.given_replica_keys if judge.endpoint else ():
        message = f"{key}.{name} = {getattr(judge, name)}: {key}.endpoint is served elsewhere"
        yield ConfigError(message, remedy=f"leave {key}.{name} out")
    for name in ("model", "timeout_seconds") if judge.path and not judge.endpoint else ():
        if (value := getattr(judge, name)) != JudgeConfig.model_fields[name].default:
            message = f"{key}.{name} = {value}: it is for an endpoint, and {key}.path is served by the run's replicas"
            yield ConfigError(message, remedy=f"leave {key}.{name} out")
    if judge.on_unparsed == "retry" and judge.temperature == 0:
        remedy = f"write {key}.temperature=0.7, or {key}.on_unparsed=zero"
        yield ConfigError(f"{key}.on_unparsed = retry: at {key}.temperature = 0 each reply is the same", remedy=remedy)
    if judge.path and not (Path(judge.path) / "config.json").is_file():
        yield ConfigError(f"{key}.path = {judge.path}: is no model folder", remedy="name a folder with config.json and weights")
    elif judge.path:
        yield from _folder_errors(config, key, judge)
    reads = meta.find_undeclared_variables(ENVIRONMENT.parse(judge.prompt + judge.system))
    if "response" not in reads:
        remedy = f"write {{{{ response }}}} into {key}.prompt where the response is to stand"
        yield ConfigError(f"{key}.prompt = {shown(judge.prompt)}: does not show the response", remedy=remedy)


def _folder_errors(config: Config, key: str, judge: JudgeConfig) -> Iterator[ConfigError]:
    """The weights are whole, and vLLM has the arguments and divides the heads. The family may be any that it serves."""
    yield from beside_errors(key, judge)
    folder = Path(judge.path)
    try:
        if not any(folder.glob("*.bin")):  # which vLLM reads, too
            check_weights(folder)
        fields = read_json_object(folder / "config.json")
    except ConfigError as error:  # which speaks of model.path
        yield error.about("model.path", f"{key}.path")
        return
    if find_spec("transformers"):  # a machine that only submits runs may have none
        yield from _chat_errors(key, judge, folder)
    if is_served_here(config):
        yield from _kernel_errors(config, f"{key}.path", folder)
    text = fields.get("text_config")
    heads = (text if isinstance(text, dict) else fields).get("num_attention_heads")
    if type(heads) is int and heads % judge.tensor_parallel:
        message = f"{key}.tensor_parallel = {judge.tensor_parallel}: does not divide the model's {heads} attention heads"
        good = [size for size in divisors(heads) if size <= judge.tensor_parallel]
        yield ConfigError(message, choices=", ".join(map(str, divisors(heads))), remedy=f"write {key}.tensor_parallel={good[-1]}")


def _chat_errors(key: str, judge: JudgeConfig, folder: Path) -> Iterator[ConfigError]:
    """Errors of the judge's tokenizer and chat template, tried with the roles of its prompt."""
    roles = ("system", "user") if judge.system else ("user",)
    try:
        template = chat_form(folder)[1]
    except ConfigError as error:  # which speaks of model.path
        yield error.about("model.path", f"{key}.path")
        return
    try:
        template.render([{"role": role, "content": "?"} for role in roles], generate=True)
    except Exception as error:  # noqa: BLE001 # of the template's code
        message = f"{key}.path = {folder}: its chat template refuses messages of {' and '.join(roles)}: {error}"
        yield ConfigError(message, remedy=f"{f'leave {key}.system out, or ' if judge.system else ''}name another judge")


def _kernel_errors(config: Config, key: str, folder: Path) -> Iterator[ConfigError]:
    """Sizes that vLLM has no kernels for, of families that the engine knows. Of others vLLM says so as it starts."""
    try:
        shape = model_shape(folder)
    except ConfigError:
        return
    for error in unserved_errors(config, folder, shape, "name another judge", on_gpus=bool(visible_devices())):
        yield error.about("model.path", key)


def ask_judges(config: Config, inputs: Sequence[RewardInput]) -> list[str]:
    """Render the prompts of all inputs, and ask each endpoint for the score of the first one. Lines for the user.

    Raises:
        ConfigError: a prompt cannot be rendered, none of a judge's endpoints gives a reply, or a reply without a score would stop
            the run.
    """
    lines = list[str]()
    for name in named_judges(config.rollout.reward, config.judges):
        judge = config.judges[name]
        try:
            asked = [messages(judge, given) for given in inputs if given.is_scored_by(f"{JUDGE}{name}")]
        except PromptError as error:
            raise ConfigError(f"judges.{name}.prompt = {shown(judge.prompt)}: {error}", remedy="correct the template") from error
        if not asked:
            continue
        tried = [asyncio.run(_try_endpoint(name, judge, url, asked[0])) for url in judge.endpoint]
        lost = [error for error in tried if isinstance(error, ConfigError)]
        if lost and len(lost) == len(tried):
            raise combined(lost)
        lines += map(str, tried)
    return lines


async def _try_endpoint(name: str, judge: JudgeConfig, url: str, asked: Messages) -> str | ConfigError:
    """A line for the user, or why there is no reply."""
    key, seconds = f"judges.{name}.endpoint = {url}", min(SECONDS, judge.timeout_seconds)
    endpoint = Endpoint(replace(endpoint_settings(name, judge), urls=(url,), timeout_seconds=seconds, patience_seconds=0.0))
    try:
        reply = await endpoint.chat(asked, sampling_of(judge))
    except ServedError as error:
        problem = str(error).rpartition("; the last try: ")[2]
        remedy = f"start the server, or correct the URL and judges.{name}.model"
        return ConfigError(f"{key}: gives no reply", problem=problem, remedy=remedy)
    finally:
        await endpoint.close()
    try:
        return f"{key}: gives {read_score(reply, judge):g} to an answer of the data"
    except UnparsedError as error:
        message, remedy = f"{key}: gave a reply without a score: {error}", f"ask for the score's form in judges.{name}.prompt"
        if judge.on_unparsed == "stop":
            raise ConfigError(message, reply=shown(reply), remedy=remedy) from error
        return f"{message}: {shown(reply)}"
