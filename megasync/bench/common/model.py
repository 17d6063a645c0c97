"""Model folders for the benches: a small Qwen3 whole, or larger shapes in sparse files. No Megatron here."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from megasync.bench.config import BenchRoot
from megasync.config.files import write_atomically
from megasync.hf.shapes import SHAPES

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # safetensors' names


def write_model(config: BenchRoot, folder: Path) -> None:
    """The shapes of `bench.shapes`, or a Qwen3 of the sizes in `bench` with random weights, tied embeddings. No tokenizer."""
    sizes = config.bench
    if sizes.shapes != "none":
        write_shapes(folder, sizes.shapes, config.model.dtype, config.rollout.max_model_len or 4096)
        return
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(config.run.seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=sizes.vocabulary_size,
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.intermediate_size,
            num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            max_position_embeddings=config.rollout.max_model_len or 512,
            tie_word_embeddings=True,
        )
    )
    model.to(getattr(torch, config.model.dtype)).save_pretrained(folder)


def on_disk(name: str, shape: list[int]) -> list[tuple[str, list[int]]]:
    """Names and shapes in a folder of a tensor of transformers 5, which holds all experts of a layer in one."""
    prefix, _, kind = name.rpartition(".")
    if not prefix.endswith(".experts"):
        return [(name, shape)]
    experts, rows, columns = shape
    parts = ("down_proj",) if kind == "down_proj" else ("gate_proj", "up_proj")
    rows //= len(parts)
    return [(f"{prefix}.{expert}.{part}.weight", [rows, columns]) for expert in range(experts) for part in parts]


def write_config(folder: Path, shapes: str, dtype: str, sequence_length: int) -> dict[str, Any]:
    """Write config.json; returns what is in it."""
    hf_config = {**SHAPES[shapes].hf_config(sequence_length), "torch_dtype": dtype}
    write_atomically(folder / "config.json", json.dumps(hf_config, indent=1))
    return hf_config


def write_shapes(folder: Path, shapes: str, dtype: str, sequence_length: int) -> None:
    """config.json and a sparse safetensors file: it reads as zeros and takes no room on the disk."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    hf_config = write_config(folder, shapes, dtype, sequence_length)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    item_bytes, entries, end = getattr(torch, dtype).itemsize, {}, 0
    held = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, shape in (part for fused in held.items() for part in on_disk(*fused)):
        if name == "lm_head.weight" and hf_config["tie_word_embeddings"]:
            continue
        begin, end = end, end + math.prod(shape) * item_bytes
        entries[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
