"""Names of checkpoints and of their files, the index's facts on the run that wrote it, and the start of a resumed run.

`restore` puts the optimizer, the schedule and random states back, in the same layout or another.
"""

from __future__ import annotations

import hashlib
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.checkpoint.shards import Shard, optimizer_shards
from engine.checkpoint.state import Reader
from engine.engine import Engine
from engine.resume import FORMAT, damaged, instead, model_of, random_file, read_index
from engine.runtime.random_state import derive_random_state, set_random_state
from engine.wrap.optimizer import load_scaler_state, scaler_state

STEP = re.compile(r"step_(\d{8})")
MAX_NAMED = 5  # tensors in an error


def steps(root: Path) -> list[Path]:
    """The whole checkpoints, oldest first."""
    return sorted(path for path in root.glob("step_*") if STEP.fullmatch(path.name))


def newest(root: Path) -> Path | None:
    """The checkpoint of the highest step, or None."""
    return max(steps(root), default=None)


def step_of(folder: Path) -> int:
    """The number of steps that were done when the checkpoint was written."""
    match = STEP.fullmatch(folder.name)
    assert match
    return int(match[1])


def engine_arguments(folder: Path) -> dict[str, Path]:
    """The arguments of Engine that take its weights from the checkpoint."""
    return {"weights_path": folder / "hf"} if (folder / "hf").is_dir() else {"adapter_path": folder / "adapter"}


def index_header(engine: Engine, step: int) -> dict[str, Any]:
    seed = hashlib.sha256(f"{step} ".encode() + bytes(torch.get_rng_state().tolist())).digest()[:4]
    return {
        "format": FORMAT,
        "model": model(engine),
        "layout": layout(engine),
        "schedule": engine.schedule.state_dict(),
        "optimizer_steps": engine.num_optimizer_steps - (engine.num_steps - step) * engine.algorithm.steps_per_batch,  # planned
        "loss_scaler": scaler_state(engine.optimizer),
        "random_seed": int.from_bytes(seed, "little"),
    }


def model(engine: Engine) -> dict[str, Any]:
    """The values that must match on resume."""
    return model_of(str(engine.mbridge.dtype).removeprefix("torch."), engine.config.lora)


def layout(engine: Engine) -> dict[str, int]:
    """The place in the layout that a rank's random states belong to."""
    own = engine.layout
    return {
        "ranks": own.world_size,
        "tensor": own.tensor_size,
        "pipeline": own.pipeline_size,
        "context": own.context_size,
        "expert": own.expert_size,
    }


def restore(folder: Path, engine: Engine, steps_since: int = 0) -> str | None:
    """Put optimizer, schedule and random states back. The engine was built from `engine_arguments(folder)`. Every rank calls.

    `steps_since`: or it was built from the weights of so many steps later. They stay, the learning rate is that of then, and of
    the checkpoint there are the optimizer's moments alone.

    Returns what the log should say, or None.

    Raises:
        ValueError: the checkpoint is of another dtype, of other adapters or of an older version; a tensor is missing, superfluous
            or of another shape; a file is damaged, or holds objects other than tensors, numbers and text.
    """
    index = read_index(folder, model(engine))
    reader, shards = Reader(folder, index["tensors"]), optimizer_shards(engine)
    _check_tensors(folder, reader, shards)
    now = layout(engine)
    random_state = None
    with engine.state_on_device(), _failing_together():
        for shard in shards:
            reader.load(shard, takes_weight=not steps_since)
        if index["layout"] == now and not steps_since:
            random_state = _read_random_state(folder, engine)
    batches = step_of(folder)
    engine.plan_steps(batches, index.get("optimizer_steps", batches * engine.algorithm.steps_per_batch))
    engine.schedule.load_state_dict(index["schedule"])
    if index.get("loss_scaler"):
        load_scaler_state(engine.optimizer, index["loss_scaler"])
    if steps_since:
        engine.schedule.step(increment=steps_since * engine.algorithm.steps_per_batch)
        derive_random_state((index["random_seed"] + steps_since) % 2**32)
        return f"resumed with weights of {steps_since} steps after {folder.name}, with the older optimizer state"
    if random_state is not None:
        set_random_state(random_state)
        return None
    derive_random_state(index["random_seed"])
    former = index["layout"]
    changed = ", ".join(f"{key} {former.get(key)} -> {value}" for key, value in now.items() if former.get(key) != value)
    return f"resumed with another layout ({changed}): random states are derived from the checkpoint's"


def _check_tensors(folder: Path, reader: Reader, shards: list[Shard]) -> None:
    """Every tensor of the model is in the checkpoint, and no other, in the same shape."""
    problems = [problem for shard in shards if (problem := reader.problem(shard))]
    mine = {"names": [shard.name for shard in shards], "problems": problems}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found = {problem for each in everyone for problem in each["problems"]}
    names = {name for each in everyone for name in each["names"]}
    found |= {f"{name} is not in this model" for name in reader.index if name not in names}
    if found:
        texts = "; ".join(sorted(found)[:MAX_NAMED])
        raise ValueError(f"{folder}: cannot be resumed, {len(found)} tensors do not fit: {texts}")


@contextmanager
def _failing_together() -> Iterator[None]:
    """A ValueError that one rank meets within the block is raised on all of them, who would else wait for that rank."""
    mine: ValueError | None = None
    try:
        yield
    except ValueError as error:
        mine = error
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine and str(mine))
    if text := next(filter(None, everyone), ""):
        raise ValueError(text) from mine


def _read_random_state(folder: Path, engine: Engine) -> dict[str, Any]:
    path = folder / random_file(engine.layout.rank)
    try:
        state: dict[str, Any] = torch.load(path, map_location=engine.device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path}: holds objects that no checkpoint of this version has, none of which was loaded: it is damaged, of another "
            f"version or not to be trusted. {instead(folder)}"
        ) from error
    except (OSError, EOFError, RuntimeError) as error:  # by where the file ends
        raise ValueError(damaged(path, error)) from error
    return state
