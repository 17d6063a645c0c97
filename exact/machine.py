"""Whether this machine's kernels are as the exact functions need them: that a row's or an element's place does not show.

GPUs are asked in cuda_machine.py. Leaves out that machines differ: trainer and replicas are to run on CPUs or GPUs of one kind.
Try it: tests/exact/test_functions.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from exact import cuda_machine
from exact.attention import BLOCK, ROWS
from exact.linear import TILE

BATCHES = (1, 2, 3, 7, 16)  # of products at once


def problem(shapes: Iterable[tuple[int, int]], head_size: int, vocabulary_size: int) -> str:
    """The function whose result depends on a row's place here; "" if none. `shapes`: (in, out) of the linears' weights."""
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    for num_inputs, num_outputs in sorted(set(shapes)):
        if not _rows_agree(draw(TILE, num_inputs), draw(num_outputs, num_inputs)):
            return f"a product of {TILE} rows with a weight [{num_outputs}, {num_inputs}]"
    for sizes in ((ROWS, head_size, BLOCK), (ROWS, BLOCK, head_size)):
        if not _batches_agree(draw(max(BATCHES), sizes[0], sizes[1]), draw(max(BATCHES), sizes[1], sizes[2])):
            return f"products of {sizes[0]} x {sizes[1]} with {sizes[1]} x {sizes[2]} matrices"
    if not all(torch.equal(torch.exp(x[shift:]), torch.exp(x)[shift:]) for x in [draw(1000)] for shift in range(1, 20)):
        return "exp"
    logits = draw(max(BATCHES), vocabulary_size)
    whole = torch.log_softmax(logits, -1)
    if not all(torch.equal(torch.log_softmax(logits[:count], -1), whole[:count]) for count in BATCHES):
        return "log_softmax"
    return ""


def check(
    shapes: Iterable[tuple[int, int]], heads: tuple[int, int], head_size: int, vocabulary_size: int, dtype: torch.dtype
) -> None:
    """`heads`: of queries, and of keys and values; the others as in `problem`.

    Raises:
        ValueError: the machine cannot compute a model of these sizes exactly.
    """
    if torch.cuda.is_available():
        if found := cuda_machine.problem(shapes, heads, head_size, dtype):
            raise ValueError(f"model.exact = true: on this GPU {found}. Remedy: write model.exact=false")
    elif found := problem(shapes, head_size, vocabulary_size):
        message = f"model.exact = true: on this machine {found} depends on the place of a row"
        raise ValueError(f"{message}. Remedy: write model.exact=false, or another number of threads (OMP_NUM_THREADS)")


def _rows_agree(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    whole = rows @ weight.t()
    turned = (torch.equal(rows.roll(by, 0) @ weight.t(), whole.roll(by, 0)) for by in range(1, len(rows)))
    alone = torch.zeros_like(rows)
    alone[3] = rows[5]
    return all(turned) and torch.equal((alone @ weight.t())[3], whole[5])


def _batches_agree(left: torch.Tensor, right: torch.Tensor) -> bool:
    whole = torch.bmm(left, right)
    if not all(torch.equal(torch.bmm(left[:count], right[:count]), whole[:count]) for count in BATCHES):
        return False
    return all(torch.equal(torch.bmm(left.roll(by, 1), right), whole.roll(by, 1)) for by in range(1, left.shape[1]))
