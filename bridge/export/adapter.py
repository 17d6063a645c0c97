"""The adapters alone as a weight source: what `engine.lora.sync: adapter` sends, in PEFT's names.

An A that several linears share, as those of a fused linear do, travels once, with the first of them. B travels multiplied
by the adapter's scale, as an adapter whose alpha is its rank has it, which is what vLLM computes with: so what vLLM holds
can be compared with what was sent bit for bit. The replicas hold the base model from its folder and never get other base
weights, so that an adapter cannot meet a merged base. Leaves out where the tensors come from, and what vLLM does with
them (vllm_adapter.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bridge.config import SyncConfig
from bridge.export.source import Part
from bridge.layout.manifest import Manifest, TensorSpec
from bridge.layout.regions import Copy, Region

BUCKET_BYTES = 4 * 2**20  # at most: adapters are small, and one bucket alone would be packed, then checked, then loaded
GPU_BUCKET_BYTES = 64 * 2**20  # there a bucket's messages cost more than its bytes


@dataclass(frozen=True)
class AdapterSpec:
    """The update is `scale` times B A; `scale` is alpha / rank, or alpha / sqrt(rank)."""

    rank: int
    scale: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class AdapterSource:
    """A WeightSource of one rank over `tensors`, which gives (PEFT name, tensor) on the stage's sender, else nothing.

    `tensors` gives each linear's A [rank, in] before its B [..., rank], whose rows are in order in what is before rank, and
    for linears that share an A the same tensor again. `stays`: they are views of memory that always has the current values.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterator[tuple[str, torch.Tensor]]],
        spec: AdapterSpec,
        *,
        stage: int,
        num_stages: int,
        is_sender: bool,
        stays: bool = False,
    ) -> None:
        self.tensors, self.spec = tensors, spec
        self.stage, self.num_stages, self.is_sender, self.stays = stage, num_stages, is_sender, stays
        self.gives = is_sender
        self._manifest: Manifest | None = None
        self._part: Part | None = None
        self._unscaled: list[torch.Tensor] = []
        self._scaled: list[torch.Tensor] = []

    def sync_config(self, config: SyncConfig) -> SyncConfig:
        """With buckets so small that packing one overlaps with taking in the one before."""
        most = GPU_BUCKET_BYTES if torch.cuda.is_available() else BUCKET_BYTES
        return config.model_copy(update={"bucket_bytes": min(config.bucket_bytes, most)})

    def manifest(self) -> Manifest:
        """This stage's tensors in order; the first call walks all of them once."""
        if self._manifest is None:
            specs = [
                TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in self
            ]
            self._manifest = Manifest(tuple(specs))
        return self._manifest

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._each_once():
            yield name, (tensor * self.spec.scale).flatten(0, -2) if _is_b(name) else tensor

    def parts(self) -> Iterator[Part] | None:
        """All of them in one part: A's own memory, and copies of B. None unless `stays`."""
        return self._parts() if self.stays else None

    @torch.no_grad()
    def _parts(self) -> Iterator[Part]:
        if self._part is None:
            given = list(self._each_once())
            self._unscaled = [tensor for name, tensor in given if _is_b(name)]
            self._scaled = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in self._unscaled]
            scaled = iter(self._scaled)
            memory = {name: (next(scaled) if _is_b(name) else tensor).view(-1) for name, tensor in given}
            whole = {name: Region(0, 1, flat.numel(), flat.numel()) for name, flat in memory.items()}
            self._part = Part([(Copy(region, name, region),) for name, region in whole.items()], memory)
        if self._scaled:  # on the sender
            torch._foreach_copy_(self._scaled, self._unscaled)
            torch._foreach_mul_(self._scaled, self.spec.scale)
            yield self._part

    def _each_once(self) -> Iterator[tuple[str, torch.Tensor]]:
        last_a: torch.Tensor | None = None
        for name, tensor in self.tensors():
            if _is_b(name) or tensor is not last_a:
                last_a = last_a if _is_b(name) else tensor
                yield name, tensor


def _is_b(name: str) -> bool:
    return name.endswith(".lora_B.weight")
