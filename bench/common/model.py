"""Model folders for the benches: config.json, and random weights or sparse files. No Megatron here."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from bridge.layout.manifest import SAFETENSORS_DTYPES, TensorSpec
from megasync.config.files import write_atomically
from megasync.models.model_shape import SHAPES, ModelShape
from megasync.models.tensors import TIED_HEAD, expected_tensors

CODES = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}


def tensors_of(hf_config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes in a folder with this config.json. Pure."""
    shape = ModelShape(**{name: hf_config[name] for name in ModelShape.__dataclass_fields__ if name in hf_config})
    found = expected_tensors(shape, hf_config)
    if hf_config["tie_word_embeddings"]:
        del found[TIED_HEAD]
    return found


def write_config(folder: Path, shapes: str, dtype: str, sequence_length: int) -> dict[str, Any]:
    """config.json of SHAPES, and its fields."""
    fields = SHAPES[shapes].hf_config(sequence_length)
    write_atomically(folder / "config.json", json.dumps({**fields, "torch_dtype": dtype}, indent=1))
    return fields


def write_model(folder: Path, shapes: str, dtype: str, sequence_length: int, seed: int) -> None:
    """Random weights, in memory first: for small shapes."""
    import torch

    from engine.runtime.tensor_file import save_tensors

    fields, generator = write_config(folder, shapes, dtype, sequence_length), torch.Generator().manual_seed(seed)
    tensors = {name: torch.ones(size, dtype=getattr(torch, dtype)) for name, size in tensors_of(fields).items()}
    for name, tensor in tensors.items():
        if tensor.ndim > 1 or name.endswith(".bias"):  # no norm
            tensor.normal_(0.0, fields["initializer_range"], generator=generator)
    save_tensors(tensors, folder / "model.safetensors", {"format": "pt"})


def write_shapes(folder: Path, shapes: str, dtype: str, sequence_length: int) -> None:
    """config.json and a sparse safetensors file: it reads as zeros and takes no room on the disk."""
    entries, end = {}, 0
    for name, shape in tensors_of(write_config(folder, shapes, dtype, sequence_length)).items():
        begin, end = end, end + TensorSpec(name, dtype, shape).num_bytes
        entries[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
