"""Where the tensors of a manifest go in a vLLM worker's parameters, known before a sync. bake.py makes it.

A worker scatters buckets straight into its parameters by it: no Python loaders, no layer-wise reload. Leaves out buckets
(unpack.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from bridge.layout.manifest import Manifest
from bridge.layout.regions import Copy


@dataclass
class LoadPlan:
    """`copies` has an entry a tensor: out of it into the parameters; None for those that vLLM's own loader takes."""

    manifest: Manifest
    parameters: dict[str, torch.Tensor]  # the planned ones, as the model computes with them
    copies: list[tuple[Copy, ...] | None]
    loader_fallback: dict[str, str]  # layer -> why it is not planned
    fallback_layers: list[torch.nn.Module]
    memory: dict[str, torch.Tensor] = field(init=False)  # the parameters' storages, flat
    _addresses: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._addresses = {name: parameter.data_ptr() for name, parameter in self.parameters.items()}
        self.memory = {name: _flat(parameter) for name, parameter in self.parameters.items()}
        self.is_whole = all(copies is not None for copies in self.copies)  # vLLM's loader has nothing to do

    @property
    def is_current(self) -> bool:
        """Whether the parameters still lie where they lay."""
        return all(self._addresses[name] == parameter.data_ptr() for name, parameter in self.parameters.items())


def _flat(parameter: torch.Tensor) -> torch.Tensor:
    size = parameter.untyped_storage().nbytes() // parameter.element_size()
    return parameter.detach().as_strided((size,), (1,), 0)
