"""The adapters alone as a weight source: what `engine.lora.sync: adapter` sends, in PEFT's names.

The replicas hold the base model from its folder and never get other base weights, so that an adapter cannot meet a merged
base. Leaves out where the tensors come from, and what vLLM does with them (vllm_adapter.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bridge.manifest import Manifest, TensorSpec


@dataclass(frozen=True)
class AdapterSpec:
    """What PEFT's config says of an adapter; its update is alpha / rank, or alpha / sqrt(rank), times B A."""

    rank: int
    alpha: float
    rslora: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class AdapterSource:
    """A WeightSource of one rank over `tensors`, which gives (PEFT name, tensor) on the stage's sender, else nothing."""

    def __init__(
        self, tensors: Callable[[], Iterator[tuple[str, torch.Tensor]]], *, stage: int, num_stages: int, is_sender: bool
    ) -> None:
        self.tensors, self.stage, self.num_stages, self.is_sender = tensors, stage, num_stages, is_sender
        self._manifest: Manifest | None = None

    def manifest(self) -> Manifest:
        """This stage's tensors in order; the first call walks all of them once."""
        if self._manifest is None:
            specs = [
                TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                for name, tensor in self.tensors()
            ]
            self._manifest = Manifest(tuple(specs))
        return self._manifest

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.tensors()
