"""The load plan: where the tensors of a manifest go in a vLLM worker's parameters. bake.py makes it before a sync.

With it a worker scatters buckets straight into its parameters: no Python loaders, no layer-wise reload. Leaves out buckets
(unpack.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from bridge.layout.manifest import Manifest
from bridge.layout.regions import Copy


@dataclass
class LoadPlan:
    """`copies`: for each tensor of the manifest its copies into the parameters, or None where vLLM's own loader takes it."""

    manifest: Manifest
    parameters: dict[str, torch.Tensor]  # the planned ones, as the model computes with them
    copies: list[tuple[Copy, ...] | None]
    loader_fallback: dict[str, str]  # layer -> why it is not planned
    fallback_layers: list[torch.nn.Module]
    memory: dict[str, torch.Tensor] = field(init=False)  # the parameters' storages, flat

    def __post_init__(self) -> None:
        self.memory = {name: _flat(parameter) for name, parameter in self.parameters.items()}
        self.is_whole = all(copies is not None for copies in self.copies)  # vLLM's loader has nothing to do

    @property
    def is_current(self) -> bool:
        """Whether the parameters are still views of `memory`, which keeps it alive."""
        storages = {name: parameter.untyped_storage().data_ptr() for name, parameter in self.parameters.items()}
        return storages == {name: flat.data_ptr() for name, flat in self.memory.items()}


def _flat(parameter: torch.Tensor) -> torch.Tensor:
    size = parameter.untyped_storage().nbytes() // parameter.element_size()
    return parameter.detach().as_strided((size,), (1,), 0)
