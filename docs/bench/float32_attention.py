"""Attention in float32 on a GPU, forward and backward, as engine/attention/dense.py has it and as torch has it with fewer heads of keys.

python docs/bench/float32_attention.py    # a line each: batch, heads, heads of keys, tokens, size; MB that wait for the backward pass
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F

from engine.attention import dense

SHAPES = ((1, 16, 2, 1024, 128), (8, 9, 3, 128, 64), (1, 16, 2, 8192, 128), (64, 9, 3, 512, 64))
ROUNDS = 4  # of which the last counts


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)


def main() -> None:
    torch.manual_seed(0)
    for batch, heads, groups, tokens, size in SHAPES:
        for name, attend in (("torch", plain), ("dense.py", dense.attend)):
            query, key, value = (
                torch.randn(batch, each, tokens, size, device="cuda", requires_grad=True) for each in (heads, groups, groups)
            )
            for _ in range(ROUNDS):
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before, begin = torch.cuda.memory_allocated(), time.perf_counter()
                out = attend(query, key, value, None)
                held = torch.cuda.memory_allocated() - before
                out.sum().backward()
                torch.cuda.synchronize()
                seconds = time.perf_counter() - begin
                query.grad = key.grad = value.grad = out = None
            peak = torch.cuda.max_memory_allocated() - before
            print(f"{name:<9} {(batch, heads, groups, tokens, size)}: {held / 1e6:.1f} MB held, {peak / 1e6:.1f} at most, {seconds * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
