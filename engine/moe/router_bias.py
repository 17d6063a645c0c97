"""The routers' biases: added to the scores of experts for the choice, not for the weights (DeepSeek-V3, arXiv:2412.19437).

They are buffers in float32 without gradients, the same on all ranks that have the layer: frozen, or moved after each step
towards an even load (arXiv:2408.15664). Leaves out how a router chooses (router.py).
Source: megatron-core 0.16.1 transformer/moe/router.py, moe_utils.py:get_updated_expert_bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from engine.runtime.megatron import get_updated_expert_bias
from engine.moe.router import Router


def named(chunk: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """(local name, float32 [experts]) of each layer of a chunk that has one."""
    return [(f"{name}.expert_bias", router.expert_bias) for name, router in _biased(chunk)]


def leave_to_engine(config: Any) -> None:
    """Let only `update` change the biases of models with this TransformerConfig.

    megatron-core would move them before the optimizer's step (finalize_model_grads.py:476), which may be skipped.
    """
    config.moe_router_enable_expert_bias = False


def update(chunks: Sequence[torch.nn.Module], rate: float) -> None:
    """End a step: `rate` up for experts with fewer tokens than the mean, over all ranks, and down for others. Collective."""
    routers = [router for chunk in chunks for _, router in _biased(chunk)]
    if rate and routers:
        biases = torch.stack([router.expert_bias for router in routers])
        counts = torch.zeros_like(biases, dtype=torch.float64)
        for row, router in zip(counts, routers, strict=True):
            row += router.num_tokens
        for router, moved in zip(routers, get_updated_expert_bias(counts, biases, rate), strict=True):
            router.expert_bias.copy_(moved)
    for router in routers:
        router.num_tokens = 0


def _biased(chunk: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in chunk.named_modules():
        if isinstance(module, Router) and module.expert_bias is not None:
            yield name, module
