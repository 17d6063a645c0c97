"""Whether a config can run here: checks of its keys, model folder, data files, number of ranks and run folder, in order.

No torch in here.

    data = check_config(config, world_size=8)      # ConfigError with all problems
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from engine.config import NAME_BYTES, is_own
from megasync.checks.data import check_data, check_engine_arguments, check_episodes
from megasync.checks.endpoint import check_endpoint
from megasync.checks.fp8 import check_capability
from megasync.checks.judges import check_judges
from megasync.checks.own_functions import check_own_functions
from megasync.checks.resume import check_resume
from megasync.checks.served_sizes import check_cache_memory
from megasync.checks.settings import check_layout, check_settings
from megasync.checks.teacher import check_teacher
from megasync.config.errors import ConfigError, ErrorCollector, refuse, refuse_if, wrong
from megasync.config.files import CHECKPOINTS, existing, has_results, unwritable
from megasync.config.schema import Config
from megasync.config.shipped import how_to_install
from megasync.data.load import RunData, load_data, read_files
from megasync.data.sampler import check_sampler
from megasync.launch.machine import check_temporary_folder
from megasync.launch.scope import FOR_CLUSTER
from megasync.models.folder import check_model_folder
from megasync.report.loggers import missing_loggers
from megasync.rewards.resolve import require_packages, resolve_rewards, weights


def check_config(config: Config, world_size: int, *, needs_data: bool = True, makes_folder: bool = False) -> RunData | None:
    """ConfigError for all that cannot work. The data, where they are read and there is a tokenizer for them.

    `world_size` counts trainer ranks. Sizes of `rollout` are not checked where algorithm.name is sft. Leaves nothing behind, but
    the run's folder where it `makes_folder`.
    """
    errors = ErrorCollector()
    checks: list[Callable[[], None]] = [
        lambda: check_settings(config, world_size),
        lambda: check_packages(config),
        lambda: _check_own_functions(config),
        check_temporary_folder,
    ]
    if config.model.path:
        checks.append(lambda: check_layout(config, check_model_folder(config.model.path), world_size))
        checks.append(lambda: check_teacher(config))
    if config.algorithm.name == "grpo":
        rollout = (_check_rewards, check_cache_memory, check_capability, _check_episodes, check_engine_arguments)
        checks += [partial(check, config) for check in rollout]
    checks += [partial(check, config) for check in (check_data, check_resume, check_run_folder)]
    for check in checks:
        with errors.collect():
            check()
    if errors.found and needs_data:
        with errors.collect():
            read_files(config)
    if config.algorithm.name == "grpo" and not errors.found:  # a server that does not answer takes long to be given up
        with errors.collect():
            check_endpoint(config)
    errors.raise_all()
    if makes_folder:
        config.run.folder.mkdir(parents=True, exist_ok=True)
    if needs_data and not find_spec("transformers"):  # a machine that only submits runs may have none
        read_files(config)
        return None
    if not needs_data:
        return None
    data = load_data(config)
    check_sampler(config.data, data.train, config.run.seed)
    return data


def check_packages(config: Config) -> None:
    """ConfigError for packages that keys need; not where there is no torch, as on a machine that only submits runs."""
    missing: list[ConfigError] = []
    if config.engine.kernels == "te" and not find_spec("transformer_engine"):
        problem, remedy = "TransformerEngine is not installed", "install transformer_engine[pytorch], 2.9 to 2.11"
        remedy += ", or write engine.kernels=auto"
        missing.append(wrong(config, "engine.kernels", problem, choices="auto, torch", remedy=remedy))
    if config.engine.kernels == "fla" and not find_spec("fla"):
        problem, remedy = "flash-linear-attention is not installed", "pip install fla-core, or write engine.kernels=auto"
        missing.append(wrong(config, "engine.kernels", problem, choices="auto, torch", remedy=remedy))
    for name in missing_loggers(config.run.loggers):
        remedy = f"pip install {name}, or take {name} out of run.loggers"
        missing.append(wrong(config, "run.loggers", f"the package {name} is not installed", remedy=remedy))
    needed = {"engine.wrap": ["megatron", "megatron_fsdp", "mbridge"]}
    if config.algorithm.name == "grpo":
        needed["algorithm.name"] = ["ray", "vllm"] if config.rollout.ray_address == "local" else ["ray"]
    for key, modules in needed.items():
        if lost := [name for name in modules if not find_spec(name)]:
            missing.append(wrong(config, key, f"needs {', '.join(lost)}, not installed", remedy=how_to_install()))
    if find_spec("torch"):
        with _noted_for_a_cluster():
            refuse(missing)


def _check_rewards(config: Config) -> None:
    reward = config.rollout.reward
    check_judges(config)
    with _noted_for_a_cluster(reward):
        resolve_rewards(reward)
    with _noted_for_a_cluster():
        if find_spec("torch") and os.environ.get("RANK", "0") == "0":  # rank 0 alone has rewards
            require_packages(reward, fetches=FOR_CLUSTER not in os.environ)


def _check_own_functions(config: Config) -> None:
    own = (config.algorithm.loss, config.algorithm.advantage, config.rollout.filter, *config.run.callbacks, *config.run.loggers)
    with _noted_for_a_cluster(dict.fromkeys(filter(is_own, own), 1.0)):
        check_own_functions(config)


def _check_episodes(config: Config) -> None:
    with _noted_for_a_cluster(config.rollout.episode):
        check_episodes(config)


@contextmanager
def _noted_for_a_cluster(named: str | Mapping[str, float] = "") -> Iterator[None]:
    """Print a missing package where the run is submitted to a cluster, whose nodes need it; else raise.

    `named`: functions that are imported. An error about a module of theirs is raised in any case, since it is to travel.
    """
    try:
        yield
    except ConfigError as error:
        cause = error.__cause__
        name = cause.name if isinstance(cause, ModuleNotFoundError) else None
        is_own = any(f"{path.partition(':')[0]}.".startswith(f"{name}.") for path in weights(named)) if named else False
        if FOR_CLUSTER not in os.environ or is_own or (named and name is None):
            raise
        print(f"not here, but needed on the cluster's nodes: {str(error).splitlines()[0]}", file=sys.stderr)


def check_run_folder(config: Config) -> None:
    """ConfigError where the run's folder has no good name, or cannot be written."""
    name, folder = config.run.name, config.run.folder
    message = f"run.name = {name!r}: the name of one folder is expected"
    refuse_if(name in ("", ".", "..") or "/" in name, message, remedy="put the folders above it into run.dir")
    longest = NAME_BYTES - len(".partial_.lock")  # what lies beside it has longer names
    refuse_if(len(os.fsencode(name)) > longest, f"{message}, of up to {longest} bytes", remedy="write a shorter name")
    for key, text in (("run.name", name), ("run.dir", str(config.run.dir))):
        problem = "has a character that cannot be printed"
        refuse_if(not text.isprintable(), f"{key} = {text!r}: {problem}", remedy="write it with letters, digits, - and _")
    _check_former_run(config)
    problem = unwritable(folder)
    headline, remedy = f"run.dir = {config.run.dir}: cannot be written: {problem}", "write run.dir=FOLDER for a folder of yours"
    refuse_if(problem, headline, looked_at=str(existing(folder)), remedy=remedy)


def _check_former_run(config: Config) -> None:
    """ConfigError where an input of the run would be moved away with the results of a former run (files.py:archive_folder)."""
    folder = config.run.folder
    resumes = config.checkpoint.resumes and any((folder / CHECKPOINTS).glob("step_*"))
    for key, path in config.input_paths.items():
        if not resumes and has_results(folder) and Path(os.path.realpath(folder)) in Path(os.path.realpath(path)).parents:
            message = f"{key} = {path}: lies in the run's folder, whose results of a former run would be moved aside"
            raise ConfigError(message, run_folder=str(folder), remedy="write run.name=NAME for another run")
