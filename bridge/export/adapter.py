"""The adapters alone as a weight source, in PEFT's names, for `engine.lora.sync: adapter`.

An A that several linears share, as those of a fused linear do, is sent once, with the first of them. B is sent multiplied by
the adapter's scale, as an adapter whose alpha is its rank has it: vLLM computes with that product, so that what it
holds can be compared with what was sent bit for bit. The replicas serve the base model of their folder and never get other base
weights, so that an adapter cannot meet a merged base. Leaves out where the factors come from, and what vLLM does with
them (vllm/weights/adapter.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from bridge.config import SyncConfig
from bridge.export.source import AdapterFactors, Part
from bridge.layout.manifest import Manifest, TensorSpec
from bridge.layout.regions import Copy, contiguous

BUCKET_BYTES = 4 * 2**20  # at most: adapters are small, and one bucket alone would be packed, then checked, then loaded
GPU_BUCKET_BYTES = 64 * 2**20  # there a bucket's messages cost more than its bytes


@dataclass(frozen=True)
class AdapterSpec:
    """The update is `scale` times B A; `scale` is alpha / rank, or alpha / sqrt(rank)."""

    rank: int
    scale: float


class AdapterSource:
    """The WeightSource of a stage's adapters, all in one part."""

    def __init__(
        self,
        factors: Callable[[], Iterator[AdapterFactors]],
        spec: AdapterSpec,
        *,
        stage: int,
        num_stages: int,
        is_sender: bool,
        is_in_place: bool = False,
    ) -> None:
        """`factors`: a walk over the stage's linears, collective, which has factors on the sender alone.

        `is_in_place`: the factors are views of memory that always has the current values.
        """
        self.spec = spec
        self.stage, self.num_stages, self.is_sender = stage, num_stages, is_sender
        self.has_tensors = is_sender
        self._factors, self._is_in_place = factors, is_in_place
        self._manifest: Manifest | None = None
        self._copies: list[tuple[Copy, ...]] = []
        self._part: Part | None = None
        self._unscaled: list[torch.Tensor] = []  # each B, and its product with the scale
        self._scaled: list[torch.Tensor] = []

    def sync_config(self, config: SyncConfig) -> SyncConfig:
        """Lowers `bucket_bytes` so that packing a bucket overlaps with loading the one before."""
        most = GPU_BUCKET_BYTES if torch.cuda.is_available() else BUCKET_BYTES
        return config.model_copy(update={"bucket_bytes": min(config.bucket_bytes, most)})

    def manifest(self) -> Manifest:
        if self._manifest is None:
            specs = [
                TensorSpec(name, str(tensor.dtype).removeprefix("torch."), (tensor.numel() // tensor.shape[-1], tensor.shape[-1]))
                for name, tensor, _ in self._each_once()
            ]
            self._manifest = Manifest(tuple(specs))
        return self._manifest

    @torch.no_grad()
    def parts(self) -> Iterator[Part]:
        if self._part is None or not self._is_in_place:
            self._part = self._take()
        elif self._scaled:
            torch._foreach_copy_(self._scaled, self._unscaled)
            torch._foreach_mul_(self._scaled, self.spec.scale)
        if self.has_tensors:
            yield self._part

    def _take(self) -> Part:
        """The factors of now: each A where it is, if it stays there, and new memory for the others."""
        memory: dict[str, torch.Tensor] = {}
        self._unscaled, self._scaled = [], []
        for name, tensor, is_b in self._each_once():
            sent = tensor if self._is_in_place and not is_b else tensor.clone(memory_format=torch.contiguous_format)
            memory[name] = sent.view(-1)
            if is_b:
                self._unscaled.append(tensor)
                self._scaled.append(sent.mul_(self.spec.scale))
        if not self._copies:
            self._copies = [(Copy(contiguous(flat.numel()), name, contiguous(flat.numel())),) for name, flat in memory.items()]
        return Part(self._copies, memory)

    def _each_once(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """(PEFT name, factor, whether it is a B)."""
        for each in self._factors():
            if not each.shares_a:
                yield f"{each.name}.lora_A.weight", each.a, False
            yield f"{each.name}.lora_B.weight", each.b, True
