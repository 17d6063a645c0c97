"""Attention of vLLM's GPU workers: its FlashAttention backend, given more queries than it has where there are few.

Its kernel takes blocks of keys of another size for few queries, and so adds in another order (exact/cuda.py:MANY_QUERIES).
"""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionMetadataBuilder

from exact.cuda import MANY_QUERIES


class ExactFlashBackend(FlashAttentionBackend):  # type: ignore[misc] # mypy does not follow vLLM
    @staticmethod
    def get_builder_cls() -> type[ExactBuilder]:
        return ExactBuilder


class ExactBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]
    def build(self, *args: Any, **kwargs: Any) -> Any:
        metadata = super().build(*args, **kwargs)
        metadata.max_query_len = max(metadata.max_query_len, MANY_QUERIES)
        return metadata
