"""What a traced step computes, call by call: operators with the shapes of their tensors, so that they can be called again.

Leaves out how long each takes (planning/cpu/ times them on this machine).
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
LARGE_BYTES = 4 * 2**20  # bridge/processes.py: MALLOC_ON_CPU; what is as large comes from the kernel and goes back to it
PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format)


class Shape(NamedTuple):
    """Of a tensor, hashable."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Shape:
        return Shape(tuple(tensor.shape), tensor.stride(), tensor.dtype)


class Operation(NamedTuple):
    """One call. `name`: of a product, whose inputs are shapes alone, else as `aten.add.Tensor`; empty: only its bytes are known.

    `inputs` and `keywords` are its arguments, with shapes for tensors and tuples for lists.
    """

    name: str
    inputs: tuple[Any, ...]
    num_bytes: int  # that it reads and writes; of a product 0
    keywords: tuple[tuple[str, Any], ...] = ()
    kernel_bytes: int = 0  # of new tensors that come from the kernel


Operations = Counter[Operation]


def operation(function: Any, args: Any, kwargs: Any, result: Any) -> Operation | None:
    """What a call below autograd computes; None: nothing, such as a view, or what is sent to other ranks."""
    given = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
    made = [each for each in tree_iter(result) if isinstance(each, torch.Tensor)]
    new = _from_kernel(given, made)
    if name := PRODUCTS.get(function):
        return Operation(name, tuple(Shape.of(each) for each in tree_iter(args) if isinstance(each, torch.Tensor)), 0, (), new)
    if function.is_view or function.namespace == "c10d" or str(function).startswith(FREE):
        return Operation("", (), 0, (), new) if new else None
    num_bytes = sum(each.numel() * each.element_size() for each in (*given, *made))
    try:
        return Operation(str(function), _frozen(args), num_bytes, _frozen(tuple((kwargs or {}).items())), new)
    except TypeError:
        return Operation("", (), num_bytes, (), new)


def _from_kernel(given: list[torch.Tensor], made: list[torch.Tensor]) -> int:
    """Bytes of storages that are large and that a call did not get."""
    known = {each.untyped_storage()._cdata for each in given}
    new = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in made}
    return sum(size for key, size in new.items() if key not in known and size >= LARGE_BYTES)


def _frozen(value: Any) -> Any:
    """Hashable.

    Raises:
        TypeError: it is something that cannot be given to another call, such as a generator.
    """
    if isinstance(value, torch.Tensor):
        return Shape.of(value)
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(each) for each in value)
    if isinstance(value, torch.device):
        return "cpu"
    if isinstance(value, PLAIN):
        return value
    raise TypeError(type(value))
