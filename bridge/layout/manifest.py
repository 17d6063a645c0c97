"""The manifest: which tensors a sync carries, in which order; and what a replica refuses about one.

Leaves out bytes: see bucket.py. No torch in here; dtypes are torch's names as text.

    read_folder_manifest("Qwen2.5-0.5B").digest
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from model_folder.files import read_header, weight_files

DTYPES = (  # in safetensors, in torch, bytes of an element
    ("F64", "float64", 8),
    ("F32", "float32", 4),
    ("BF16", "bfloat16", 2),
    ("F16", "float16", 2),
    ("F8_E4M3", "float8_e4m3fn", 1),
    ("F8_E5M2", "float8_e5m2", 1),
    ("I64", "int64", 8),
    ("I32", "int32", 4),
    ("I16", "int16", 2),
    ("I8", "int8", 1),
    ("U8", "uint8", 1),
    ("BOOL", "bool", 1),
)
ITEM_BYTES = {name: num_bytes for _, name, num_bytes in DTYPES}
SAFETENSORS_DTYPES = {code: name for code, name, _ in DTYPES}
TIED_HEAD = "lm_head.weight"
ALWAYS_FLOAT32 = ".e_score_correction_bias"  # of routers, in the trainer and in vLLM


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor in Hugging Face coordinates; `dtype` is torch's name without the `torch.` prefix."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Manifest:
    """The tensors of one sync in the order in which they travel. Names are unique."""

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        twice = sorted(name for name, count in Counter(spec.name for spec in self.tensors).items() if count > 1)
        if twice:
            raise ValueError(f"a manifest names each tensor once; named twice: {', '.join(twice)}")

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of the canonical JSON: equal on two sides exactly when names, dtypes, shapes and order are."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @cached_property
    def by_name(self) -> dict[str, TensorSpec]:
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def total_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    def to_json(self) -> str:
        return json.dumps([[t.name, t.dtype, list(t.shape)] for t in self.tensors], separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Manifest:
        return Manifest(tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in json.loads(text)))

    @staticmethod
    def concatenate(parts: Iterable[Manifest]) -> Manifest:
        return Manifest(tuple(tensor for part in parts for tensor in part.tensors))


def read_folder_manifest(path: str | Path) -> Manifest:
    """The manifest of a Hugging Face folder, from the headers of its safetensors files (one file, or several by index).

    Raises:
        ValueError: no safetensors in the folder, one of the index is missing, one is cut off, or a tensor has none of DTYPES.
    """
    folder = Path(path)
    files = weight_files(folder) or [folder / "model.safetensors"]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"model folder {folder} lacks {', '.join(missing)}; give a folder with its safetensors files")
    entries = [entry for file in files for entry in read_header(file)[0]]
    if unknown := [f"{each.key} ({each.dtype})" for each in entries if each.dtype not in SAFETENSORS_DTYPES]:
        raise ValueError(f"model folder {folder} has tensors of dtypes that are not known here: {', '.join(unknown[:3])}")
    return Manifest(tuple(TensorSpec(each.key, SAFETENSORS_DTYPES[each.dtype], tuple(each.shape)) for each in entries))


def without_predictors(manifest: Manifest, num_layers: int) -> Manifest:
    """Without layers that predict further tokens (multi-token prediction): `mtp.*`, or beyond the model's `num_layers`."""

    def predicts(name: str) -> bool:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        return name.startswith("mtp.") or (layer is not None and int(layer[1]) >= num_layers)

    return Manifest(tuple(spec for spec in manifest.tensors if not predicts(spec.name)))


def find_differences(manifest: Manifest, held: Manifest, dtype: str, *, tied: bool) -> list[str]:
    """Why a replica that holds `held` and computes in `dtype` cannot take `manifest`; empty when it can.

    Tensors travel in the replica's `dtype`, those that have another one in the folder also in that, ALWAYS_FLOAT32 in float32,
    quantised ones as they are held.
    With tied embeddings the head may come along or stay away.
    """
    main_dtype = _main_dtype(held)
    missing = [spec.name for spec in held.tensors if spec.name not in manifest.by_name and _is_required(spec, tied)]
    unknown = [s for s in manifest.tensors if s.name not in held.by_name and not (tied and s.name == TIED_HEAD)]
    reasons = [f"missing {name}" for name in missing]
    for spec in unknown:
        near = difflib.get_close_matches(spec.name, missing, n=1, cutoff=0.8)
        reasons.append(f"unknown {spec.name}" + (f" (renamed from {near[0]}?)" if near else ""))
    for spec in manifest.tensors:
        own = held.by_name.get(spec.name)
        if own is None:
            continue
        dtypes = [dtype] if own.dtype == main_dtype else [own.dtype, dtype]
        if own.dtype.startswith("float8"):
            dtypes = [own.dtype]
        if spec.name.endswith(ALWAYS_FLOAT32):
            dtypes = ["float32"]
        if spec.shape != own.shape:
            reasons.append(f"shape of {spec.name} is {list(spec.shape)}, expected {list(own.shape)}")
        if spec.dtype not in dtypes:
            reasons.append(f"dtype of {spec.name} is {spec.dtype}, expected {dtypes[0]}")
    return reasons


def _is_required(spec: TensorSpec, tied: bool) -> bool:
    return not (tied and spec.name == TIED_HEAD) and not spec.name.endswith("rotary_emb.inv_freq")


def _main_dtype(manifest: Manifest) -> str:
    """The dtype that holds most bytes."""
    num_bytes = Counter[str]()
    for spec in manifest.tensors:
        num_bytes[spec.dtype] += spec.num_bytes
    return max(num_bytes, key=num_bytes.__getitem__, default="")
