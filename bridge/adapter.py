"""The adapters alone as a weight source: what `engine.lora.sync: adapter` sends, in PEFT's names.

An A that several linears share, as those of a fused linear do, travels once, with the first of them. B travels multiplied
by the adapter's scale, as an adapter whose alpha is its rank has it, which is what vLLM computes with: so what vLLM holds
can be compared with what was sent bit for bit. The replicas hold the base model from its folder and never get other base
weights, so that an adapter cannot meet a merged base. Leaves out where the tensors come from, and what vLLM does with
them (vllm_adapter.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from bridge.config import SyncConfig
from bridge.manifest import Manifest, TensorSpec

BUCKET_BYTES = 4 * 2**20  # at most: adapters are small, and one bucket alone would be packed, then checked, then loaded


@dataclass(frozen=True)
class AdapterSpec:
    """The update is `scale` times B A; `scale` is alpha / rank, or alpha / sqrt(rank)."""

    rank: int
    scale: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class AdapterSource:
    """A WeightSource of one rank over `tensors`, which gives (PEFT name, tensor) on the stage's sender, else nothing.

    `tensors` gives each linear's A before its B, and for linears that share an A the same tensor again.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterator[tuple[str, torch.Tensor]]],
        spec: AdapterSpec,
        *,
        stage: int,
        num_stages: int,
        is_sender: bool,
    ) -> None:
        self.tensors, self.spec = tensors, spec
        self.stage, self.num_stages, self.is_sender = stage, num_stages, is_sender
        self._manifest: Manifest | None = None

    def sync_config(self, config: SyncConfig) -> SyncConfig:
        """With buckets so small that packing one overlaps with taking in the one before."""
        return replace(config, bucket_bytes=min(config.bucket_bytes, BUCKET_BYTES))

    def manifest(self) -> Manifest:
        """This stage's tensors in order; the first call walks all of them once."""
        if self._manifest is None:
            specs = [
                TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in self
            ]
            self._manifest = Manifest(tuple(specs))
        return self._manifest

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        last_a: torch.Tensor | None = None
        for name, tensor in self.tensors():
            if name.endswith(".lora_B.weight"):
                yield name, tensor * self.spec.scale
            elif tensor is not last_a:
                last_a = tensor
                yield name, tensor
