"""Attention of vLLM's CPU workers with exact/attention.py: keys and values are gathered from the paged cache block by block."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from exact import attention


class ExactBackend(CPUAttentionBackend):  # type: ignore[misc] # mypy does not follow vLLM
    """vLLM's, with another implementation; the cache is [blocks, KV heads, block size, keys and values]."""

    @staticmethod
    def get_impl_cls() -> type[ExactImpl]:
        return ExactImpl


class ExactImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        has_more = self.sliding_window != -1 or self.alibi_slopes is not None or self.sinks is not None or self.logits_soft_cap
        assert not has_more, "models with such attention are refused before"

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        slots, size = slot_mapping.long(), kv_cache.shape[2]
        kv_cache[slots // size, :, slots % size] = torch.cat([key, value], -1)[: len(slots)]

    def forward(  # noqa: PLR0913, PLR0917 # vLLM's
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:  # a pass that measures memory
            return output
        count, size, tables = attn_metadata.num_actual_tokens, kv_cache.shape[2], attn_metadata.block_table

        def fetch(sequences: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            blocks = tables[sequences[:, None], positions // size].long()
            keys, values = kv_cache[blocks, :, positions % size].chunk(2, -1)
            return keys, values

        found = attention.attend(
            query[:count].view(count, self.num_heads, self.head_size),
            attn_metadata.query_start_loc.tolist(),
            attn_metadata.seq_lens.tolist(),
            fetch,
            self.num_kv_heads,
            self.scale,
        )
        output[:count].view(found.shape).copy_(found)
        return output
