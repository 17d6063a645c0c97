"""A weight source whose tensors a test chooses."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bridge.export.source import Part
from bridge.layout.manifest import Manifest, TensorSpec
from bridge.layout.regions import Copy, contiguous


class DictSource:
    """One stage's tensors from a dict, which a test may exchange between syncs, `part_size` of them a part.

    `fail_at` raises before the part with that tensor.
    """

    is_sender = has_tensors = True

    def __init__(self, tensors: dict[str, torch.Tensor], stage: int = 0, num_stages: int = 1, part_size: int = 3) -> None:
        self.tensors, self.stage, self.num_stages, self.part_size = tensors, stage, num_stages, part_size
        self.fail_at, self.num_given = "", 0
        self._copies: dict[int, list[tuple[Copy, ...]]] = {}

    def manifest(self) -> Manifest:
        return Manifest(
            tuple(TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in self.tensors.items())
        )

    def parts(self) -> Iterator[Part]:
        names = list(self.tensors)
        for first in range(0, len(names), self.part_size):
            part = names[first : first + self.part_size]
            if self.fail_at in part:
                raise RuntimeError("out of trainer memory")
            memory = {name: self.tensors[name].reshape(-1) for name in part}
            copies = [(Copy(contiguous(flat.numel()), name, contiguous(flat.numel())),) for name, flat in memory.items()]
            self.num_given += len(part)
            yield Part(self._copies.setdefault(first, copies), memory)
