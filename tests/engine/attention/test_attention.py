"""Attention over packed sequences, with sliding windows and without, against each sequence alone."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

LIBRARIES = ["torch", "FlashAttention 3"]


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], window: int = 0) -> torch.Tensor:
    """Softmax over the tokens up to a query's own, and of those with a window the last so many, written out."""
    pieces = []
    for one, two, three in zip(*(torch.split(x, lengths) for x in (q, k, v)), strict=True):
        groups = one.shape[1] // two.shape[1]
        two, three = (x.repeat_interleave(groups, 1) for x in (two, three))
        logits = torch.einsum("qhd,khd->hqk", one, two) / one.shape[-1] ** 0.5
        distance = torch.arange(len(one))[:, None] - torch.arange(len(one))[None]
        hidden = ((distance < 0) | (distance >= (window or len(one)))).to(q.device)
        pieces.append(torch.einsum("hqk,khd->qhd", logits.masked_fill(hidden, -torch.inf).softmax(-1), three))
    return torch.cat(pieces)


def inputs(lengths: list[int], size: int, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and a gradient, of 4 heads on 2 of K and V."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(sum(lengths), heads, size) for heads in (4, 2, 2, 4)]
    return [torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 41), st.booleans())
def test_attention_within_a_window_is_that_of_each_sequence_alone(lengths: list[int], window: int, is_second: bool) -> None:
    """fp32 on the CPU, values and gradients; the first of two layers has no window."""
    from engine.attention.core import CoreAttention
    from engine.batch.packed import PackedSequences

    size = (window - 1, 0) if window else None
    config = SimpleNamespace(no_rope_freq=None, window_size=size, window_attn_skip_freq=[0, 1], softmax_type="vanilla")
    attention = CoreAttention(config, 1 + is_second, None, "self")
    *mine, seed = inputs(lengths, 8, "cpu", torch.float32)
    theirs = [x.double().requires_grad_() for x in mine]
    for x in mine:
        x.requires_grad_()
    packed = PackedSequences.from_lengths(lengths, torch.device("cpu"))
    out = attention(*mine, packed_seq_params=packed).view(seed.shape)
    expected = reference(*theirs, lengths, window if is_second else 0)
    out.backward(seed)
    expected.backward(seed.double())
    for a, b in [(out, expected), *((a.grad, b.grad) for a, b in zip(mine, theirs, strict=True))]:
        torch.testing.assert_close(a, b.float(), rtol=0, atol=1e-5)


def use_library(library: str, size: int, window: int) -> None:
    """Skips where it is not installed, or not for such heads."""
    from engine.attention import flash  # imports torch's parts that workers which only collect this file do without

    fields: dict[str, Any] = {"window_size": (window - 1, 0) if window else None, "window_attn_skip_freq": [1], "num_layers": 1}
    heads = {"kv_channels": size, "num_attention_heads": 4, "num_query_groups": 2, "multi_latent_attention": False}
    config = SimpleNamespace(**fields, **heads, params_dtype=torch.bfloat16)
    reported = flash.choose("torch" if library == "torch" else "auto", config)
    if not reported.startswith(library):
        pytest.skip(reported)


@pytest.fixture(autouse=True)
def torch_afterwards() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        use_library("torch", 64, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("window", "size"), [(0, 64), (1, 64), (64, 128), (700, 256), (8192, 64), (0, 256)])
@pytest.mark.parametrize("lengths", [[5, 700, 1, 1300], [8192], [40, 9001, 3, 8192, 8200, 2]])
def test_packed_attention_equals_each_sequence_alone(lengths: list[int], window: int, size: int, library: str) -> None:
    """bf16: short sequences, a long one and both; values and gradients; heads of Gemma 3, too."""
    from engine.attention import flash
    from engine.batch.packed import PackedSequences

    use_library(library, size, window)
    *packed, seed = inputs(lengths, size, "cuda", torch.bfloat16)
    mine, theirs = [x.clone().requires_grad_() for x in packed], [x.float().requires_grad_() for x in packed]
    out = flash.attend(*mine, PackedSequences.from_lengths(lengths, torch.device("cuda")), None, window)
    expected = reference(*theirs, lengths, window)
    out.backward(seed)
    expected.backward(seed.float())
    _check(out, expected, mine, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("window", "size"), [(0, 128), (100, 128), (100, 256)])
def test_a_part_of_a_sequence_attends_to_what_the_whole_one_does(window: int, size: int, library: str) -> None:
    """What a context-parallel rank computes: of the last 300 and the first 200 tokens of two sequences; heads of Gemma 3, too."""
    from engine.attention import flash
    from engine.batch.packed import offsets

    use_library(library, size, window)
    lengths, chunks = [1000, 400], [(700, 1000), (0, 200)]
    device = torch.device("cuda")
    *packed, seed = inputs(lengths, size, "cuda", torch.bfloat16)
    mine, theirs = [x.clone().requires_grad_() for x in packed], [x.float().requires_grad_() for x in packed]
    expected = reference(*theirs, lengths, window)
    queries = torch.cat([torch.arange(start, end) + first for (start, end), first in zip(chunks, (0, 1000), strict=True)]).cuda()
    keys = torch.cat([torch.arange(end) + first for (_, end), first in zip(chunks, (0, 1000), strict=True)]).cuda()
    ends = offsets([end - start for start, end in chunks], device), offsets([end for _, end in chunks], device)
    q, k, v = mine
    out = flash.attend_prefixes(q[queries], k[keys], v[keys], ends, (300, 1000), None, window)
    out.backward(seed[queries])
    expected[queries].backward(seed[queries].float())
    _check(out, expected[queries], mine, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize(("size", "value_size"), [(64, 64), (128, 128), (48, 32)])
def test_float32_on_a_gpu_is_exact_and_holds_no_scores(size: int, value_size: int, window: int) -> None:
    """Values and gradients, with fewer heads of keys; scores [tokens, tokens] of all heads would be twice the limit or more."""
    from engine.attention.core import CoreAttention
    from engine.batch.packed import PackedSequences

    lengths = [4096, 3000, 7]
    sliding = {"window_size": (window - 1, 0) if window else None, "window_attn_skip_freq": [1]}
    config = SimpleNamespace(no_rope_freq=None, softmax_type="vanilla", **sliding)
    attention = CoreAttention(config, 1, None, "self")
    query, key, value, seed = inputs(lengths, size, "cuda", torch.float32)
    mine = [x.clone().requires_grad_() for x in (query, key, value[..., :value_size])]
    theirs = [x.detach().double().requires_grad_() for x in mine]
    packed = PackedSequences.from_lengths(lengths, torch.device("cuda"))
    expected = reference(*theirs, lengths, window)
    expected.backward(seed[..., :value_size].double())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attention(*mine, packed_seq_params=packed).view(expected.shape)
    held = torch.cuda.memory_allocated() - before
    out.backward(seed[..., :value_size])
    scores = 2 * 4 * 4096**2 * 4
    assert held < (scores / 2 if window else scores / 4), "keys and values of all heads; a window's mask is read as float32"
    for a, b in [(out, expected), *((a.grad, b.grad) for a, b in zip(mine, theirs, strict=True))]:
        assert a is not None and b is not None
        assert float((a.double() - b).abs().max()) < 1e-4 * max(float(b.abs().max()), 1e-3)


def _check(out: torch.Tensor, expected: torch.Tensor, mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """To 2 % of the largest; with a window of one token the gradients of q and k are 0, and rounded to about 2e-6."""
    for a, b in [(out, expected), *((a.grad, b.grad) for a, b in zip(mine, theirs, strict=True))]:
        assert a is not None and b is not None
        assert float((a.float() - b).abs().max()) < 2e-2 * max(float(b.abs().max()), 1e-3)
