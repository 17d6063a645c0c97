"""Checkpoints, written atomically, and resuming bit for bit with the same layout.

    checkpoints/step_00000010/hf/            the weights, a Hugging Face folder that transformers and vLLM load
                              adapter/       with LoRA in its place: the adapter alone, a folder that PEFT loads
                              rank_00000.pt  this rank's optimizer state, main weights, schedule and random states:
                                             tensors, numbers and text only, read without unpickling anything else
                              layout.json    what the ranks were

A checkpoint is written under a temporary name and renamed when every rank is done, so a folder named step_* is whole.
Resuming builds the engine from `start(folder)` and then calls `restore`. Leaves out resharding: another layout is refused.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from engine import peft
from engine.engine import Engine
from engine.optimizer import inner_optimizers
from engine.random_state import random_state, set_random_state

STEP = re.compile(r"step_(\d{8})")
MAX_SHARD_BYTES = 4 * 2**30
NOT_COPIED = (".safetensors", ".bin", ".index.json", ".pt", ".pth", ".gguf")


def _steps(root: Path) -> list[Path]:
    """The whole checkpoints, oldest first."""
    return sorted(path for path in root.glob("step_*") if STEP.fullmatch(path.name))


def newest(root: Path) -> Path | None:
    """The checkpoint of the highest step, or None."""
    return max(_steps(root), default=None)


def step_of(folder: Path) -> int:
    """The number of steps that were done when the checkpoint was written."""
    match = STEP.fullmatch(folder.name)
    assert match
    return int(match[1])


def start(folder: Path) -> dict[str, Path]:
    """The arguments of Engine that take its weights from the checkpoint."""
    return {"weights_path": folder / "hf"} if (folder / "hf").is_dir() else {"adapter_path": folder / "adapter"}


def save(
    root: Path,
    step: int,
    engine: Engine,
    weights: Iterable[tuple[str, torch.Tensor]],
    model_path: Path,
    keep: int,
    write_more: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """Write the checkpoint of `step`, then drop all but the newest `keep`. Every rank calls.

    `write_more` is called with the folder on rank 0, before it gets its name.

    `weights` is this stage's export; every rank iterates it, senders write it. With LoRA it is left alone, and the adapter
    is written; the base model stays in `model_path`. Returns the folder.
    """
    final, partial = root / f"step_{step:08d}", root / f".partial_step_{step:08d}"
    has_adapters = bool(engine.config.lora.rank)
    weights_folder = partial / ("adapter" if has_adapters else "hf")
    if engine.layout.rank == 0:
        for leftover in root.glob(".partial_*"):
            shutil.rmtree(leftover)
        weights_folder.mkdir(parents=True)
    dist.barrier()
    if has_adapters:
        peft.save_stage(weights_folder, engine.layout.pipeline_rank, engine.adapter_tensors())
    else:
        save_weights(weights_folder, engine.layout.pipeline_rank, weights)
    with engine.state_on_device():
        torch.save(_state(engine), partial / f"rank_{engine.layout.rank:05d}.pt")
    dist.barrier()
    if engine.layout.rank == 0:
        if has_adapters:
            peft.finish_folder(weights_folder, engine.config.lora, model_path)
        else:
            finish_folder(weights_folder, model_path)
        (partial / "layout.json").write_text(json.dumps(_layout(engine), indent=1))
        write_more(partial)
        _commit(partial, final)
        for old in _steps(root)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def _commit(partial: Path, final: Path) -> None:
    """Bring the folder onto the disk, then give it its name."""
    for path in (*partial.rglob("*"), partial):
        flush(path)
    if final.exists():  # a resumed run comes by the same step again
        shutil.rmtree(final)
    partial.rename(final)
    flush(final.parent)


def save_weights(folder: Path, stage: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write one stage's tensors as safetensors of at most about 4 GiB each."""
    shard: dict[str, torch.Tensor] = {}
    num_bytes = number = 0
    for name, tensor in weights:
        if shard and num_bytes + tensor.nbytes > MAX_SHARD_BYTES:
            save_file(shard, folder / f"model-{stage:03d}-{number:03d}.safetensors", metadata={"format": "pt"})
            shard, num_bytes, number = {}, 0, number + 1
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        num_bytes += tensor.nbytes
    if shard:
        save_file(shard, folder / f"model-{stage:03d}-{number:03d}.safetensors", metadata={"format": "pt"})


def finish_folder(folder: Path, model_path: Path) -> None:
    """Index the shards and add config, tokenizer and what else stands beside the start model's weights."""
    shards = sorted(folder.glob("model-*.safetensors"))
    if len(shards) == 1:
        shards[0].rename(folder / "model.safetensors")
    else:
        weight_map, total = {}, 0
        for shard in shards:
            with safe_open(shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - the file is no dict
                    weight_map[name] = shard.name
                    total += file.get_tensor(name).nbytes  # mapped, not read
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    for path in model_path.iterdir():
        if path.is_file() and not path.name.endswith(NOT_COPIED):
            shutil.copyfile(path, folder / path.name)


def restore(folder: Path, engine: Engine) -> None:
    """Put optimizer, schedule and random states back. The engine was built from `start(folder)`.

    Raises:
        ValueError: the checkpoint is of another layout or wrap, or holds objects other than tensors, numbers and text.
    """
    own, num_stages = _layout(engine), engine.layout.pipeline_size
    before = {"expert": 1, "layers": [sum(engine.stage_layers) // num_stages] * num_stages}  # when there was no other choice
    saved = {**before, **json.loads((folder / "layout.json").read_text())}
    differing = {key: (value, saved.get(key)) for key, value in own.items() if saved.get(key) != value}
    if differing:
        told = "; ".join(f"{key} is {now}, the checkpoint has {then}" for key, (now, then) in differing.items())
        raise ValueError(
            f"{folder}: cannot resume with another layout: {told}. Start with the checkpoint's layout, or begin another "
            f"run from its weights: {_from_weights(folder)}"
        )
    state = _read_state(folder, engine)
    with engine.state_on_device():
        for optimizer, entries in zip(inner_optimizers(engine.optimizer), state["optimizers"], strict=True):
            _restore_optimizer(optimizer, entries)
    engine.schedule.load_state_dict(state["schedule"])
    set_random_state(state["random_state"])


def _read_state(folder: Path, engine: Engine) -> dict[str, Any]:
    path = folder / f"rank_{engine.layout.rank:05d}.pt"
    try:
        state: dict[str, Any] = torch.load(path, map_location=engine.device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path}: holds objects that no checkpoint of this version has, none of which was loaded: it is damaged, of another "
            f"version or not to be trusted. Begin another run from its weights: {_from_weights(folder)}"
        ) from error
    return state


def _from_weights(folder: Path) -> str:
    """Overrides that start another run from the checkpoint's weights."""
    ((name, path),) = start(folder).items()
    return f"run.name=NAME {'model.path' if name == 'weights_path' else 'engine.lora.adapter_path'}={path}"


def _layout(engine: Engine) -> dict[str, Any]:
    layout = engine.layout
    return {
        "wrap": engine.config.wrap,
        "world_size": layout.world_size,
        "tensor": layout.tensor_size,
        "pipeline": layout.pipeline_size,
        "layers": list(engine.stage_layers),
        "expert": layout.expert_size,
        "dtype": str(engine.hf_bridge.dtype),
        "lora_rank": engine.config.lora.rank,
        "lora_targets": sorted(engine.config.lora.targets) if engine.config.lora.rank else [],
    }


def _state(engine: Engine) -> dict[str, Any]:
    return {
        "optimizers": [_optimizer_state(optimizer) for optimizer in inner_optimizers(engine.optimizer)],
        "schedule": engine.schedule.state_dict(),
        "random_state": random_state(),
    }


def _local(value: Any) -> Any:
    """This rank's part of a DTensor; anything else as it is."""
    return value._local_tensor if hasattr(value, "_local_tensor") else value


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _optimizer_state(optimizer: Any) -> list[dict[str, Any]]:
    """For each parameter in order: its main weight (this rank's shard) and the optimizer's tensors for it."""
    return [
        {
            "weight": _local(parameter).detach().clone(),
            "state": {key: _local(value) for key, value in optimizer.state.get(parameter, {}).items()},
        }
        for parameter in _parameters(optimizer)
    ]


@torch.no_grad()
def _restore_optimizer(optimizer: Any, entries: list[dict[str, Any]]) -> None:
    for parameter, entry in zip(_parameters(optimizer), entries, strict=True):
        _local(parameter).copy_(entry["weight"])
        if entry["state"]:
            optimizer.state[parameter] = {
                key: _like(parameter, value) if torch.is_tensor(value) and value.dim() else value
                for key, value in entry["state"].items()
            }
    for group in optimizer.param_groups:  # torch's AdamW counts steps on the CPU, unless it is fused (adam.py:163)
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].to(parameter.device if group.get("fused") else "cpu")


def _like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value`, this rank's part, distributed as the parameter is (also unevenly)."""
    if not hasattr(parameter, "_local_tensor"):
        return value
    from torch.distributed.tensor import DTensor

    distributed: Any = parameter
    result: torch.Tensor = DTensor.from_local(
        value,
        distributed.device_mesh,
        distributed.placements,
        run_check=False,
        shape=distributed.shape,
        stride=distributed.stride(),
    )
    return result


def flush(path: Path) -> None:
    """Force a file or a folder's entries onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
