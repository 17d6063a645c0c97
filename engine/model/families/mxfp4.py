"""Weights of gpt-oss's folders in MXFP4 (OCP Microscaling Formats 1.0): 4-bit numbers in blocks of 32 with a scale of 8 bits.

Of a tensor NAME [experts, in, out] there are NAME_blocks, uint8 [experts, out, in / 32, 16], two numbers a byte, the lower bits
first, and NAME_scales, uint8 [experts, out, in / 32], the exponents of powers of two plus 127. Every value is one of bfloat16's.
Decoded by transformers. Leaves out the check of shapes (megasync/models/tensors.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

BLOCKS, SCALES = "_blocks", "_scales"


def decode(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 [experts, out, in / 32, 16] and [experts, out, in / 32] to bfloat16 [experts, in, out], an expert at a time.

    So transformers holds the intermediate numbers of one expert at most.
    """
    experts, rows, count, size = blocks.shape
    whole = torch.empty(experts, 2 * size * count, rows, dtype=torch.bfloat16)
    for index in range(experts):
        (whole[index],) = convert_moe_packed_tensors(blocks[index : index + 1], scales[index : index + 1])
    return whole


def unpacked(held: Mapping[str, torch.Tensor], waiting: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A file's tensors, those in MXFP4 decoded. `waiting`: blocks and scales of earlier files that lack their other half."""
    found = {name: tensor for name, tensor in held.items() if not name.endswith((BLOCKS, SCALES))}
    waiting |= {name: tensor for name, tensor in held.items() if name not in found}
    for name in [name.removesuffix(BLOCKS) for name in waiting if name.endswith(BLOCKS)]:
        if name + SCALES in waiting:
            found[name] = decode(waiting.pop(name + BLOCKS), waiting.pop(name + SCALES))
    return found


@dataclass(frozen=True)
class Packed:
    """A packed tensor. An expert-parallel rank decodes its own experts."""

    blocks: torch.Tensor
    scales: torch.Tensor

    def __getitem__(self, experts: slice) -> torch.Tensor:
        return decode(self.blocks[experts], self.scales[experts])


def readable(source: Any) -> Any:
    """mbridge's reader of a folder, which then reads NAME out of NAME_blocks and NAME_scales where the folder has these."""
    names = [name.removesuffix(BLOCKS) for name in source.load_hf_weight_names() if name.endswith(BLOCKS)]
    if not names:
        return source
    packed, plain = set(names), source.load_some_hf_weight

    def load(wanted: list[str]) -> dict[str, torch.Tensor | Packed]:
        stored = [part for name in wanted for part in ([name + BLOCKS, name + SCALES] if name in packed else [name])]
        held = plain(stored)
        return {name: Packed(held[name + BLOCKS], held[name + SCALES]) if name in packed else held[name] for name in wanted}

    source.load_some_hf_weight = load
    return source
