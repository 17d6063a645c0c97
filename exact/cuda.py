"""The functions on GPUs, in bfloat16 on Hopper: cuBLASLt that splits no sums, FlashAttention 3 and log-probs as vLLM has them in
its batch-invariant mode and its second model runner, and Triton kernels (kernels.py).

Where cuBLASLt does not split a sum, its terms are added in one order whatever the number of rows, which is how vLLM's mode has
products on these GPUs (0.26, model_executor/layers/batch_invariant.py:915). Attention of whole sequences here and of single
queries over a cache there go through blocks of keys of one size. Both are tried when an engine starts (machine.py).
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F

# as vLLM sets them (batch_invariant.py:921); before the process's first product
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
HOPPER = 9  # first number of the compute capability
FLASH_ATTENTION = 3
# Where no sequence has more queries than 64 by heads that share a key, the kernel takes blocks of keys of another size (seen in
# heads of 64); so it is given a larger maximum.
MANY_QUERIES = 65


def prepare() -> None:
    """Products of this process are not split along the sum from now on."""
    os.environ.update(ENVIRONMENT)
    products: Any = torch.backends.cuda.matmul
    whole = (False, False) if hasattr(products, "allow_bf16_reduced_precision_reduction_split_k") else False
    products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = whole
    torch.backends.cuda.preferred_blas_library(backend="cublaslt")


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., in] times weight [out, in], without a bias."""
    return F.linear(x, weight)


def token_log_probs(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
    """Natural log-probs of `labels` int64 [T] under softmax(logits / temperature), float32 [T]; logits [T, vocabulary].

    As the sampler has them (v1/worker/gpu/sample/sampler.py:apply_sampling_params), which rounds logits / temperature to the
    logits' dtype.
    """
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    if temperature != 1.0:
        logits, request = logits.clone(), torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
        apply_temperature(logits, request, torch.full((1,), temperature, dtype=torch.float32, device=logits.device))
    found: torch.Tensor = compute_token_logprobs(logits, labels[:, None])
    return found.squeeze(1)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: torch.Tensor, longest: int, scale: float
) -> torch.Tensor:
    """Causal attention of whole sequences that lie end to end; no gradients.

    Args:
        query: [T, heads, size].
        key, value: [T, groups, size].
        ends: int32 [sequences + 1], where each sequence begins, and T.
        longest: tokens of the longest.
    """
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    found: torch.Tensor = flash_attn_varlen_func(
        *(query, key, value, max(longest, MANY_QUERIES), ends, longest, ends),
        softmax_scale=scale,
        causal=True,
        num_splits=1,
        fa_version=FLASH_ATTENTION,
    )
    return found


def attend_cached(
    query: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    ends: torch.Tensor,
    lengths: torch.Tensor,
    blocks: torch.Tensor,
    longest: tuple[int, int],
    scale: float,
) -> torch.Tensor:
    """The last queries of sequences over a paged cache, as vLLM calls it (v1/attention/backends/flash_attn.py); to compare with.

    Args:
        query: [T, heads, size].
        cache: keys and values, each [blocks, block size, groups, size].
        ends: int32 [sequences + 1], of the queries.
        lengths: int32 [sequences], of the keys.
        blocks: int32 [sequences, blocks], each sequence's in order.
        longest: most queries and most keys of a sequence.
    """
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    found: torch.Tensor = flash_attn_varlen_func(
        *(query, *cache, max(longest[0], MANY_QUERIES), ends, longest[1]),
        seqused_k=lengths,
        block_table=blocks,
        softmax_scale=scale,
        causal=True,
        num_splits=1,
        fa_version=FLASH_ATTENTION,
    )
    return found


def missing() -> str:
    """The missing requirement of this machine, or ""."""
    if torch.cuda.get_device_capability()[0] != HOPPER:
        return f"{torch.cuda.get_device_name()} is not of the Hopper generation"
    try:
        from vllm.v1.worker.gpu.sample import gumbel, logprob  # noqa: F401
        from vllm.vllm_flash_attn import is_fa_version_supported
    except ImportError as error:
        return f"vLLM's kernels cannot be imported here ({error})"
    return "" if is_fa_version_supported(FLASH_ATTENTION) else "this vLLM has no FlashAttention 3"
