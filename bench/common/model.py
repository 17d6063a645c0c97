"""Model folders for the benches: a small Qwen3 whole, or larger shapes in sparse files. No Megatron here."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from bench.config import BenchConfig, BenchRoot
from bridge.layout.manifest import SAFETENSORS_DTYPES, TensorSpec
from megasync.config.files import write_atomically
from megasync.models.model_shape import SHAPES, ModelShape
from megasync.models.tensors import TIED_HEAD, expected_tensors
from megasync.tools.assets.small_qwen3 import CONFIG

CODES = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}
SIZES = {  # by name in `bench` that in config.json
    "vocabulary_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}


def qwen3(bench: BenchConfig, longest: int = 512) -> dict[str, Any]:
    """The config.json of a Qwen3 of the sizes in `bench`, with tied embeddings."""
    return CONFIG | {theirs: getattr(bench, ours) for ours, theirs in SIZES.items()} | {"max_position_embeddings": longest}


def tensors_of(hf_config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes in a folder with this config.json. Pure."""
    shape = ModelShape(**{name: hf_config[name] for name in ModelShape.__dataclass_fields__ if name in hf_config})
    found = expected_tensors(shape, hf_config)
    if hf_config["tie_word_embeddings"]:
        del found[TIED_HEAD]
    return found


def write_model(config: BenchRoot, folder: Path) -> None:
    """The shapes of `bench.shapes`, or a Qwen3 of the sizes in `bench` with random weights. No tokenizer."""
    bench, dtype, longest = config.bench, config.model.dtype, config.rollout.max_model_len
    if bench.shapes != "none":
        write_shapes(folder, bench.shapes, dtype, longest or 4096)
        return
    import torch

    from engine.runtime.tensor_file import save_tensors

    hf_config = qwen3(bench, longest or 512)
    write_config(folder, hf_config, dtype)
    generator, kind = torch.Generator().manual_seed(config.run.seed), getattr(torch, dtype)
    tensors = {name: torch.ones(size, dtype=kind) for name, size in tensors_of(hf_config).items()}
    for tensor in tensors.values():
        if tensor.ndim > 1:  # no norm
            tensor.normal_(0.0, hf_config["initializer_range"], generator=generator)
    save_tensors(tensors, folder / "model.safetensors", {"format": "pt"})


def write_config(folder: Path, hf_config: dict[str, Any], dtype: str) -> None:
    write_atomically(folder / "config.json", json.dumps({**hf_config, "torch_dtype": dtype}, indent=1))


def write_shapes(folder: Path, shapes: str, dtype: str, sequence_length: int) -> None:
    """config.json and a sparse safetensors file: it reads as zeros and takes no room on the disk."""
    hf_config = SHAPES[shapes].hf_config(sequence_length)
    write_config(folder, hf_config, dtype)
    entries, end = {}, 0
    for name, shape in tensors_of(hf_config).items():
        begin, end = end, end + TensorSpec(name, dtype, shape).num_bytes
        entries[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
