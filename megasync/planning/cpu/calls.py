"""Calls that are timed: operators in the shapes that were traced, of large ones a part, and small pieces of a step.

    call, share = prepare(operation)      # call() is timed; all of the operation takes `share` times as long

Leaves out the timing (together.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F

from megasync.planning.meta.operations import ATTENTION, ATTENTION_BACKWARD, LARGE_BYTES, Operation, Shape

MOST_PRODUCTS = 2e8  # multiplications of a product that is timed; of a larger one fewer rows or columns are, down to LEAST_SIZE
LEAST_SIZE = 64
MOST_BYTES = 2**25  # read and written by any other call that is timed; of a larger one fewer rows are
MOST_ELEMENTS = 2**20  # of a tensor in an optimizer step
FRESH_BYTES = 2**26
HOST_LAYERS = 16
ADAM, ACCUMULATION, HOST, FRESH = "adam", "accumulation", "host", "fresh"  # names of operations that no trace has

Call = Callable[[], Any]


def adam(elements: int) -> Operation:
    """Of one tensor in an optimizer step: its gradient is set to zero, its norm taken and clipped, then Adam, all in float32.

    New are the gradient in float64 and two temporaries of Adam (torch/optim/adam.py:_single_tensor_adam).
    """
    new = sum(size for size in (8 * elements, 4 * elements, 4 * elements) if size >= LARGE_BYTES)
    return Operation(ADAM, (elements,), 0, (), new)


def accumulation(elements: int) -> Operation:
    """Of a tensor's gradient to the sum of those of all micro-batches."""
    return Operation(ACCUMULATION, (elements,), 0)


def host() -> Operation:
    """Of a small layer in Python, forward and backward: modules, a function of autograd, calls of torch with next to no work."""
    return Operation(HOST, (), 0)


def fresh() -> Operation:
    """A byte of a large tensor, which comes from the kernel when it is first written and goes back when it is freed."""
    return Operation(FRESH, (), 0)


def prepare(each: Operation) -> tuple[Call, float]:
    """The call of it on tensors of ones, and how much longer the whole takes.

    Raises:
        Exception: whatever torch has against a call in part; then its bytes have to do.
    """
    if make := {ADAM: _adam, ACCUMULATION: _accumulation}.get(each.name):
        (elements,) = each.inputs
        return make(min(elements, MOST_ELEMENTS)), max(1.0, elements / MOST_ELEMENTS)
    if each.name == FRESH:
        return lambda: torch.empty(FRESH_BYTES, dtype=torch.uint8).fill_(1), 1 / FRESH_BYTES
    if each.name == HOST:
        return _host(), 1 / HOST_LAYERS
    if not each.name.startswith("aten."):
        cut, share = _cut(each.name, each.inputs)
        return _product(each.name, [_ones(shape) for shape in cut]), share
    part, share = _with_fewer_rows(each)
    packet, overload = part.name.removeprefix("aten.").rsplit(".", 1)
    function = getattr(getattr(torch.ops.aten, packet), overload)
    shapes = list(_shapes(part.inputs))
    indices = sum(not shape.dtype.is_floating_point for shape in shapes)
    rows = min((min(shape.sizes[:indices], default=1) for shape in shapes if shape.dtype.is_floating_point), default=1)
    arguments, keywords = _filled(part.inputs, rows), {name: _filled(value, rows) for name, value in part.keywords}
    return lambda: function(*arguments, **keywords), share


def moved(num_bytes: int) -> Operation:
    """An addition of float32 tensors that reads and writes about as many bytes."""
    elements = max(1, num_bytes // 12)
    shape = Shape((elements,), (1,), torch.float32)
    return Operation("aten.add.Tensor", (shape, shape), 12 * elements)


def _product(name: str, given: list[torch.Tensor]) -> Call:
    aten = torch.ops.aten
    if name == ATTENTION:
        return lambda: aten._scaled_dot_product_flash_attention_for_cpu(*given[:3], 0.0, True)
    if name == ATTENTION_BACKWARD:
        return lambda: aten._scaled_dot_product_flash_attention_for_cpu_backward(*given[:6], 0.0, True)
    return lambda: torch.matmul(*given[-2:])


def _adam(elements: int) -> Call:
    weights, model = torch.nn.Parameter(torch.ones(elements)), torch.ones(elements)
    weights.grad = torch.ones_like(weights)
    optimizer = torch.optim.AdamW([weights], lr=1e-6)

    def step() -> None:
        gradient = weights.grad
        assert gradient is not None
        gradient.zero_()
        torch._foreach_norm([gradient], dtype=torch.float64)
        gradient.mul_(1.0)
        optimizer.step()
        model.copy_(weights.detach())

    return step


def _accumulation(elements: int) -> Call:
    total, own = torch.ones(elements), torch.ones(elements)
    return lambda: total.add_(own)


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] * weight, (gradients[0] * x).sum(0)


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.linear = torch.nn.Parameter(torch.ones(4)), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = _Scale.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return x + F.silu(self.linear(scaled)).view(-1, 2, 2).transpose(1, 2).reshape(-1, 4)


def _host() -> Call:
    layers = torch.nn.Sequential(*(_Layer() for _ in range(HOST_LAYERS)))
    x = torch.ones(2, 4)
    return lambda: layers(x).sum().backward()


def _ones(shape: Shape) -> torch.Tensor:
    return torch.empty_strided(shape.sizes, shape.strides, dtype=shape.dtype).fill_(1)


def _filled(value: Any, rows: int) -> Any:
    """Arguments of a call. Numbers are ones, which stay ones; integers are rows of the smallest tensor, in order."""
    if isinstance(value, Shape):
        if value.dtype in (torch.int64, torch.int32):
            count = math.prod(value.sizes)
            return (torch.arange(count, dtype=value.dtype) % max(1, rows)).view(value.sizes)
        return _ones(value)
    return [_filled(each, rows) for each in value] if isinstance(value, tuple) else value


def _shapes(value: Any) -> Iterable[Shape]:
    if isinstance(value, Shape):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _shapes(each)


def _with_fewer_rows(each: Operation) -> tuple[Operation, float]:
    """As much of it as is timed: the largest size, wherever it stands, is a smaller one."""
    largest = max((size for shape in _shapes((each.inputs, each.keywords)) for size in shape.sizes), default=1)
    parts = min(largest, -(-each.num_bytes // MOST_BYTES))
    if parts <= 1:
        return each, 1.0
    fewer = -(-largest // parts)

    def cut(value: Any) -> Any:
        if isinstance(value, Shape):
            return _packed(value._replace(sizes=tuple(fewer if size == largest else size for size in value.sizes)))
        if isinstance(value, tuple):
            return tuple(cut(one) for one in value)
        return fewer if isinstance(value, int) and value == largest else value

    return each._replace(inputs=cut(each.inputs), keywords=cut(each.keywords)), largest / fewer


def _packed(shape: Shape) -> Shape:
    """With the strides of a tensor whose dimensions lie in the same order without gaps; those of stride 0 stay repeated."""
    strides, step = [0] * len(shape.sizes), 1
    for axis in sorted(range(len(shape.sizes)), key=lambda one: (shape.strides[one], -one)):
        if shape.strides[axis]:
            strides[axis], step = step, step * shape.sizes[axis]
    return shape._replace(strides=tuple(strides))


def _cut(name: str, inputs: tuple[Shape, ...]) -> tuple[tuple[Shape, ...], float]:
    """Shapes of as much of a product as is timed, and how much more the whole is."""
    if name in (ATTENTION, ATTENTION_BACKWARD):
        batch = inputs[0].sizes[0]
        queries = next(each.sizes for each in inputs if len(each.sizes) == 4)
        kept = max(1, min(batch, int(MOST_PRODUCTS / math.prod(queries[1:]) / queries[2])))
        return tuple(_narrowed(each, 0, kept) if each.sizes[0] == batch else each for each in inputs), batch / kept
    *_, left, right = inputs  # of addmm and baddbmm the first is what is added
    rows, inner, columns = left.sizes[-2], left.sizes[-1], right.sizes[-1]
    count = math.prod(left.sizes[:-2])
    taken = [count, rows, inner, columns]
    while math.prod(taken) > MOST_PRODUCTS and max(taken) > LEAST_SIZE:
        largest = taken.index(max(taken))
        taken[largest] = -(-taken[largest] // 2)
    share = count * rows * inner * columns / math.prod(taken)
    left = _narrowed(_narrowed(left, -2, taken[1]), -1, taken[2])
    right = _narrowed(_narrowed(right, -2, taken[2]), -1, taken[3])
    if len(left.sizes) == 3:
        left, right = _narrowed(left, 0, taken[0]), _narrowed(right, 0, taken[0])
    return (left, right), share


def _narrowed(shape: Shape, axis: int, size: int) -> Shape:
    """Fewer rows or columns; strides stay, so that reading it costs as much."""
    sizes = list(shape.sizes)
    sizes[axis] = size
    return shape._replace(sizes=tuple(sizes))
