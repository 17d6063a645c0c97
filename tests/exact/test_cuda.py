"""The functions of `model.exact` on a Hopper GPU: right within bfloat16's rounding, and the same bits wherever a row lies.

    python -m pytest -m gpu tests/exact/test_cuda.py
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from exact import cuda, cuda_machine, kernels, pointwise, rotary

pytestmark = pytest.mark.gpu
# (in, out) of weights, heads, size of a head: SmolLM2-135M, Qwen3-0.6B, a 3 B model, Qwen2.5-7B
MODELS = [
    ([(576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152)], (9, 3), 64),
    ([(1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (1024, 151936)], (16, 8), 128),
    ([(2048, 2560), (2048, 2048), (2048, 22016), (11008, 2048), (2048, 151936)], (16, 2), 128),
    ([(3584, 4608), (3584, 3584), (3584, 37888), (18944, 3584)], (28, 4), 128),
]


def draw(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, device="cuda").bfloat16()


@pytest.mark.parametrize(("shapes", "heads", "size"), MODELS)
def test_a_row_has_the_same_bits_wherever_it_lies(shapes: list[tuple[int, int]], heads: tuple[int, int], size: int) -> None:
    cuda.prepare()
    assert not cuda_machine.problem(shapes, heads, size, torch.bfloat16)


@pytest.mark.parametrize("columns", [64, 128, 576, 1000, 2048, 5120])
def test_rms_norm_is_right_and_knows_no_neighbours(columns: int) -> None:
    x, weight = draw(700, 3 * columns)[:, columns : 2 * columns], draw(columns)
    found = pointwise.rms_norm(x, weight, 1e-6)
    reference = F.rms_norm(x.double(), (columns,), weight.double(), 1e-6)
    torch.testing.assert_close(found.double(), reference, rtol=2**-7, atol=1e-6)
    for count in (1, 3, 64, 699):
        assert torch.equal(pointwise.rms_norm(x[:count].contiguous(), weight, 1e-6), found[:count])


@pytest.mark.parametrize("columns", [64, 576, 1000, 2048, 3584, 5120])
def test_a_norm_that_adds_first_has_the_bits_of_one_that_does_not(columns: int) -> None:
    x, residual, weight = draw(700, columns), draw(700, columns), draw(columns)
    assert kernels.sums_agree(columns, torch.bfloat16)
    found, whole = pointwise.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(whole, x + residual) and torch.equal(found, pointwise.rms_norm(x + residual, weight, 1e-5))


@pytest.mark.parametrize("columns", [8, 1536, 5000, 11008])
def test_swiglu_and_its_gradient_are_right_and_know_no_neighbours(columns: int) -> None:
    x, gradient = draw(300, 2 * columns), draw(300, columns)
    found = pointwise.silu_and_mul(x)
    exact = x.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    reference = F.silu(gate) * up
    torch.testing.assert_close(found.double(), reference, rtol=2**-7, atol=1e-6)
    (of_x,) = torch.autograd.grad(reference, exact, gradient.double())
    torch.testing.assert_close(pointwise.silu_and_mul_gradient(x, gradient).double(), of_x, rtol=2**-7, atol=1e-4)
    for count in (1, 3, 64, 299):
        assert torch.equal(pointwise.silu_and_mul(x[:count].clone()), found[:count])


@pytest.mark.parametrize(("heads", "size"), [(9, 64), (3, 64), (32, 128)])
def test_rotation_is_right_and_knows_no_neighbours(heads: int, size: int) -> None:
    x = draw(300, 2 * heads * size)[:, heads * size :].view(300, heads, size)
    table = rotary.table(1.0 / 10000 ** (torch.arange(0, size, 2) / size), 300).cuda()
    cos, sin = table[torch.randperm(300, device="cuda"), None].chunk(2, -1)
    found = rotary.rotate(x, cos, sin)
    first, second = x.double().chunk(2, -1)
    reference = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    torch.testing.assert_close(found.double(), reference, rtol=2**-7, atol=1e-2)
    assert torch.equal(rotary.rotate(x[7:8].contiguous(), cos[7:8], sin[7:8]), found[7:8])
    rows = torch.randperm(300, device="cuda")
    assert torch.equal(rotary.rotate(x, cos, sin, rows), rotary.rotate(x, cos[rows], sin[rows]))
    back = rotary.rotate(found, cos, -sin)  # which lies otherwise in memory
    torch.testing.assert_close(back.double(), x.double(), rtol=2**-6, atol=4e-2)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_right_and_know_no_neighbours(temperature: float) -> None:
    logits, labels = draw(300, 49152), torch.randint(0, 49152, (300,), device="cuda")
    found = pointwise.token_log_probs(logits, labels, temperature)
    reference = (logits.double() / temperature).log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    torch.testing.assert_close(found.double(), reference, rtol=0, atol=0.05 if temperature != 1.0 else 1e-4)
    assert torch.equal(pointwise.token_log_probs(logits[5:7], labels[5:7], temperature), found[5:7])
