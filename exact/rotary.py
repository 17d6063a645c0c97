"""Rotary embedding (arXiv:2104.09864, halves as in GPT-NeoX): frequencies of a config.json, tables of angles, and the rotation.

Tables are made on the CPU in blocks of one size, so that an angle's sine does not depend on how long the table is.
"""

from __future__ import annotations

from typing import Any

import torch

ROPE_TYPES = ("default", "linear", "llama3")
BLOCK = 256  # positions


def frequencies(hf_config: Any, head_size: int) -> torch.Tensor:
    """float32 [head_size / 2], as transformers has them.

    Raises:
        ValueError: the model's `rope_type` is none of ROPE_TYPES.
    """
    parameters = hf_config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise ValueError(f"model.exact = true: rope_type = {kind!r} is not among {', '.join(ROPE_TYPES)}")
    if kind == "default":
        exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device="cpu") / head_size
        return 1.0 / torch.pow(float(parameters["rope_theta"]), exponents)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    found, _ = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    return found.float()  # type: ignore[no-any-return]


def table(of: torch.Tensor, length: int) -> torch.Tensor:
    """Cosines, then sines, of the angles of `length` positions or a few more, float32 [length, 2 * frequencies], on the CPU."""
    blocks = []
    for first in range(0, length, BLOCK):
        angles = torch.arange(first, first + BLOCK, dtype=torch.float32, device="cpu")[:, None] * of
        blocks.append(torch.cat([angles.cos(), angles.sin()], -1))
    return torch.cat(blocks)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, heads, size] by the cosines and sines of its positions' angles, each [T, 1, size / 2].

    `rows`: which rows of cos and sin are each token's, int64 [T]; there may be others then.
    """
    if x.is_cuda:
        from exact import kernels

        return kernels.rotate(x, cos, sin, rows)
    if rows is not None:
        cos, sin = cos[rows], sin[rows]
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
