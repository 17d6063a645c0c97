"""Names of checkpoints and of their files, and what an index says of the run that wrote it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import torch

from engine.engine import Engine
from engine.resume import FORMAT, model_of
from engine.wrap.optimizer import scaler_state

STEP = re.compile(r"step_(\d{8})")


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
        "loss_scaler": scaler_state(engine.optimizer),
        "random_seed": int.from_bytes(seed, "little"),
    }


def model(engine: Engine) -> dict[str, Any]:
    """What must match on resume."""
    return model_of(str(engine.mbridge.dtype).removeprefix("torch."), engine.config.lora)


def layout(engine: Engine) -> dict[str, int]:
    """What each rank's random states belong to."""
    own = engine.layout
    return {
        "ranks": own.world_size,
        "tensor": own.tensor_size,
        "pipeline": own.pipeline_size,
        "context": own.context_size,
        "expert": own.expert_size,
    }
