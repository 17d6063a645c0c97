"""A Hugging Face folder of the weights, written by all ranks of a stage side by side.

    for name, tensors in files(weights, Share(stage, index, size)): save_tensors(tensors, folder / name, ...)
    finish_folder(folder, model_path)      # on rank 0, once all files are there

Leaves out where the tensors come from (the weight bridge's export) and adapters (peft.py).
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from model_folder.files import weight_files
from model_folder.layout import key_of, own_name, read_folder_layout, written_fields
from engine.config import PREDICTORS
from engine.runtime.parallel import Layout
from engine.runtime.tensor_file import save_tensors

FILE_BYTES = 2**29
KEPT = "model-kept-"  # names of files of tensors that are copied
TEMPLATES = "additional_chat_templates/*.jinja"  # such as tool_use, beside chat_template.jinja
NOT_COPIED = (".safetensors", ".bin", ".index.json", ".pt", ".pth", ".gguf")
Digest = Callable[[torch.Tensor], int]


@dataclass(frozen=True)
class Share:
    """This rank's share of a stage's files: one of every `size`, the number of ranks that share them."""

    stage: int
    index: int = 0
    size: int = 1
    file_bytes: int = FILE_BYTES

    @classmethod
    def of(cls, layout: Layout, file_bytes: int = FILE_BYTES) -> Share:
        """The share of each rank of a stage."""
        index = layout.copy_rank * layout.tensor_size + layout.tensor_rank
        return cls(layout.pipeline_rank, index, layout.world_size // layout.pipeline_size, file_bytes)


@dataclass
class File:
    """One file of the folder, on its way."""

    name: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # on the CPU, copied
    digests: dict[str, int] = field(default_factory=dict)  # of the tensors that were copied

    def write(self, folder: Path, digest: Digest | None) -> Path:
        """Write the file and, with a digest, read it again; returns its path.

        Raises:
            RuntimeError: the file's contents differ from the exported tensors.
        """
        path = folder / self.name
        save_tensors(self.tensors, path, {"format": "pt"})
        if digest is None:
            return path
        with safe_open(path, framework="pt") as file:
            for name, expected in self.digests.items():
                if digest(file.get_tensor(name)) != expected:
                    raise RuntimeError(f"{path}: {name} differs from the exported tensor; is the disk or the memory broken?")
        return path


def files(weights: Iterable[tuple[str, torch.Tensor]], share: Share, digest: Digest | None = None) -> Iterator[File]:
    """This rank's files, each of at least `share.file_bytes` or a stage's last. Iterates all `weights`, in their order."""
    number, num_bytes, current = 0, 0, None
    for name, tensor in weights:
        if num_bytes >= share.file_bytes:
            if current is not None:
                yield current
            number, num_bytes, current = number + 1, 0, None
        num_bytes += tensor.nbytes
        if number % share.size == share.index:
            current = current or File(f"model-{share.stage:03d}-{number:05d}.safetensors")
            current.tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
            if digest is not None:
                current.digests[name] = digest(tensor)
    if current is not None:
        yield current


def as_in(model_path: Path, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors with the names that those of the start model's folder have."""
    layout = read_folder_layout(model_path)
    for name, tensor in weights:
        yield key_of(name, layout), tensor


def save_weights(folder: Path, weights: Iterable[tuple[str, torch.Tensor]], share: Share, digest: Digest | None = None) -> None:
    """Write this rank's files, one at a time; with a digest each is verified."""
    for file in files(weights, share, digest):
        file.write(folder, digest)


def finish_folder(folder: Path, model_path: Path) -> None:
    """Index the files and add config, tokenizer and what else stands beside the start model's weights, such as tensors of vision
    layers, bit for bit.
    """
    _keep_others(folder, model_path)
    shards = sorted(folder.glob("model-*.safetensors"))
    weight_map: dict[str, str] = {}
    dtypes: Counter[str] = Counter()
    total = 0
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no dict
                assert name not in weight_map, name
                tensor = file.get_tensor(name)  # mapped, not read
                weight_map[name], total = shard.name, total + tensor.nbytes
                dtypes[str(tensor.dtype).removeprefix("torch.")] += not shard.name.startswith(KEPT)
    if len(shards) == 1:
        shards[0].rename(folder / "model.safetensors")
    else:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    for path in (*model_path.iterdir(), *model_path.glob(TEMPLATES)):
        if path.is_file() and not path.name.endswith(NOT_COPIED):
            copy = folder / path.relative_to(model_path)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
    path = folder / "config.json"
    ((dtype, _),) = dtypes.most_common(1)  # the bias of a router is float32 in any folder
    fields = _of_weights(json.loads(path.read_text(encoding="utf-8")), dtype)
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _keep_others(folder: Path, model_path: Path) -> None:
    """Copy the tensors of the start model's folder that are not the language model's, a file each."""
    layout = read_folder_layout(model_path)
    for number, path in enumerate(weight_files(model_path)):
        with safe_open(path, framework="pt") as file:
            others = [key for key in file.keys() if own_name(key, layout) is None]  # noqa: SIM118 - the file is no dict
            tensors = {key: file.get_tensor(key) for key in others}
        if tensors:
            save_tensors(tensors, folder / f"{KEPT}{number:05d}.safetensors", {"format": "pt"})


def _of_weights(fields: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The start model's config.json for the weights in the folder.

    transformers loads weights in the dtype that is named there, whatever they have, as `torch_dtype` before 4.56. Layers that
    predict further tokens are not in the folder (families.describe): programs may not look for them.
    """
    fields = written_fields(fields)
    parts = {name: value for name, value in fields.items() if name.endswith("_config") and isinstance(value, dict)}
    nested = {name: _of_weights(part, dtype) for name, part in parts.items() if {"dtype", "torch_dtype"} & part.keys()}
    dtypes = {"dtype": dtype, **({"torch_dtype": dtype} if "torch_dtype" in fields else {})}
    return {**fields, **dtypes, **nested, **{name: 0 for name in PREDICTORS if fields.get(name)}}
