"""`run.deterministic`: what torch, cuBLAS and NCCL are told, so that equal runs on machines of one kind have equal bits.

Before anything uses a GPU. Leaves out what is refused (megasync/checks/exact.py), and vLLM's batches (bridge/vllm/).
"""

from __future__ import annotations

import os

import torch

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # else torch refuses matrix products (docs of use_deterministic_algorithms)
    "NCCL_ALGO": "Ring",  # of one algorithm and protocol sums have one order
    "NCCL_PROTO": "Simple",
    "NCCL_NVLS_ENABLE": "0",  # NVLink's switches add in an order of theirs
    "NCCL_COLLNET_ENABLE": "0",
}


def use_deterministic() -> None:
    """Of this process. An operation that has no deterministic kernel raises RuntimeError, which names it."""
    if torch.cuda.is_available():
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)  # flash attention's backward pass reads it, too
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # it costs time, and nothing reads it
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
