"""Can this config run here? Checks it against the model's folder, the data files, the ranks and the run's folder.

No torch in here.

    python -m megasync.checks.check configs/grpo_fsdp.yaml engine.parallel.tensor=2 --num-ranks 8
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from importlib.util import find_spec
from pathlib import Path

from engine.wrap import ddp_fields
from megasync.checks.algorithm import check_objective, check_routing
from megasync.checks.data import check_data, check_engine_arguments
from megasync.checks.episodes import check_episodes
from megasync.checks.exact import check_deterministic, check_exact
from megasync.checks.resume import check_resume
from megasync.checks.sizes import check_engine, check_ranks, check_rollout
from megasync.checks.unused import check_unused, unused_keys
from megasync.config.errors import ConfigError, main_errors, nearest_name, refuse_if
from megasync.config.files import CHECKPOINTS, has_results
from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.data.prompts import RunData, load_data, read_files
from megasync.hf.folder import check_model_folder
from megasync.reporting.loggers import missing_loggers
from megasync.rewards.resolve import resolve_rewards


def check_config(config: Config, world_size: int, *, needs_data: bool = True, makes_folder: bool = False) -> RunData | None:
    """ConfigError for the first thing that cannot work. The data, where it is read and there is something to tokenise it with.

    `world_size` counts trainer ranks. The sizes of `rollout` are not looked at where algorithm.name is sft. Leaves nothing
    behind, unless it `makes_folder`, the run's.
    """
    check_ranks(config, world_size)
    _check_overrides(config)
    _check_kernels(config)
    _check_loggers(config)
    _check_gradients(config)
    _check_algorithm(config)
    check_objective(config)
    _check_schedule(config)
    check_unused(config)
    check_deterministic(config)
    refuse_if(not config.model.path, "model.path is not set", remedy="set model.path to a Hugging Face folder")
    shape = check_model_folder(config.model.path)
    check_engine(config, shape)
    check_exact(config, shape)
    check_routing(config, shape)
    if config.algorithm.name == "grpo":
        resolve_rewards(config.rollout.reward)
        check_episodes(config)
        check_rollout(config, shape, world_size)
        check_engine_arguments(config)
    check_data(config)
    check_resume(config)
    _check_run_folder(config, makes_folder=makes_folder)
    if needs_data and not find_spec("transformers"):  # a machine that only submits runs may have none
        read_files(config)
        return None
    return load_data(config) if needs_data else None


def _check_overrides(config: Config) -> None:
    for name, value in config.engine.overrides.items():
        if reason := ddp_fields.refusal(config.engine.wrap, name, value):
            near = "" if name in ddp_fields.REFUSED or name in ddp_fields.TAKEN else nearest_name(name, ddp_fields.TAKEN)
            fields = ", ".join(field for field, (_, wraps, _) in ddp_fields.TAKEN.items() if config.engine.wrap in wraps)
            remedy = f"write engine.overrides.{near}" if near else f"leave engine.overrides.{name} out"
            raise ConfigError(f"engine.overrides.{name} = {value!r}: {reason}", choices=fields, remedy=remedy)


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


def _check_gradients(config: Config) -> None:
    """Under both wraps bfloat16 stands for the dtype of the weights."""
    dtype = config.model.dtype
    message = f"engine.gradient_dtype = bfloat16: model.dtype = {dtype} has its gradients in float32"
    remedy = "write engine.gradient_dtype=float32, or model.dtype=bfloat16"
    refuse_if(config.engine.gradient_dtype != "float32" and dtype != "bfloat16", message, choices="float32", remedy=remedy)


def _check_algorithm(config: Config) -> None:
    is_grpo, run = config.algorithm.name == "grpo", config.run
    factors = "data.batch_size x rollout.group_size" if is_grpo else "data.batch_size"
    group_size = config.rollout.group_size if is_grpo else 1
    num_samples = config.data.batch_size * group_size
    message = f"algorithm.num_minibatches = {config.algorithm.num_minibatches}: more than the samples of a step"
    remedy = f"write algorithm.num_minibatches={num_samples} or less"
    too_many = config.algorithm.num_minibatches > num_samples
    refuse_if(too_many, message, samples=f"{factors} = {num_samples}", remedy=remedy)
    message = "rollout.group_size = 1: a single sample of a prompt has the advantage 0, so that GRPO trains nothing"
    refuse_if(is_grpo and group_size == 1, message, allowed="at least 2", remedy="write for example rollout.group_size=8")
    if run.stop_at_accuracy:
        is_measured = not is_grpo and config.data.eval and config.rollout.evaluate_every_steps
        message = f"run.stop_at_accuracy = {run.stop_at_accuracy:g}: the accuracy is not measured while the run trains"
        needs = "algorithm.name=sft, data.eval, rollout.evaluate_every_steps above 0"
        refuse_if(not is_measured, message, needs=needs, remedy="set what it needs, or write run.stop_at_accuracy=0")


def _check_schedule(config: Config) -> None:
    """megatron-core/core/optimizer_param_scheduler.py asserts the same."""
    optimizer = config.engine.optimizer
    least, rate = optimizer.min_learning_rate, optimizer.learning_rate
    message = f"engine.optimizer.min_learning_rate = {least:g}: above engine.optimizer.learning_rate = {rate:g}"
    refuse_if(least > rate, message, remedy=f"write engine.optimizer.min_learning_rate={rate:g} or less")
    end, warmup = optimizer.decay_steps, optimizer.warmup_steps
    message = f"engine.optimizer.decay_steps = {end}: the decay would end before engine.optimizer.warmup_steps = {warmup}"
    is_over = end is not None and end <= warmup
    refuse_if(is_over, message, remedy=f"write engine.optimizer.decay_steps={warmup + 1} or more, or null for run.steps")


def _check_run_folder(config: Config, *, makes_folder: bool) -> None:
    name, folder = config.run.name, config.run.folder
    message = f"run.name = {name!r}: the name of one folder is expected"
    refuse_if(name in ("", ".", "..") or "/" in name, message, remedy="put the folders above it into run.dir")
    _check_former_run(config)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as probe:
            probe.write(b"probe")
            probe.flush()
    except OSError as error:
        message = f"run.dir, run.name = {folder}: the run's folder cannot be written: {error.strerror}"
        remedy = "write run.dir=FOLDER for a folder of yours"
        raise ConfigError(message, looked_at=str(folder.resolve()), remedy=remedy) from error
    finally:
        with contextlib.suppress(OSError):  # another process may have begun to use them
            for path in made if not makes_folder else ():
                path.rmdir()


def _check_former_run(config: Config) -> None:
    """What the run starts from may not be moved aside with the results of a former run (files.py:set_aside)."""
    folder = config.run.folder
    resumes = config.checkpoint.resume == "auto" and any((folder / CHECKPOINTS).glob("step_*"))
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
    for note in unused_keys(config):
        print(note)
    print(f"{arguments.config}: can run on {arguments.num_ranks} ranks")


if __name__ == "__main__":
    main()
