"""What a traced step computes, call by call: shapes of its products and attention, and bytes that all else reads and writes.

Leaves out how long each takes (planning/cpu.py times them on this machine).
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_iter

aten = torch.ops.aten
ATTENTION, ATTENTION_BACKWARD = "attention", "attention backward"
PRODUCTS = {
    aten.mm.default: "mm",
    aten.bmm.default: "bmm",
    aten.addmm.default: "addmm",
    aten.baddbmm.default: "baddbmm",
    aten._scaled_dot_product_flash_attention_for_cpu.default: ATTENTION,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: ATTENTION_BACKWARD,
}
FREE = ("aten.empty", "aten.new_empty", "aten.detach", "aten.lift", "aten.record_stream", "aten.is_", "aten.sym_", "aten.set_")


class Shape(NamedTuple):
    """Of a tensor, hashable."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Shape:
        return Shape(tuple(tensor.shape), tensor.stride(), tensor.dtype)


class Operation(NamedTuple):
    """One call. `name`: of a product, with the shapes of its inputs; else empty, with the bytes that it reads and writes."""

    name: str
    inputs: tuple[Shape, ...]
    num_bytes: int


Operations = Counter[Operation]


def operation(function: Any, args: Any, kwargs: Any, result: Any) -> Operation | None:
    """What a call below autograd computes; None: nothing, such as a view."""
    if name := PRODUCTS.get(function):
        return Operation(name, tuple(Shape.of(each) for each in tree_iter(args) if isinstance(each, torch.Tensor)), 0)
    if function.is_view or str(function).startswith(FREE):
        return None
    given = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
    made = [each for each in tree_iter(result) if isinstance(each, torch.Tensor)]
    return Operation("", (), sum(each.numel() * each.element_size() for each in (*given, *made)))
