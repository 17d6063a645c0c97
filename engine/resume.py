"""A checkpoint's index, and whether a run can resume from it: used by the check before the start, and on resuming.

No torch in here. Leaves out tensors (engine/checkpoint/).
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.config import LoraConfig

FORMAT = 2
INDEX_FILE = "index.json"


def model_of(dtype: str, lora: LoraConfig) -> dict[str, Any]:
    """The values that must equal the checkpoint's."""
    return {"dtype": f"torch.{dtype}", "lora_rank": lora.rank, "lora_targets": sorted(lora.targets) if lora.rank else []}


def read_index(folder: Path, model: Mapping[str, Any]) -> dict[str, Any]:
    """The index of the checkpoint in `folder`, from which a run of that `model_of` can resume.

    Raises:
        ValueError: it cannot.
    """
    path, begin = folder / INDEX_FILE, instead(folder)
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
        texts = "; ".join(f"{key} is {value}, the checkpoint has {former}" for key, (value, former) in differing.items())
        raise ValueError(
            f"{folder}: cannot resume with another model: {texts}. Resume with the checkpoint's, or begin another run from its "
            f"weights: {from_weights(folder)}"
        )
    return index


def random_file(rank: int) -> str:
    """The file of that rank's random states."""
    return f"random_{rank:05d}.pt"


def check_files(folder: Path, index: Mapping[str, Any]) -> None:
    """Every file of the checkpoint is there, and those beside its weights are whole, as far as a safetensors file's header and a
    zip file's sums tell.

    Raises:
        ValueError: one is not.
    """
    for name in index.get("files", ()):  # of an index that is older than this list none are known
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name}: is missing, the checkpoint is damaged. {instead(folder)}")
    for name in sorted({file for entry in index["tensors"].values() for _, _, file in entry["boxes"]}):
        try:
            with safe_open(folder / name, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(damaged(folder / name, error)) from error
    for rank in range(index["layout"]["ranks"]):
        path = folder / random_file(rank)
        try:
            with zipfile.ZipFile(path) as file:
                broken = file.testzip()
        except (zipfile.BadZipFile, OSError) as error:
            raise ValueError(damaged(path, error)) from error
        if broken:
            raise ValueError(damaged(path, f"{broken} has another sum"))


def damaged(path: Path, why: object) -> str:
    """The message about a file of a checkpoint that cannot be read."""
    return f"{path}: cannot be read, the checkpoint is damaged or not to be trusted: {why}. {instead(path.parent)}"


def instead(folder: Path) -> str:
    """The remedy where a run cannot resume from this checkpoint."""
    before = max((path.name for path in folder.parent.glob("step_*") if path.name < folder.name), default="")
    older = f"Move {folder.name} out of {folder.parent} to resume from {before}, or begin" if before else "Begin"
    return f"{older} another run from its weights: {from_weights(folder)}"


def from_weights(folder: Path) -> str:
    """Overrides that start another run from the checkpoint's weights."""
    key, name = ("model.path", "hf") if (folder / "hf").is_dir() else ("engine.lora.adapter_path", "adapter")
    return f"run.name=NAME {key}={folder / name}"
