"""Engines for the benches: without weights on the disk, and with other weights for a next sync. Leaves out the measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch

from engine.engine import Engine
from engine.model import build


class RandomEngine(Engine):
    """An engine that needs no weights on the disk."""

    def __init__(self, *args: Any, **options: Any) -> None:
        with mock.patch("engine.models.build_chunks", self.build):
            super().__init__(*args, **options)

    @staticmethod
    def build(mbridge: Any, _path: str | Path) -> list[torch.nn.Module]:
        torch.default_generator.manual_seed(0)  # routers are drawn on the host, and every rank has the same
        return build.build_chunks(mbridge, None)


class FrozenEngine(RandomEngine):
    """One whose weights no step changes: there are no gradients and no optimizer's state beside them."""

    @staticmethod
    def build(mbridge: Any, path: str | Path) -> list[torch.nn.Module]:
        chunks = RandomEngine.build(mbridge, path)
        for chunk in chunks:
            chunk.requires_grad_(requires_grad=False)
        return chunks


@torch.no_grad()
def negate(built: Engine) -> None:
    """Flip the signs of all weights, in place: quicker than an optimizer step, without its memory. For DDP."""
    for items in built.whole_parameters():
        for item in items:
            item.tensor.neg_()
