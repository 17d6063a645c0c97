"""Main weights and optimizer state in a checkpoint: ranks write their shards; any layout reads those that it needs.

    rank_00000-000.safetensors   this rank's boxes (shards.py) of main weights, exp_avg and exp_avg_sq, float32
    index.json                   for each tensor of the whole model its shape and which file has which box of it

No file holds anything but numbers and text. torch.distributed.checkpoint's planner finds what overlaps; its files are not used
because its metadata is a pickle, which executes code. Leaves out everything else of a checkpoint (saving.py, folder.py).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from engine.checkpoint.shards import Shard
from engine.resume import damaged, instead
from engine.wrap.optimizer import local

MAX_FILE_BYTES = 2**32
WEIGHT = "weight"  # the main weight, among the names of the optimizer's tensors


def _key(kind: str, name: str, offsets: tuple[int, ...]) -> str:
    return f"{kind} {name} {','.join(map(str, offsets))}"


def _tensors(shard: Shard) -> dict[str, torch.Tensor]:
    """Main weight and the optimizer's tensors of the same size, flat, by kind."""
    parameter = local(shard.parameter).detach()
    state = {key: local(value) for key, value in shard.optimizer.state.get(shard.parameter, {}).items() if torch.is_tensor(value)}
    sized = {key: value for key, value in state.items() if value.dim() and value.numel() == parameter.numel()}
    return {kind: tensor.reshape(-1) for kind, tensor in {WEIGHT: parameter, **sized}.items()}


def _num_steps(shard: Shard) -> float | None:
    """torch's optimizers count them for each parameter, apex's and TransformerEngine's for each group."""
    steps = shard.optimizer.state.get(shard.parameter, {}).get("step", shard.group.get("step"))
    return None if steps is None else float(steps)


def plan(shards: list[Shard], rank: int) -> list[tuple[str, list[Shard]]]:
    """(file name, content) of each file that this rank writes."""
    files: list[tuple[str, list[Shard]]] = []
    room = 0
    for shard in (shard for shard in shards if shard.is_written and shard.pieces):
        num_bytes = sum(tensor.nbytes for tensor in _tensors(shard).values())
        if num_bytes > room:
            files.append((f"rank_{rank:05d}-{len(files):03d}.safetensors", []))
            room = max(num_bytes, MAX_FILE_BYTES)
        files[-1][1].append(shard)
        room -= num_bytes
    return files


def host_tensors(shards: list[Shard]) -> dict[str, torch.Tensor]:
    """Copies on the CPU of what belongs into one file."""
    return {
        _key(kind, shard.name, box.offsets): flat[start : start + math.prod(box.sizes)].view(box.sizes).to("cpu", copy=True)
        for shard in shards
        for kind, flat in _tensors(shard).items()
        for box, start in shard.pieces
    }


def entries(files: list[tuple[str, list[Shard]]]) -> dict[str, dict[str, Any]]:
    """This rank's part of the index."""
    return {
        shard.name: {
            "shape": shard.shape,
            "kinds": sorted(_tensors(shard)),
            "steps": _num_steps(shard),
            "boxes": [(*piece.box, file) for piece in shard.pieces],
        }
        for file, shards in files
        for shard in shards
    }


def join(parts: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The index, of all ranks' parts. Invariant: every tensor's boxes fill it."""
    index: dict[str, dict[str, Any]] = {}
    for name, entry in (pair for part in parts for pair in part.items()):
        whole = index.setdefault(name, {**entry, "boxes": []})
        assert all(whole[key] == entry[key] for key in ("shape", "kinds", "steps")), (name, whole, entry)
        whole["boxes"] += entry["boxes"]
    for name, entry in index.items():
        filled = sum(math.prod(sizes) for _, sizes, _ in entry["boxes"])
        assert filled == math.prod(entry["shape"]), f"{name}: {filled} elements of {entry['shape']} were written"
    return index


class Reader:
    """Reads shards of any layout out of a checkpoint's folder."""

    def __init__(self, folder: Path, index: dict[str, dict[str, Any]]) -> None:
        self.folder, self.index = folder, index
        self._open: dict[str, Any] = {}

    def problem(self, shard: Shard) -> str | None:
        """Why the shard cannot be read, None if it can."""
        entry = self.index.get(shard.name)
        if entry is None:
            return f"{shard.name} is missing"
        if tuple(entry["shape"]) != shard.shape:
            return f"{shard.name} has shape {list(shard.shape)} in this model, {entry['shape']} in the checkpoint"
        filled = sum(math.prod(item.lengths) for item in self._items(shard))
        wanted = sum(math.prod(piece.box.sizes) for piece in shard.pieces)
        return None if filled == wanted else f"{shard.name}: {wanted - filled} elements are missing"

    def _items(self, shard: Shard) -> list[Any]:
        def chunk(offsets: Any, sizes: Any) -> ChunkStorageMetadata:
            return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

        entry = self.index[shard.name]
        stored = TensorStorageMetadata(
            TensorProperties(), torch.Size(entry["shape"]), [chunk(offsets, sizes) for offsets, sizes, _ in entry["boxes"]]
        )
        return create_read_items_for_chunk_list(shard.name, stored, [chunk(*piece.box) for piece in shard.pieces])

    @torch.no_grad()
    def load(self, shard: Shard, *, takes_weight: bool = True) -> None:
        """Put the shard's main weight and optimizer state back; or the latter alone, where the model has newer weights.

        Raises:
            ValueError: the main weight is another than the model's own weights, which were read from the Hugging Face folder; or
                a file is damaged.
        """
        entry, parameter = self.index[shard.name], local(shard.parameter)
        before = parameter.detach().clone()
        values = {kind: before.new_zeros(before.numel()) for kind in entry["kinds"]}
        if takes_weight:
            values[WEIGHT].copy_(before.view(-1))  # padding stays
        else:
            del values[WEIGHT]
        for item in self._items(shard):
            piece = shard.pieces[item.dest_index.index]
            offsets, _, file = entry["boxes"][item.storage_index.index]
            region = tuple(slice(start, start + n) for start, n in zip(item.dest_offsets, item.lengths, strict=True))
            stored = tuple(slice(start, start + n) for start, n in zip(item.storage_offsets, item.lengths, strict=True))
            for kind, flat in values.items():
                target = flat[piece.start : piece.start + math.prod(piece.box.sizes)].view(piece.box.sizes)
                target[region] = self._read(file, _key(kind, shard.name, tuple(offsets)), stored).to(target)
        weight = values.pop(WEIGHT, before).view(before.shape)
        if not torch.equal(weight.to(shard.dtype), before.to(shard.dtype)):
            raise ValueError(
                f"{self.folder}: {shard.name}: the optimizer's weights are not those of the Hugging Face folder beside it; "
                f"the checkpoint is damaged or was changed. {instead(self.folder)}"
            )
        parameter.copy_(weight)
        if values:
            state = {kind: _like(shard.parameter, value.view(before.shape)) for kind, value in values.items()}
            shard.optimizer.state[shard.parameter] = state
            _set_num_steps(shard, entry["steps"])

    def _read(self, file: str, key: str, region: tuple[slice, ...]) -> torch.Tensor:
        path = self.folder / file
        try:
            if file not in self._open:
                self._open[file] = safe_open(path, framework="pt")
            tensor: torch.Tensor = self._open[file].get_slice(key)[region]
        except (SafetensorError, OSError) as error:
            raise ValueError(damaged(path, error)) from error
        return tensor


def _set_num_steps(shard: Shard, steps: float) -> None:
    if isinstance(shard.optimizer, torch.optim.Adam):
        device = local(shard.parameter).device if shard.group.get("fused") else "cpu"  # adam.py:163
        shard.optimizer.state[shard.parameter]["step"] = torch.tensor(steps, dtype=torch.float32, device=device)
    else:
        shard.group["step"] = int(steps)


def _like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value`, this rank's part, distributed as the parameter is (also unevenly)."""
    if not hasattr(parameter, "_local_tensor"):
        return value
    from torch.distributed.tensor import DTensor

    like: Any = parameter
    return DTensor.from_local(value, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())
