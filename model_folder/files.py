"""Which files of a Hugging Face folder hold its weights, and where each tensor is in them. No torch in here.

    for path in weight_files(folder):
        tensors, metadata = read_header(path)

Leaves out a language model inside a larger one (layout.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open


class Entry(NamedTuple):
    """A tensor, by the header of its file."""

    key: str
    dtype: str  # safetensors' name
    shape: list[int]
    begin: int  # in the file's bytes, and so `end`
    end: int


def weight_files(folder: Path) -> list[Path]:
    """The files of its index, else model.safetensors; empty where there are none.

    Others, such as the consolidated.safetensors of Mistral's, may stand beside them and hold the same under other names.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return list(folder.glob("model.safetensors"))
    weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return [folder / name for name in sorted(set(weight_map.values()))]


def read_header(path: Path) -> tuple[list[Entry], dict[str, str]]:
    """A safetensors file's tensors, in its order, and metadata. safetensors' reader detects damage, but returns no offsets.

    Raises:
        ValueError: the file is cut off, or is no safetensors file.
    """
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}; copy, download or save it again") from error
    with path.open("rb") as raw:
        length = int.from_bytes(raw.read(8), "little")
        header = json.loads(raw.read(length))
    header.pop("__metadata__", None)
    offsets = {key: [8 + length + offset for offset in each["data_offsets"]] for key, each in header.items()}
    entries = [Entry(key, each["dtype"], each["shape"], *offsets[key]) for key, each in header.items()]
    return sorted(entries, key=lambda entry: entry.begin), metadata
