"""What a checkpoint's index says, and whether a run can go on from it: asked by the check before the start, and on resuming.

No torch in here. Leaves out tensors (engine/checkpoint/).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config import LoraConfig

FORMAT = 2
INDEX_FILE = "index.json"


def model_of(dtype: str, lora: LoraConfig) -> dict[str, Any]:
    """What must be the same as in the checkpoint."""
    return {"dtype": f"torch.{dtype}", "lora_rank": lora.rank, "lora_targets": sorted(lora.targets) if lora.rank else []}


def read_index(folder: Path, model: Mapping[str, Any]) -> dict[str, Any]:
    """The index of the checkpoint in `folder`, which a run of that `model_of` can go on from.

    Raises:
        ValueError: it cannot.
    """
    path, begin = folder / INDEX_FILE, f"Begin another run from its weights: {from_weights(folder)}"
    if not path.is_file():
        what = f"has no {INDEX_FILE}: a checkpoint of an older version, a file a rank, which cannot be resumed"
        raise ValueError(f"{folder}: {what}. {begin}")
    try:
        index: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: is damaged: {error}. {begin}") from error
    if index.get("format") != FORMAT:
        raise ValueError(f"{path}: format {index.get('format')!r}, this version reads {FORMAT}. {begin}")
    then = index["model"]
    differing = {key: (value, then.get(key)) for key, value in model.items() if then.get(key) != value}
    if differing:
        told = "; ".join(f"{key} is {value}, the checkpoint has {former}" for key, (value, former) in differing.items())
        raise ValueError(
            f"{folder}: cannot resume with another model: {told}. Go on with the checkpoint's, or begin another run from its "
            f"weights: {from_weights(folder)}"
        )
    return index


def from_weights(folder: Path) -> str:
    """Overrides that start another run from the checkpoint's weights."""
    key, name = ("model.path", "hf") if (folder / "hf").is_dir() else ("engine.lora.adapter_path", "adapter")
    return f"run.name=NAME {key}={folder / name}"
