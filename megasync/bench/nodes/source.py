"""Random weights of a Qwen3 of about 100 M parameters, in Hugging Face names, as a trainer rank under DDP holds them: in place.

Leaves out megatron-core: what is measured is how weights travel.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bridge.export.source import Part
from bridge.layout.manifest import Manifest, TensorSpec
from bridge.layout.regions import Copy, contiguous
from megasync.bench.common.model import qwen3, tensors_of
from megasync.bench.config import BenchConfig


class RandomSource:
    """All of a model, the same on every rank that makes one."""

    stage, num_stages, has_tensors = 0, 1, True

    def __init__(self, *, is_sender: bool) -> None:
        self.is_sender = is_sender
        generator, shapes = torch.Generator().manual_seed(0), tensors_of(qwen3(BenchConfig()))
        self.tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
        self._memory = {name: tensor.view(-1) for name, tensor in self.tensors.items()}
        whole = {name: contiguous(tensor.numel()) for name, tensor in self.tensors.items()}
        self._copies = [(Copy(region, name, region),) for name, region in whole.items()]

    def manifest(self) -> Manifest:
        return Manifest(tuple(TensorSpec(name, "bfloat16", tuple(tensor.shape)) for name, tensor in self.tensors.items()))

    def parts(self) -> Iterator[Part]:
        yield Part(self._copies, self._memory)

    def change(self) -> None:
        """Other weights to bring over, the same on every rank."""
        for tensor in self.tensors.values():
            tensor.neg_()
