"""Causal attention over packed sequences on a GPU, in 16 bits: FlashAttention 3, or cuDNN and torch's varlen_attn by length.

FlashAttention 3, where it is installed and right for the model's heads, runs under varlen_attn, whatever the lengths: torch has
a switch for it. It is 1.1 to 2.1 times as fast as the other two, which are otherwise chosen by length (docs/benchmarks.md).

On an H200, with 16 heads of 128 on 2 KV heads and 32 768 tokens, cuDNN 9.19 reaches 627 TFLOP/s forward and 463 backward,
FlashAttention 2 under varlen_attn 347 and 252. cuDNN takes one length per call and plans each new shape, so that sequences are
padded at their end, where the causal mask leaves the added positions out. Neither wants K and V repeated for grouped queries.
Windows go through varlen_attn, which skips what lies outside of them: scaled_dot_product_attention has none for cuDNN. So do
heads above 128, which cuDNN takes in some versions and on some devices only.
"""

from __future__ import annotations

import inspect
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F

from engine.runtime import device
from engine.attention import windows
from engine.batch.packed import PackedSequences, offsets


LONG = 8192  # tokens from which a sequence has a call of its own
WIDEST = 128  # elements of a head that cuDNN takes everywhere
MULTIPLE = 1024  # of tokens, to which those are padded: a few shapes only, each planned once
FA3, FLASH_ATTENTION_3 = "FA3", "FlashAttention 3"  # for torch, and in the log
HOPPER = 9  # the major number of its compute capability
PROBE_LENGTHS, PROBE_WINDOW = (5, 40, 19), 16  # tokens of the sequences and of the window, if there is one, that it is tried with


def choose(kernels: str, config: Any) -> str:
    """Put FlashAttention 3 under varlen_attn in this process where `engine.kernels` and the machine allow it, else take it away.

    Tried with the model's heads, with a window where one of its layers has one, forward and backward, against torch's own.
    `config`: a TransformerConfig.

    Returns:
        What attention runs on, and why not FlashAttention 3, for the log.
    """
    from torch.nn import attention

    if uses_flash_attention_3():
        attention.restore_flash_attention_impl()
    if not device.has_cuda() or config.params_dtype is torch.float32:
        return "torch"
    reason = "not chosen" if kernels == "torch" else _why_not_flash_attention_3(config)
    return f"torch and cuDNN ({FLASH_ATTENTION_3}: {reason})" if reason else FLASH_ATTENTION_3


def uses_flash_attention_3() -> bool:
    """Whether varlen_attn runs on FlashAttention 3 in this process."""
    from torch.nn import attention

    return getattr(attention, "current_flash_attention_impl", lambda: None)() == FA3


def _why_not_flash_attention_3(config: Any) -> str:
    """Empty: it is in place."""
    from torch.nn import attention

    if find_spec("flash_attn_interface") is None:
        return "not installed"
    if torch.cuda.get_device_capability()[0] != HOPPER:
        return "made for Hopper GPUs"
    if FA3 not in getattr(attention, "list_flash_attention_impls", list)():
        return f"torch {torch.__version__} has no switch for it"
    layer_windows = {min(windows.layer_window(config, number + 1), PROBE_WINDOW) for number in range(config.num_layers)}
    expected = [_probe(config, window) for window in layer_windows]
    try:
        attention.activate_flash_attention_impl(FA3)
        found = [_probe(config, window) for window in layer_windows]
        pairs = [pair for one, other in zip(found, expected, strict=True) for pair in zip(one, other, strict=True)]
        if all(torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.05) for a, b in pairs):
            return ""
        reason = "computes other values than torch here"
    except Exception as error:  # noqa: BLE001 - what an extension raises that was built for other heads or versions
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    attention.restore_flash_attention_impl(_raise_warn=False)
    return reason


def _probe(config: Any, window: int) -> list[torch.Tensor]:
    """Values and gradients of q, k and v for random bf16 tokens in heads of the model's."""
    is_latent = config.multi_latent_attention
    size = config.qk_head_dim + config.qk_pos_emb_head_dim if is_latent else config.kv_channels
    groups = 1 if is_latent else config.num_attention_heads // config.num_query_groups
    where = device.compute_device()
    generator = torch.Generator(where).manual_seed(0)
    q, k, v, seed = (
        torch.randn(sum(PROBE_LENGTHS), heads, size, generator=generator, device=where).bfloat16().requires_grad_()
        for heads in (groups, 1, 1, groups)
    )
    ends, longest = offsets(list(PROBE_LENGTHS), where), max(PROBE_LENGTHS)
    out = attend_prefixes(q, k, v, (ends, ends), (longest, longest), None, window)
    return [out, *torch.autograd.grad(out, [q, k, v], seed)]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSequences, scale: float | None, window: int = 0
) -> torch.Tensor:
    """query [T, heads, dim], key [T, groups, dim] and value [T, groups, dim or fewer] to [T, heads, value's dim].

    `window`: see engine/attention/windows.py:layer_window.
    """
    if missing := query.shape[-1] - value.shape[-1]:  # the kernels take one dim
        whole = attend(query, key, F.pad(value, (0, missing)), packed, scale, window)
        return whole[..., : value.shape[-1]]
    lengths, value = packed.lengths, value.contiguous()  # a view would keep the whole of what q, k and v are split from
    ends, longest = packed.cu_seqlens_q, max(lengths)
    if uses_flash_attention_3() or longest < LONG or query.shape[-1] > WIDEST or 0 < window < longest:
        return attend_prefixes(query, key, value, (ends, ends), (longest, longest), scale, window)
    pieces, start = [], 0
    for is_long, run in groupby(lengths, lambda length: length >= LONG):
        members = list(run)
        for part in [[length] for length in members] if is_long else [members]:
            q, k, v = (x[start : start + sum(part)] for x in (query, key, value))
            if is_long:
                pieces.append(_alone(q, k, v, scale))
            else:
                ends = offsets(part, q.device)
                pieces.append(attend_prefixes(q, k, v, (ends, ends), (max(part), max(part)), scale))
            start += sum(part)
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    """One sequence."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    num_tokens, padding = len(query), -len(query) % MULTIPLE
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, padding)) if padding else x for x in (query, key, value))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)[:num_tokens]


@cache
def _grouped_queries() -> dict[str, Any]:
    """The option of varlen_attn for fewer heads of K and V; torch 2.11 needs none."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def attend_prefixes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    scale: float | None,
    window: int = 0,
) -> torch.Tensor:
    """varlen_attn where the queries of a sequence are its last tokens, and the keys all up to them.

    `ends`, `longest`: `offsets` of the queries and of the keys, and the most tokens of a sequence of either.
    """
    from torch.nn.attention.varlen import varlen_attn

    if missing := query.shape[-1] - value.shape[-1]:
        whole = attend_prefixes(query, key, F.pad(value, (0, missing)), ends, longest, scale, window)
        return whole[..., : value.shape[-1]]
    before = window - 1 if 0 < window < longest[1] else -1  # tokens before the query's own; -1: all
    options = {"scale": scale, "window_size": (before, 0), **_grouped_queries()}
    out = varlen_attn(query, key, value, *ends, *longest, **options)
    assert isinstance(out, torch.Tensor)
    return out
