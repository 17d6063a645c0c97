"""The functions of `model.exact`: right within a tolerance, and the same bits in every batch, packing and chunk.

    python -m pytest tests/exact
    ATEN_CPU_CAPABILITY=avx2 python -m pytest tests/exact     # as on a machine without AVX-512
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

from exact import attention, linear, machine, pointwise, rotary

ROOT = Path(__file__).resolve().parents[2]
SHAPES = [(64, 96), (64, 200), (48, 64), (576, 960), (100, 77)]
many = settings(derandomize=True, database=None, deadline=None, max_examples=20)


def numbers(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
def test_a_row_of_a_product_has_the_same_bits_in_every_batch(num_inputs: int, num_outputs: int) -> None:
    rows, weight = numbers(600, num_inputs), numbers(num_outputs, num_inputs, seed=1)
    whole = linear.linear(rows, weight)
    torch.testing.assert_close(whole, rows @ weight.t(), rtol=1e-4, atol=1e-4)
    memory = torch.empty(weight.numel() + 3)[3:].view(weight.shape).copy_(weight)  # not aligned
    for count in (*range(1, 65), 255, 256, 257):
        chosen = torch.randperm(600, generator=torch.Generator().manual_seed(count))[:count]
        assert torch.equal(linear.linear(rows[chosen], memory), whole[chosen]), count


@given(st.integers(1, 64), st.integers(1, 300), st.integers(0, 1000))
@many
def test_rows_of_elementwise_functions_have_the_same_bits_in_every_batch(count: int, size: int, seed: int) -> None:
    x, weight = numbers(70, size, seed=seed), numbers(size, seed=seed + 1)
    chosen = torch.randperm(70, generator=torch.Generator().manual_seed(seed))[:count]
    functions = {
        "rms_norm": (lambda x: pointwise.rms_norm(x, weight, 1e-6), lambda x: F.rms_norm(x, (size,), weight, 1e-6)),
        "silu": (pointwise.silu, F.silu),
        "log_softmax": (lambda x: pointwise.log_softmax(x, 0.7), lambda x: F.log_softmax(x / 0.7, -1)),
        "row_sums": (pointwise.row_sums, lambda x: x.sum(-1, keepdim=True)),
    }
    for name, (ours, reference) in functions.items():
        torch.testing.assert_close(ours(x), reference(x), rtol=1e-4, atol=1e-5, msg=name)
        assert torch.equal(ours(x[chosen]), ours(x)[chosen]), name


def test_kernels_for_gpus_compute_the_same() -> None:
    command, environment = [sys.executable, "-m", "tests.exact.kernel_cases"], os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_gradients_of_swiglu_are_those_of_autograd() -> None:
    x, gradient = numbers(5, 24), numbers(5, 12, seed=1)
    reference = x.clone().requires_grad_()
    gate, up = reference.chunk(2, -1)
    torch.testing.assert_close(pointwise.silu_and_mul(x), F.silu(gate) * up)
    (expected,) = torch.autograd.grad(F.silu(gate) * up, reference, gradient)
    torch.testing.assert_close(pointwise.silu_and_mul_gradient(x, gradient), expected)


@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_a_table_of_angles_is_the_same_however_long(kind: str) -> None:
    from transformers import LlamaConfig

    more = {"factor": 8.0} if kind != "default" else {}
    more |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64} if kind == "llama3" else {}
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **more}
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, head_dim=32, rope_parameters=parameters)
    found = rotary.frequencies(config, 32)
    long = rotary.table(found, 2000)
    for length in (1, 100, 256, 300):
        assert torch.equal(rotary.table(found, length)[:length], long[:length])
    angles = torch.arange(2000)[:, None].double() * found.double()
    torch.testing.assert_close(long[:2000], torch.cat([angles.cos(), angles.sin()], -1).float(), rtol=1e-3, atol=2e-4)


def test_other_rope_types_are_refused() -> None:
    with pytest.raises(ValueError, match="rope_type = 'yarn' is not among default, linear, llama3"):
        rotary.frequencies(SimpleNamespace(rope_parameters={"rope_type": "yarn"}), 32)


def attended(
    packed: list[tuple[int, int]], wholes: list[tuple[torch.Tensor, ...]], shuffle: int = 0
) -> list[torch.Tensor]:
    """Of each (sequence, number of first tokens that are done before) the results of its other queries, in one batch.

    Keys lie in pages in a shuffled order with rubbish between them.
    """
    page, generator = 32, torch.Generator().manual_seed(shuffle)
    lengths = [len(wholes[which][0]) for which, _ in packed]
    pages = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(pages), generator=generator)
    groups, size = wholes[0][1].shape[1:]
    keys, values = (torch.full((sum(pages), page, groups, size), torch.nan) for _ in range(2))
    tables, begin = [], 0
    for (which, _), count in zip(packed, pages, strict=True):
        table = order[begin : begin + count]
        for memory, whole in zip((keys, values), wholes[which][1:], strict=True):
            for place, own in enumerate(whole.split(page)):
                memory[table[place], : len(own)] = own
        tables.append(table)
        begin += count
    padded = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)

    def fetch(owners: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        where = padded[owners[:, None], positions // page], positions % page
        return keys[where], values[where]

    queries = [wholes[which][0][done:] for which, done in packed]
    starts = [0, *torch.tensor([len(each) for each in queries]).cumsum(0).tolist()]
    out = attention.attend(torch.cat(queries), starts, lengths, fetch, groups, size**-0.5)
    return list(out.split([len(each) for each in queries]))


@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 2, 16), (9, 3, 64), (2, 2, 32), (20, 1, 32)])
def test_a_query_attends_alike_alone_and_in_every_batch_and_chunk(heads: int, groups: int, size: int) -> None:
    lengths = (1, 2, 31, 63, 64, 65, 130, 500)
    counts = (heads, groups, groups)
    wholes = [tuple(numbers(n, count, size, seed=n + part) for part, count in enumerate(counts)) for n in lengths]
    alone = [attended([(which, 0)], wholes)[0] for which in range(len(wholes))]
    for (query, key, value), got in zip(wholes, alone, strict=True):
        parts = (x.transpose(0, 1)[None] for x in (query, key, value))
        reference = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        torch.testing.assert_close(got, reference, rtol=1e-4, atol=1e-5)
    together = attended([(which, 0) for which in range(len(wholes))], wholes, shuffle=1)
    assert all(map(torch.equal, together, alone))
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        picked = torch.randint(len(wholes), (1 << (seed % 7),), generator=generator).tolist()
        last = [lengths[which] - 1 for which in picked]  # decoding: the last token alone
        done = last if seed % 2 else [int(torch.randint(each + 1, (), generator=generator)) for each in last]
        for which, first, got in zip(picked, done, attended(list(zip(picked, done, strict=True)), wholes, seed), strict=True):
            assert torch.equal(got, alone[which][first:]), (seed, which, first)


def test_values_after_a_sequence_do_no_harm() -> None:
    """A page of one sequence lies among NaN, which fills the pages up (attended)."""
    wholes = [(numbers(70, 2, 16), numbers(70, 2, 16, seed=1), numbers(70, 2, 16, seed=2))]
    assert torch.isfinite(attended([(0, 0)], wholes)[0]).all()


def test_this_machine_is_fit() -> None:
    assert machine.problem(SHAPES, 64, 1000) == ""


def test_adapters_are_merged_into_any_rows() -> None:
    weight, a, b = numbers(96, 64), numbers(4, 64, seed=1), numbers(96, 4, seed=2)
    merged = linear.merge_into(torch.empty_like(weight), weight, a, b, 0.5)
    torch.testing.assert_close(merged, weight + 0.5 * b @ a)


@pytest.mark.skipif("ATEN_CPU_CAPABILITY" in os.environ, reason="this is that run")
def test_all_of_this_holds_without_avx512() -> None:
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(Path(__file__).relative_to(ROOT))]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
