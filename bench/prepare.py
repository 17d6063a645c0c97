"""Checks a bench's config, and writes a model where it names none."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from bench.common.model import write_config, write_model, write_shapes
from bench.config import METHODS, NEED_GPUS, BenchRoot
from bench.equivalence import cases
from engine.config import EngineConfig
from engine.wrap.ddp_fields import SHARDS_PARAMETERS
from megasync.checks.check import check_config
from megasync.checks.sizes import MAX_SERVED_RANK
from megasync.config.errors import ConfigError, explain, refuse_if
from megasync.config.load import with_changes
from megasync.launch.devices import visible_devices
from megasync.models.folder import check_model_config, check_model_folder


def prepare(config: BenchRoot, verb: str) -> BenchRoot:
    """The config with a model folder: model.path with its own weights, or one in the run's folder.

    Raises:
        ConfigError: it cannot be measured; nothing was started.
    """
    if verb == "equivalence":
        _check_equivalence(config)
    elif verb == "train":
        if not config.model.path:  # config.json alone
            folder, bench = config.run.folder / "model", config.bench_train
            write_config(folder, bench.shapes, config.model.dtype, bench.sequence_length)
            return with_changes(config, {"model.path": str(folder)})
        check_model_config(Path(config.model.path))  # weights are drawn
    else:
        return _prepare(config, verb)
    return config


def _prepare(config: BenchRoot, verb: str) -> BenchRoot:
    """Prepare the config of the benches whose keys are in `bench`."""
    bench = config.bench
    config = with_changes(config, {"bench.shapes": None}) if config.model.path else _with_model(config)
    check_config(config, bench.num_ranks, needs_data=False)
    _check_methods(config)
    _check_lora(config, verb)
    if verb == "rollout":
        _check_lengths(config)
        is_empty = config.rollout.dtype == "fp8" and config.bench.shapes is None and not bench.lora_rank
        _refuse("rollout.dtype", is_empty, "fp8", "it has weights by a sync, or random ones of bench.shapes on GPUs", "model")
    return config


def _refuse(key: str, is_wrong: object, value: Any, why: str, instead: Any, **lines: str) -> None:
    refuse_if(is_wrong, f"{key} = {value}: {why}", **lines, remedy=f"write {key}={instead}")


def _check_equivalence(config: BenchRoot) -> None:
    """There are such cases, and no keys are given that each case sets."""
    path, dtype, clipped = config.model.path, config.model.dtype, config.engine.optimizer.clip_grad_norm
    _refuse("model.path", path, path, "bench equivalence has tiny models of its own", "''")
    _refuse("model.dtype", dtype != "float32", dtype, "the bounds are those of float32", "float32", choices="float32")
    why = "clipping would hide how gradients differ"
    _refuse("engine.optimizer.clip_grad_norm", clipped, f"{clipped:g}", why, 0, choices="0")
    for name in ("wrap", "parallel"):
        is_given = getattr(config.engine, name) != getattr(EngineConfig(), name)
        refuse_if(is_given, f"engine.{name}: the cases set it", remedy=f"leave engine.{name} out; see bench_equivalence")
    cases.table(config)
    cases.read_back_families(config)


def _with_model(config: BenchRoot) -> BenchRoot:
    """The model of `bench.shapes`: on GPUs a sparse file, and each side draws its weights; else the weights are in the file."""
    folder, bench = config.run.folder / "model", config.bench
    remedy = "write bench.shapes=3b, or model.path=FOLDER"
    refuse_if(bench.shapes is None, "bench.shapes = null: there is no model", remedy=remedy)
    try:
        shutil.rmtree(folder, ignore_errors=True)
        model = folder, str(bench.shapes), config.model.dtype, config.rollout.max_model_len or 4096
        if visible_devices():
            write_shapes(*model)
        else:
            write_model(*model, config.run.seed)
    except OSError as error:
        remedy = "write run.dir=FOLDER for a folder of yours, with room for the model"
        raise ConfigError(explain(f"{folder}: cannot be written: {error.strerror}", remedy=remedy)) from error
    return with_changes(config, {"model.path": str(folder)} | ({} if visible_devices() else {"bench.shapes": None}))


def _check_methods(config: BenchRoot) -> None:
    bench, wrap = config.bench, config.engine.wrap
    negates_shards = bench.update == "negate" and SHARDS_PARAMETERS[wrap]
    _refuse("bench.update", negates_shards, "negate", f"not with engine.wrap = {wrap}, whose weights are shards", "step")
    choices = ", ".join(name for name in METHODS if name not in NEED_GPUS)
    missing = [name for name in bench.methods if name in NEED_GPUS and not visible_devices()]
    _refuse("bench.methods", missing, missing, "needs GPUs", "[all]", choices=choices)


def _check_lora(config: BenchRoot, verb: str) -> None:
    rank, remedy = config.engine.lora.rank, f"write bench.lora_rank={config.engine.lora.rank}, without engine.lora"
    refuse_if(rank, f"engine.lora.rank = {rank}: the bench's adapters have bench.lora_rank", remedy=remedy)
    shape, rank = check_model_folder(config.model.path), config.bench.lora_rank
    largest = min(shape.hidden_size, shape.moe_intermediate_size or shape.intermediate_size)
    if verb == "rollout" or {"all", "lora adapter"} & set(config.bench.methods):  # vLLM serves the adapters
        largest = 0 if shape.num_experts else min(largest, MAX_SERVED_RANK)
    why, allowed = f"not possible for bench {verb} with this model", f"0 to {largest}"
    _refuse("bench.lora_rank", rank > largest, rank, why, min(32, largest), allowed=allowed)


def _check_lengths(config: BenchRoot) -> None:
    bench, longest, limit = config.bench, config.rollout.max_new_tokens, config.rollout.max_model_len
    median, total = bench.median_tokens or 0, bench.prompt_tokens + longest
    why = f"longer than rollout.max_new_tokens = {longest}"
    _refuse("bench.median_tokens", median > longest, median, why, longest)
    message = f"bench.prompt_tokens = {bench.prompt_tokens}: with rollout.max_new_tokens too long for a sequence"
    remedy = f"write rollout.max_model_len={total}"
    refuse_if(limit is not None and total > limit, message, allowed=f"together at most {limit}", remedy=remedy)
