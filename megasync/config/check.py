"""Can this config run here? Checks it against the model's folder, the data files, the ranks and the run's folder.

Leaves out the values of `engine.overrides`, which are megatron-core's to judge. No torch in here.

    python -m megasync.config.check configs/grpo_fsdp.yaml engine.parallel.tensor=2 --num-ranks 8
"""

from __future__ import annotations

import argparse
import math
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from engine.ddp_fields import ddp_fields
from engine.peft_folder import check_peft_folder
from megasync.config.errors import ConfigError, explain, main_errors, nearest_name
from megasync.config.load import load_config
from megasync.config.model_folder import ModelShape, check_model_folder
from megasync.files import CHECKPOINTS, has_results
from megasync.rollouts.prompts import load_data, read_files
from megasync.rollouts.reward import resolve_reward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megasync.config.schema import Config

MAX_STALENESS = 1
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
MAX_SERVED_RANK = 512  # vllm/config/lora.py:MaxLoRARanks


def check_config(config: Config, world_size: int, *, needs_data: bool = True) -> None:
    """ConfigError for the first thing that cannot work. Makes the run's folder, to see that it can be written.

    `world_size` counts trainer ranks. The keys of `rollout` are not looked at where algorithm.name is sft.
    """
    _check_parallel(config, world_size)
    _check_overrides(config)
    _check_algorithm(config)
    _check_schedule(config)
    _refuse_if(not config.model.path, "model.path is not set", remedy="set model.path to a Hugging Face folder")
    shape = check_model_folder(config.model.path)
    _check_engine_divides(config, shape)
    _check_lora(config, shape)
    if config.algorithm.name == "grpo":
        _check_rollout(config, shape)
        _check_lengths(config, shape)
        _check_placement(config, world_size)
    if needs_data:
        _check_data(config)
    _check_run_folder(config)


def _refuse_if(is_wrong: object, message: str, **lines: str) -> None:
    if is_wrong:
        raise ConfigError(explain(message, **lines))


def _check_parallel(config: Config, world_size: int) -> None:
    parallel = config.engine.parallel
    for name, size in (("context", parallel.context), ("expert", parallel.expert)):
        key = f"engine.parallel.{name}"
        _refuse_if(size > 1, f"{key} = {size}: not supported yet", choices="1", remedy=f"write {key}=1")
    message = "engine.parallel.sequence = true: needs engine.parallel.tensor above 1, which is 1"
    remedy = "write engine.parallel.sequence=false, or a larger tensor size"
    _refuse_if(parallel.sequence and parallel.tensor == 1, message, remedy=remedy)
    _refuse_if(world_size < 1, f"{world_size} ranks", remedy="start at least 1 rank")
    product = parallel.tensor * parallel.pipeline * parallel.context
    sizes = f"{parallel.tensor} x {parallel.pipeline} x {parallel.context}"
    _refuse_if(
        world_size % product,
        f"engine.parallel.tensor x pipeline x context = {sizes}: {product} does not divide {world_size} ranks",
        choices=f"products of {_list(_divisors(world_size))}",
        remedy=f"start a multiple of {product} ranks, or make the product one of the choices",
    )


def _check_overrides(config: Config) -> None:
    fields = ddp_fields()
    for name, value in config.engine.overrides.items():
        if fields and name not in fields:
            near = nearest_name(name, fields)
            remedy = f"write engine.overrides.{near}" if near else f"write engine.overrides without {name}"
            message = f"engine.overrides.{name} = {value!r}: no field of megatron-core's DistributedDataParallelConfig"
            raise ConfigError(explain(message, choices=", ".join(sorted(fields)), remedy=remedy))


def _check_algorithm(config: Config) -> None:
    is_grpo, run = config.algorithm.name == "grpo", config.run
    factors = "data.batch_size x rollout.group_size" if is_grpo else "data.batch_size"
    group_size = config.rollout.group_size if is_grpo else 1
    num_samples = config.data.batch_size * group_size
    message = f"algorithm.num_minibatches = {config.algorithm.num_minibatches}: more than the samples of a step"
    remedy = f"write algorithm.num_minibatches={num_samples} or less"
    too_many = config.algorithm.num_minibatches > num_samples
    _refuse_if(too_many, message, samples=f"{factors} = {num_samples}", remedy=remedy)
    message = "rollout.group_size = 1: a single sample of a prompt has the advantage 0, so that GRPO trains nothing"
    _refuse_if(is_grpo and group_size == 1, message, allowed="at least 2", remedy="write for example rollout.group_size=8")
    if run.stop_at_accuracy:
        is_measured = not is_grpo and config.data.eval and config.rollout.evaluate_every_steps
        message = f"run.stop_at_accuracy = {run.stop_at_accuracy:g}: the accuracy is not measured while the run trains"
        needs = "algorithm.name=sft, data.eval, rollout.evaluate_every_steps above 0"
        _refuse_if(not is_measured, message, needs=needs, remedy="set what it needs, or write run.stop_at_accuracy=0")


def _check_schedule(config: Config) -> None:
    """megatron-core/core/optimizer_param_scheduler.py asserts the same."""
    optimizer = config.engine.optimizer
    least, rate = optimizer.min_learning_rate, optimizer.learning_rate
    message = f"engine.optimizer.min_learning_rate = {least:g}: above engine.optimizer.learning_rate = {rate:g}"
    _refuse_if(least > rate, message, remedy=f"write engine.optimizer.min_learning_rate={rate:g} or less")
    end, warmup = optimizer.decay_steps, optimizer.warmup_steps
    message = f"engine.optimizer.decay_steps = {end}: the decay would end before engine.optimizer.warmup_steps = {warmup}"
    is_over = end is not None and end <= warmup
    _refuse_if(is_over, message, remedy=f"write engine.optimizer.decay_steps={warmup + 1} or more, or null for run.steps")


def _check_engine_divides(config: Config, shape: ModelShape) -> None:
    parallel = config.engine.parallel
    split_by_tensor = ("num_attention_heads", "num_key_value_heads", "vocab_size", shape.split_size)
    _check_divides(config, "engine.parallel.tensor", parallel.tensor, shape, split_by_tensor)
    _check_divides(config, "engine.parallel.pipeline", parallel.pipeline, shape, ("num_hidden_layers",))
    if shape.num_experts and parallel.tensor > 1 and not parallel.sequence:
        message = f"engine.parallel.sequence = false: megatron-core trains {shape.model_type} split over tensors with it only"
        remedy = "write engine.parallel.sequence=true, or engine.parallel.tensor=1"
        raise ConfigError(explain(message, tensor=str(parallel.tensor), choices="true", remedy=remedy))


def _check_lora(config: Config, shape: ModelShape) -> None:
    lora = config.engine.lora
    if lora.rank == 0:
        if given := lora.model_dump(exclude_defaults=True):
            message = f"engine.lora.rank = 0: there is no adapter that engine.lora.{next(iter(given))} could be for"
            raise ConfigError(explain(message, remedy="write for example engine.lora.rank=32, or leave engine.lora out"))
        return
    _check_lora_of_experts(config, shape)
    smallest = shape.hidden_size if shape.num_experts else min(shape.hidden_size, shape.intermediate_size)
    message = f"engine.lora.rank = {lora.rank}: larger than the model's smallest dimension, {smallest}"
    _refuse_if(lora.rank > smallest, message, model=config.model.path, remedy=f"write engine.lora.rank={min(32, smallest)}")
    message = f"engine.lora.rank = {lora.rank}: vLLM serves adapters up to rank {MAX_SERVED_RANK}"
    remedy = f"write engine.lora.sync=merged, or engine.lora.rank={MAX_SERVED_RANK}"
    _refuse_if(lora.sync == "adapter" and lora.rank > MAX_SERVED_RANK, message, remedy=remedy)
    if lora.adapter_path:
        try:
            check_peft_folder(lora.adapter_path, lora, config.model.path)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def _check_lora_of_experts(config: Config, shape: ModelShape) -> None:
    """Of a mixture of experts the attention is adapted, and replicas get the whole merged."""
    if not shape.num_experts:
        return
    lora, adapted = config.engine.lora, ("linear_qkv", "linear_proj")
    wrong = [target for target in lora.targets if target not in adapted]
    if wrong:
        message = f"engine.lora.targets = {', '.join(lora.targets)}: {wrong[0]} is in the experts of {shape.model_type}"
        remedy = f"write engine.lora.targets=[{','.join(adapted)}]"
        raise ConfigError(explain(message, model=config.model.path, choices=", ".join(adapted), remedy=remedy))
    message = f"engine.lora.sync = adapter: not supported for the mixture of experts {shape.model_type}"
    lines = {"model": config.model.path, "choices": "merged", "remedy": "write engine.lora.sync=merged"}
    _refuse_if(lora.sync == "adapter", message, **lines)


def _check_divides(config: Config, key: str, size: int, shape: ModelShape, names: Sequence[str]) -> None:
    numbers = {name: int(getattr(shape, name)) for name in names}
    for name, number in numbers.items():
        if number % size:
            problem = f"does not divide the model's {name} = {number}"
            raise _wrong_size(config, key, size, problem, _divisors(math.gcd(*numbers.values())))


def _wrong_size(config: Config, key: str, size: int, problem: str, good: list[int]) -> ConfigError:
    remedy = f"write {key}={max(choice for choice in good if choice <= size)}"
    return ConfigError(
        explain(f"{key} = {size}: {problem}", model=config.model.path, choices=_list(good), remedy=remedy)
    )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _check_rollout(config: Config, shape: ModelShape) -> None:
    rollout = config.rollout
    try:
        resolve_reward(rollout.reward)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    message, choices = f"rollout.max_staleness = {rollout.max_staleness}: not supported yet", "0 (synchronous), 1 (one-step-off)"
    _refuse_if(rollout.max_staleness > MAX_STALENESS, message, choices=choices, remedy="write rollout.max_staleness=1")
    # vLLM gives each worker whole heads, and whole KV heads or the same one as its neighbours
    heads, kv_heads, size = shape.num_attention_heads, shape.num_key_value_heads, rollout.tensor_parallel
    good = [divisor for divisor in _divisors(heads) if kv_heads % divisor == 0 or divisor % kv_heads == 0]
    good = [divisor for divisor in good if shape.moe_intermediate_size % divisor == 0]
    if size not in good:
        problem = f"does not divide the model's {heads} attention heads and {kv_heads} KV heads"
        problem += f" and moe_intermediate_size = {shape.moe_intermediate_size}" if shape.num_experts else ""
        raise _wrong_size(config, "rollout.tensor_parallel", size, problem, good)


def _check_lengths(config: Config, shape: ModelShape) -> None:
    """A response and one token of a prompt fit everywhere, and one sequence fits into the KV cache. Prompts: _check_data."""
    rollout, positions = config.rollout, shape.max_position_embeddings
    allowed = f"more than rollout.max_new_tokens = {rollout.max_new_tokens}"
    limits = {"rollout.max_model_len": rollout.max_model_len, "engine.tokens_per_microbatch": config.engine.tokens_per_microbatch}
    for key, limit in limits.items():
        is_short = limit is not None and limit <= rollout.max_new_tokens
        remedy = f"write {key}={rollout.max_new_tokens + 256} or more, or a lower rollout.max_new_tokens"
        _refuse_if(is_short, f"{key} = {limit}: leaves no room for a prompt", allowed=allowed, remedy=remedy)
    model = f"max_position_embeddings = {positions} in {config.model.path}"
    message = f"rollout.max_model_len = {rollout.max_model_len}: more than the model has positions"
    is_long = rollout.max_model_len is not None and 0 < positions < rollout.max_model_len
    _refuse_if(is_long, message, model=model, remedy=f"write rollout.max_model_len={positions} or less")
    message = f"rollout.max_new_tokens = {rollout.max_new_tokens}: leaves no room for a prompt"
    remedy = f"write rollout.max_new_tokens={positions // 2}"
    _refuse_if(0 < positions <= rollout.max_new_tokens, message, model=model, remedy=remedy)
    longest = rollout.max_model_len or positions
    size = shape.head_dim or shape.hidden_size // shape.num_attention_heads
    kv_heads = max(1, shape.num_key_value_heads // rollout.tensor_parallel)
    needed = 2 * shape.num_hidden_layers * kv_heads * size * DTYPE_BYTES[config.model.dtype] * longest
    message = f"rollout.kv_cache_bytes = {rollout.kv_cache_bytes}: too small for one sequence of {longest} tokens"
    remedy = "write more, or a lower rollout.max_model_len"
    is_small = rollout.kv_cache_bytes is not None and rollout.kv_cache_bytes < needed
    _refuse_if(is_small, message, allowed=f"at least {needed}", remedy=remedy)


def _check_placement(config: Config, world_size: int) -> None:
    rollout, transport = config.rollout, config.sync.transport
    lines = {"placement": rollout.placement, "remedy": "write sync.transport=auto"}
    if not rollout.is_colocated:
        message = "sync.transport = ipc: trainer and replicas have GPUs of their own, and ipc is for GPUs that they share"
        _refuse_if(transport == "ipc", message, **lines)
        return
    message = "sync.transport = nccl: trainer and replicas share GPUs, and NCCL wants one of its own for each member"
    _refuse_if(transport == "nccl", message, **lines)
    message = f"rollout.max_staleness = {rollout.max_staleness}: replicas on the trainer's GPUs sleep while it trains"
    _refuse_if(rollout.max_staleness, message, placement=rollout.placement, remedy="write rollout.max_staleness=0")
    workers = rollout.replicas * rollout.tensor_parallel
    message = f"rollout.replicas = {rollout.replicas}: with rollout.tensor_parallel more workers than the trainer has ranks"
    remedy = f"write rollout.replicas={max(1, world_size // rollout.tensor_parallel)} or start {workers} ranks"
    sizes = f"{rollout.replicas} x {rollout.tensor_parallel} = {workers} on {world_size} ranks"
    _refuse_if(workers > world_size, message, placement=rollout.placement, workers=sizes, remedy=remedy)


def _check_data(config: Config) -> None:
    """Tokenises it where transformers is installed; a machine that only submits runs may not have it."""
    (load_data if find_spec("transformers") else read_files)(config)


def _check_run_folder(config: Config) -> None:
    name, folder = config.run.name, config.run.folder
    message = f"run.name = {name!r}: the name of one folder is expected"
    _refuse_if(name in ("", ".", "..") or "/" in name, message, remedy="put the folders above it into run.dir")
    _check_former_run(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as probe:
            probe.write(b"probe")
            probe.flush()
    except OSError as error:
        message = f"run.dir, run.name = {folder}: the run's folder cannot be written: {error.strerror}"
        remedy = "write run.dir=FOLDER for a folder of yours"
        raise ConfigError(explain(message, looked_at=str(folder.resolve()), remedy=remedy)) from error


def _check_former_run(config: Config) -> None:
    """What the run starts from may not be moved aside with the results of a former run (see megasync/files.py:set_aside)."""
    folder = config.run.folder
    resumes = config.checkpoint.resume == "auto" and any((folder / CHECKPOINTS).glob("step_*"))
    if resumes or not has_results(folder):
        return
    inputs = {"model.path": config.model.path, "engine.lora.adapter_path": config.engine.lora.adapter_path}
    for key, path in {**inputs, "data.train": config.data.train, "data.eval": config.data.eval}.items():
        if path and folder.resolve() in Path(path).resolve().parents:
            message = f"{key} = {path}: lies in the run's folder, whose results of a former run would be moved aside"
            remedy = "write run.name=NAME for another run"
            raise ConfigError(explain(message, run_folder=str(folder), remedy=remedy))


def main() -> None:
    """Exit code 0 and one line where the config can run; else the error and 2."""
    parser = argparse.ArgumentParser(prog="python -m megasync.config.check", description=__doc__.splitlines()[0])
    parser.add_argument("config", help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as engine.wrap=ddp")
    parser.add_argument("--num-ranks", type=int, default=1, help="trainer ranks to be started (default: 1)")
    arguments = parser.parse_intermixed_args()
    with main_errors():
        check_config(load_config(arguments.config, arguments.overrides), arguments.num_ranks)
    print(f"{arguments.config}: can run on {arguments.num_ranks} ranks")


if __name__ == "__main__":
    main()
