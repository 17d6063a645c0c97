"""Can this config run here? Checks it against the model's folder, the data files, the ranks and the run's folder.

No torch in here.

    python -m megasync.checks.check configs/grpo_fsdp.yaml engine.parallel.tensor=2 --num-ranks 8
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from engine.config import NAME_BYTES
from megasync.checks.data import ask_vllm, check_data, check_engine_arguments, check_episodes
from megasync.checks.resume import check_resume
from megasync.checks.settings import check_layout, check_settings
from megasync.checks.sizes import check_cache_memory
from megasync.checks.unused import unused_keys
from megasync.config.errors import ConfigError, Found, main_errors, refuse_if
from megasync.config.files import CHECKPOINTS, existing, has_results, unwritable
from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.config.shipped import how_to_install
from megasync.data.load import RunData, load_data, read_files
from megasync.hf.folder import check_model_folder
from megasync.launch.scope import FOR_CLUSTER
from megasync.reporting.loggers import missing_loggers
from megasync.rewards.resolve import require_packages, resolve_rewards, weights


def check_config(config: Config, world_size: int, *, needs_data: bool = True, makes_folder: bool = False) -> RunData | None:
    """ConfigError for all that cannot work. The data, where it is read and there is something to tokenise it with.

    `world_size` counts trainer ranks. The sizes of `rollout` are not looked at where algorithm.name is sft. Leaves nothing
    behind, unless it `makes_folder`, the run's.
    """
    found = Found()
    with found.more():
        check_settings(config, world_size)
    with found.more(), _only_told_for_a_cluster():
        _check_kernels(config)
    with found.more(), _only_told_for_a_cluster():
        _check_loggers(config)
    if config.model.path:
        with found.more():
            check_layout(config, check_model_folder(config.model.path), world_size)
    if config.algorithm.name == "grpo":
        _check_what_generates(config, found)
    with found.more():
        check_data(config)
    with found.more():
        check_resume(config)
    with found.more():
        _check_run_folder(config)
    if found.errors and needs_data:
        with found.more():
            read_files(config)
    found.stop()
    if makes_folder:
        config.run.folder.mkdir(parents=True, exist_ok=True)
    if needs_data and not find_spec("transformers"):  # a machine that only submits runs may have none
        read_files(config)
        return None
    return load_data(config) if needs_data else None


def _check_what_generates(config: Config, found: Found) -> None:
    own = config.rollout
    with found.more(), _only_told_for_a_cluster(own.reward):
        resolve_rewards(own.reward)
    with found.more(), _only_told_for_a_cluster():
        if find_spec("torch") and os.environ.get("RANK", "0") == "0":  # as for kernels; rank 0 alone has rewards
            require_packages(own.reward, fetches=FOR_CLUSTER not in os.environ)
    with found.more(), _only_told_for_a_cluster():
        is_missing = find_spec("torch") and not find_spec("vllm") and own.ray_address == "local"
        refuse_if(is_missing, "vllm is not installed, which algorithm.name = grpo samples with", remedy=how_to_install())
    with found.more():
        check_cache_memory(config)
    with found.more(), _only_told_for_a_cluster(own.episode):
        check_episodes(config)
    with found.more():
        check_engine_arguments(config)


@contextmanager
def _only_told_for_a_cluster(named: str | Mapping[str, float] = "") -> Iterator[None]:
    """What is missing here is refused; where the run is submitted to a cluster, whose nodes need it, it is only told.

    `named`: whose import may fail. Of its errors those of a package are told, not of its own module, which is to travel.
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


def _check_kernels(config: Config) -> None:
    """Where nothing is trained, as on a machine that only submits runs, there may be no torch either."""
    is_missing = find_spec("torch") and not find_spec("transformer_engine")
    remedy = "install transformer_engine[pytorch], 2.9 to 2.11, or write engine.kernels=auto"
    message = "engine.kernels = te: TransformerEngine is not installed"
    refuse_if(config.engine.kernels == "te" and is_missing, message, choices="auto, torch", remedy=remedy)


def _check_loggers(config: Config) -> None:
    """As for kernels, where there is no torch nothing is trained."""
    for name in missing_loggers(config.run.loggers) if find_spec("torch") else ():
        message = f"run.loggers = {', '.join(config.run.loggers)}: the package {name} is not installed"
        raise ConfigError(message, remedy=f"pip install {name}, or take {name} out of run.loggers")


def _check_run_folder(config: Config) -> None:
    name, folder = config.run.name, config.run.folder
    message = f"run.name = {name!r}: the name of one folder is expected"
    refuse_if(name in ("", ".", "..") or "/" in name, message, remedy="put the folders above it into run.dir")
    longest = NAME_BYTES - len(".partial_.lock")  # what lies beside it has longer names
    refuse_if(len(os.fsencode(name)) > longest, f"{message}, of up to {longest} bytes", remedy="write a shorter name")
    unprintable = next((part for part in (name, str(config.run.dir)) if not part.isprintable()), "")
    message = f"run.dir, run.name = {unprintable!r}: holds a control character, or another that cannot be printed"
    refuse_if(unprintable, message, remedy="write it with letters, digits, - and _")
    _check_former_run(config)
    problem = unwritable(folder)
    message, remedy = f"run.dir, run.name = {folder}: cannot be written: {problem}", "write run.dir=FOLDER for a folder of yours"
    refuse_if(problem, message, looked_at=str(existing(folder)), remedy=remedy)


def _check_former_run(config: Config) -> None:
    """What the run starts from may not be moved aside with the results of a former run (files.py:set_aside)."""
    folder = config.run.folder
    resumes = config.checkpoint.resumes and any((folder / CHECKPOINTS).glob("step_*"))
    for key, path in config.input_paths.items():
        if not resumes and has_results(folder) and folder.resolve() in Path(path).resolve().parents:
            message = f"{key} = {path}: lies in the run's folder, whose results of a former run would be moved aside"
            raise ConfigError(message, run_folder=str(folder), remedy="write run.name=NAME for another run")


def main() -> None:
    """Exit code 0 and one line where the config can run; else the error and 2."""
    parser = argparse.ArgumentParser(prog="python -m megasync.checks.check", description=__doc__.splitlines()[0])
    parser.add_argument("config", help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as engine.wrap=ddp")
    parser.add_argument("--num-ranks", type=int, default=1, help="trainer ranks to be started (default: 1)")
    arguments = parser.parse_intermixed_args()
    with main_errors():
        config = load_config(arguments.config, arguments.overrides)
        check_config(config, arguments.num_ranks)
        ask_vllm(config)
    for note in unused_keys(config):
        print(note)
    print(f"{arguments.config}: can run on {arguments.num_ranks} ranks")


if __name__ == "__main__":
    main()
