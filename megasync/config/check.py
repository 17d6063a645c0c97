"""Can this config run here? Checks it against the model's folder, the data files, the ranks and the run's folder.

No torch in here.

    python -m megasync.config.check configs/grpo_fsdp.yaml engine.parallel.tensor=2 --num-ranks 8
"""

from __future__ import annotations

import argparse
import math
import tempfile
from dataclasses import fields
from typing import TYPE_CHECKING

from engine import ddp_fields
from engine.peft_folder import check_peft_folder
from megasync.config.errors import ConfigError, explain, main_errors, nearest_name
from megasync.config.load import load_config
from megasync.config.model_folder import ModelShape, check_model_folder
from megasync.rollouts.data import load_examples
from megasync.rollouts.reward import check_reward_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megasync.config.schema import Config

MAX_STALENESS = 1
MAX_SERVED_RANK = 512  # vllm/config/lora.py:MaxLoRARanks


def check_config(config: Config, world_size: int, *, needs_data: bool = True) -> None:
    """ConfigError for the first thing that cannot work. Makes the run's folder, to see that it can be written.

    `world_size` counts trainer ranks. The keys of `rollout` are not looked at where algorithm.name is sft.
    """
    _check_parallel(config, world_size)
    _check_overrides(config)
    _check_algorithm(config)
    if not config.model.path:
        remedy = "set model.path to a Hugging Face folder"
        raise ConfigError(explain("model.path is not set", remedy=remedy))
    shape = check_model_folder(config.model.path)
    _check_engine_divides(config, shape)
    _check_lora(config, shape)
    if config.algorithm.name == "grpo":
        _check_rollout(config, shape, world_size)
    if needs_data:
        _check_data(config)
    _check_run_folder(config)


def _check_parallel(config: Config, world_size: int) -> None:
    parallel = config.engine.parallel
    for name, size in (("context", parallel.context), ("expert", parallel.expert)):
        if size > 1:
            key = f"engine.parallel.{name}"
            raise ConfigError(explain(f"{key} = {size}: not supported yet", choices="1", remedy=f"write {key}=1"))
    if parallel.sequence and parallel.tensor == 1:
        message = "engine.parallel.sequence = true: needs engine.parallel.tensor above 1, which is 1"
        raise ConfigError(explain(message, remedy="write engine.parallel.sequence=false, or a larger tensor size"))
    if world_size < 1:
        raise ConfigError(explain(f"{world_size} ranks", remedy="start at least 1 rank"))
    product = parallel.tensor * parallel.pipeline * parallel.context
    if world_size % product:
        sizes = f"{parallel.tensor} x {parallel.pipeline} x {parallel.context}"
        raise ConfigError(
            explain(
                f"engine.parallel.tensor x pipeline x context = {sizes}: {product} does not divide {world_size} ranks",
                choices=f"products of {_list(_divisors(world_size))}",
                remedy=f"start a multiple of {product} ranks, or make the product one of the choices",
            )
        )


def _check_overrides(config: Config) -> None:
    for name, value in config.engine.overrides.items():
        if reason := ddp_fields.refusal(config.engine.wrap, name, value):
            near = "" if name in ddp_fields.REFUSED or name in ddp_fields.TAKEN else nearest_name(name, ddp_fields.TAKEN)
            fields = ", ".join(field for field, (_, wraps, _) in ddp_fields.TAKEN.items() if config.engine.wrap in wraps)
            remedy = f"write engine.overrides.{near}" if near else f"leave engine.overrides.{name} out"
            raise ConfigError(explain(f"engine.overrides.{name} = {value!r}: {reason}", choices=fields, remedy=remedy))


def _check_algorithm(config: Config) -> None:
    is_grpo = config.algorithm.name == "grpo"
    group_size = config.rollout.group_size if is_grpo else 1
    num_samples = config.data.batch_size * group_size
    if config.algorithm.num_minibatches > num_samples:
        factors = "data.batch_size x rollout.group_size" if is_grpo else "data.batch_size"
        message = f"algorithm.num_minibatches = {config.algorithm.num_minibatches}: more than the samples of a step"
        remedy = f"write algorithm.num_minibatches={num_samples} or less"
        raise ConfigError(explain(message, samples=f"{factors} = {num_samples}", remedy=remedy))


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
        given = [field.name for field in fields(lora) if getattr(lora, field.name) != field.default]
        if given:
            message = f"engine.lora.rank = 0: there is no adapter that engine.lora.{given[0]} could be for"
            raise ConfigError(explain(message, remedy="write for example engine.lora.rank=32, or leave engine.lora out"))
        return
    _check_lora_of_experts(config, shape)
    smallest = shape.hidden_size if shape.num_experts else min(shape.hidden_size, shape.intermediate_size)
    if lora.rank > smallest:
        message = f"engine.lora.rank = {lora.rank}: larger than the model's smallest dimension, {smallest}"
        remedy = f"write engine.lora.rank={min(32, smallest)}"
        raise ConfigError(explain(message, model=config.model.path, remedy=remedy))
    if lora.sync == "adapter" and lora.rank > MAX_SERVED_RANK:
        message = f"engine.lora.rank = {lora.rank}: vLLM serves adapters up to rank {MAX_SERVED_RANK}"
        raise ConfigError(explain(message, remedy=f"write engine.lora.sync=merged, or engine.lora.rank={MAX_SERVED_RANK}"))
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
    if lora.sync == "adapter":
        message = f"engine.lora.sync = adapter: not supported for the mixture of experts {shape.model_type}"
        raise ConfigError(explain(message, model=config.model.path, choices="merged", remedy="write engine.lora.sync=merged"))


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


def _check_rollout(config: Config, shape: ModelShape, world_size: int) -> None:
    rollout = config.rollout
    try:
        check_reward_name(rollout.reward)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if rollout.max_staleness > MAX_STALENESS:
        message = f"rollout.max_staleness = {rollout.max_staleness}: not supported yet"
        remedy = "write rollout.max_staleness=1"
        raise ConfigError(explain(message, choices="0 (synchronous), 1 (one-step-off)", remedy=remedy))
    if rollout.max_model_len is not None and rollout.max_model_len <= rollout.max_new_tokens:
        message = f"rollout.max_model_len = {rollout.max_model_len}: leaves no room for a prompt"
        needed = f"more than rollout.max_new_tokens = {rollout.max_new_tokens}"
        raise ConfigError(explain(message, allowed=needed, remedy="raise it, or write rollout.max_model_len=null"))
    _check_placement(config, world_size)
    # vLLM gives each worker whole heads, and whole KV heads or the same one as its neighbours
    heads, kv_heads, size = shape.num_attention_heads, shape.num_key_value_heads, rollout.tensor_parallel
    good = [divisor for divisor in _divisors(heads) if kv_heads % divisor == 0 or divisor % kv_heads == 0]
    good = [divisor for divisor in good if shape.moe_intermediate_size % divisor == 0]
    if size not in good:
        problem = f"does not divide the model's {heads} attention heads and {kv_heads} KV heads"
        problem += f" and moe_intermediate_size = {shape.moe_intermediate_size}" if shape.num_experts else ""
        raise _wrong_size(config, "rollout.tensor_parallel", size, problem, good)


def _check_placement(config: Config, world_size: int) -> None:
    rollout, transport = config.rollout, config.sync.transport
    if not rollout.is_colocated:
        if transport == "ipc":
            message = "sync.transport = ipc: trainer and replicas have GPUs of their own, and ipc is for GPUs that they share"
            raise ConfigError(explain(message, placement=rollout.placement, remedy="write sync.transport=auto"))
        return
    if transport == "nccl":
        message = "sync.transport = nccl: trainer and replicas share GPUs, and NCCL wants one of its own for each member"
        raise ConfigError(explain(message, placement=rollout.placement, remedy="write sync.transport=auto"))
    if rollout.max_staleness:
        message = f"rollout.max_staleness = {rollout.max_staleness}: replicas on the trainer's GPUs sleep while it trains"
        raise ConfigError(explain(message, placement=rollout.placement, remedy="write rollout.max_staleness=0"))
    workers = rollout.replicas * rollout.tensor_parallel
    if workers > world_size:
        message = f"rollout.replicas = {rollout.replicas}: with rollout.tensor_parallel more workers than the trainer has ranks"
        remedy = f"write rollout.replicas={max(1, world_size // rollout.tensor_parallel)} or start {workers} ranks"
        sizes = f"{rollout.replicas} x {rollout.tensor_parallel} = {workers} on {world_size} ranks"
        raise ConfigError(explain(message, placement=rollout.placement, workers=sizes, remedy=remedy))


def _check_data(config: Config) -> None:
    data = config.data
    if not data.train:
        raise ConfigError(explain("data.train is not set", remedy="set data.train to a JSONL file"))
    for key, path in (("data.train", data.train), ("data.eval", data.eval)):
        if path:
            try:
                load_examples(path, data.prompt_key, data.answer_key)
            except ValueError as error:
                raise ConfigError(f"{key}: {error}") from error


def _check_run_folder(config: Config) -> None:
    name, folder = config.run.name, config.run.folder
    if name in ("", ".", "..") or "/" in name:
        message = f"run.name = {name!r}: the name of one folder is expected"
        raise ConfigError(explain(message, remedy="put the folders above it into run.dir"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as probe:
            probe.write(b"probe")
            probe.flush()
    except OSError as error:
        message = f"run.dir, run.name = {folder}: the run's folder cannot be written: {error.strerror}"
        remedy = "write run.dir=FOLDER for a folder of yours"
        raise ConfigError(explain(message, looked_at=str(folder.resolve()), remedy=remedy)) from error


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
