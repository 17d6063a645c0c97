"""Seconds of a rank on this machine's CPU, by what was traced of a step: products are timed, all else goes by bytes and calls.

A rank has one thread (launch/setup.sh). Of large products a part is timed. Leaves out what other processes on the same cores
take.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from megasync.planning.meta.activations import Activations
from megasync.planning.meta.operations import ATTENTION, ATTENTION_BACKWARD, Operation, Operations, Shape
from megasync.planning.meta.ranks import Counts
from megasync.planning.shapes import Grid, Work

MOST_PRODUCTS = 2e8  # multiplications of a product that is timed; of a larger one fewer rows or columns are, down to LEAST_SIZE
LEAST_SIZE = 64
CACHED_BYTES = 2**26  # of weights, more than the caches of a core's share
TRIALS, TRIAL_SECONDS = 5, 0.05  # as many, or until so much time has gone
SIZES = (2**14, 2**18, 2**22, 2**24)  # bytes of the tensors that an addition is timed with
ADAM_ELEMENTS = 2**21


def train_seconds(stages: Sequence[tuple[Counts, Activations]], grid: Grid, work: Work) -> tuple[float, float]:
    """Forward and backward passes of all optimizer steps of a batch; and one forward pass over it, as for log-probs."""
    count, tokens = work.num_microbatches(grid) * work.num_minibatches, work.tokens / grid.data
    bubble = 1 + (grid.pipeline - 1) / (grid.virtual * work.num_microbatches(grid))
    added = max(counts.trained for counts, _ in stages) * accumulation_seconds() * count
    train = max(pass_seconds(found.passes, found.tokens, tokens, count) for _, found in stages) * bubble
    alone = max(pass_seconds(found.forward, found.tokens, tokens, count) for _, found in stages) * bubble
    return train + added, alone


def optimizer_seconds(counts: Counts, grid: Grid, work: Work) -> float:
    own = counts.dense_trained / grid.shards + counts.experts_trained / grid.expert_shards
    return own * adam_seconds() * work.num_minibatches


def weights_seconds(num_weights: float, rows: int, size: int, dtype: str) -> float:
    """Of products of [rows, size] by so many weights in all, which come from memory where they are more than caches hold."""
    numbers = getattr(torch, dtype)
    columns = max(1, round(min(num_weights, CACHED_BYTES / numbers.itemsize) / size))
    shapes = Shape((rows, size), (size, 1), numbers), Shape((size, columns), (1, size), numbers)
    return float(product_seconds("mm", shapes) * num_weights / (size * columns))


def pass_seconds(operations: Operations, tokens: int, wanted_tokens: float, num_microbatches: int) -> float:
    """Of `wanted_tokens` in so many micro-batches, where the operations are those of one of `tokens`."""
    calls = sum(operations.values()) * call_seconds()
    work = sum(count * operation_seconds(each) for each, count in operations.items())
    return work * wanted_tokens / tokens + calls * num_microbatches


def operation_seconds(each: Operation) -> float:
    """Without the call."""
    return product_seconds(each.name, each.inputs) if each.name else memory_seconds(each.num_bytes)


def call_seconds() -> float:
    """Of the call of one operator from Python, with what autograd writes down for it."""
    return _addition_seconds(1)


def memory_seconds(num_bytes: float) -> float:
    """To read and write so many, of tensors that are made for it."""
    rates = [3 * size / max(1e-9, _addition_seconds(size // 4) - call_seconds()) for size in SIZES]
    return float(num_bytes / np.interp(math.log(max(1.0, num_bytes)), [math.log(3 * size) for size in SIZES], rates))


@cache
def product_seconds(name: str, inputs: tuple[Shape, ...]) -> float:
    """Of one call with random numbers in tensors of these shapes."""
    cut, share = _cut(name, inputs)
    given = [_random(each) for each in cut]
    call = _calls(name, given)
    return _least_seconds(call) * share


@cache
def adam_seconds() -> float:
    """A parameter of an optimizer step: gradients set to zero, their norm, clipping and Adam, all in float32."""
    weights = torch.nn.Parameter(torch.ones(ADAM_ELEMENTS))
    weights.grad = torch.ones_like(weights)
    optimizer = torch.optim.AdamW([weights], lr=1e-6)

    def step() -> None:
        assert weights.grad is not None
        weights.grad.zero_()
        torch._foreach_norm([weights.grad], dtype=torch.float64)
        weights.grad.mul_(1.0)
        optimizer.step()

    step()
    return _least_seconds(step) / ADAM_ELEMENTS


@cache
def accumulation_seconds() -> float:
    """Of adding an element of a gradient to the sum of those of all micro-batches."""
    total, own = torch.ones(ADAM_ELEMENTS), torch.ones(ADAM_ELEMENTS)
    return _least_seconds(lambda: total.add_(own)) / ADAM_ELEMENTS


@cache
def _addition_seconds(elements: int) -> float:
    one, other = torch.ones(elements), torch.ones(elements)
    repeats = max(1, 2**18 // elements) if elements > 1 else 1000

    def run() -> None:
        for _ in range(repeats):
            torch.add(one, other)

    return _least_seconds(run) / repeats


def _least_seconds(call: Callable[[], Any]) -> float:
    taken: list[float] = []
    while len(taken) < TRIALS and sum(taken) < TRIAL_SECONDS:
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return min(taken)


def _random(shape: Shape) -> torch.Tensor:
    return torch.empty_strided(shape.sizes, shape.strides, dtype=shape.dtype).normal_()


def _cut(name: str, inputs: tuple[Shape, ...]) -> tuple[tuple[Shape, ...], float]:
    """Shapes of as much of it as is timed, and how much more the whole is."""
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


def _calls(name: str, given: list[torch.Tensor]) -> Callable[[], Any]:
    aten = torch.ops.aten
    if name == ATTENTION:
        return lambda: aten._scaled_dot_product_flash_attention_for_cpu(*given[:3], 0.0, True)
    if name == ATTENTION_BACKWARD:
        return lambda: aten._scaled_dot_product_flash_attention_for_cpu_backward(*given[:6], 0.0, True)
    return lambda: torch.matmul(*given)
