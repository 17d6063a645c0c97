"""Reads a Hugging Face folder into the parameters of model chunks. Leaves out names and layouts, which the bridge has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from model_folder.layout import read_places

from mbridge.core.safetensor_io import SafeTensorIO

EXPERT = ".mlp.experts.linear_fc"  # in the names of the parameters that the expert tensor group splits


class OwnTensors(SafeTensorIO):  # type: ignore[misc]
    """A folder's tensors by their own names (model_folder/layout.py), only out of files that its index names."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._places = read_places(path)

    def load_hf_weight_names(self) -> list[str]:
        return list(self._places)

    def load_some_hf_weight(self, hf_weight_names: list[str]) -> dict[str, torch.Tensor]:
        """KeyError names a tensor that is not there."""
        names_of: dict[Path, list[str]] = {}
        for name in hf_weight_names:
            names_of.setdefault(self._places[name][0], []).append(name)
        found: dict[str, torch.Tensor] = {}
        for path, names in names_of.items():
            with safe_open(path, framework="pt") as file:
                found |= {name: self._places[name][1].read(file) for name in names}
        return found


def load_weights(bridge: Any, models: Sequence[torch.nn.Module], weights_path: str) -> None:
    """Every parameter of the chunks from the folder. Collective. KeyError: a tensor is missing; ValueError: it has another shape.

    In place of mbridge 0.15.1's (core/bridge.py:147), which makes the state dict and a set of all names again for each
    parameter: five minutes for the 10,000 experts' parameters of a rank.
    """
    bridge.safetensor_io = bridge._get_safetensor_io(weights_path)
    for model in models:
        state = model.state_dict()
        names = {
            local: bridge._weight_name_mapping_mcore_to_hf(name)
            for local, name in bridge._weight_name_mapping_mcore_local_to_global(model).items()
            if "_extra_state" not in local
        }
        groups = {local: bridge.mpu.etp_group if EXPERT in local else bridge.mpu.tp_group for local in names}
        own = [name for local, each in names.items() if dist.get_rank(groups[local]) == 0 for name in each]
        found = bridge.safetensor_io.load_some_hf_weight(own)
        for local, each in names.items():
            parameter, group = state[local], groups[local]
            size, parts = dist.get_world_size(group), None
            if dist.get_rank(group) == 0:
                whole = bridge._weight_to_mcore_format(local, [found[name] for name in each])
                split = bridge._weight_split_across_tp(local, whole, parameter, size)
                parts = [part.to(parameter.device, dtype=parameter.dtype).contiguous() for part in split]
            if parts and parts[0].shape != parameter.shape:  # copy_ would spread it
                shapes = f"shape {[*parts[0].shape]}, not {[*parameter.shape]}"
                raise ValueError(f"model.path: {weights_path}: {', '.join(each)}: {shapes}")
            part = parts[0] if parts else torch.empty_like(parameter)
            if size > 1:
                dist.scatter(part, parts, src=dist.get_global_rank(group, 0), group=group)
            parameter.copy_(part)
