"""States of all random generators of this rank, as tensors and numbers, so that a file of them holds no pickled objects.

`run.deterministic`: settings of torch, cuBLAS and NCCL, made before anything uses a GPU, so that equal runs on equal machines
have equal bits. Leaves out refused settings (megasync/checks/exact.py), and vLLM's batches (bridge/vllm/).
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from engine.runtime.megatron import tensor_parallel

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # else torch refuses matrix products (docs of use_deterministic_algorithms)
    "NCCL_ALGO": "Ring",  # of one algorithm and protocol sums have one order
    "NCCL_PROTO": "Simple",
    "NCCL_NVLS_ENABLE": "0",  # NVLink's switches add in an order of theirs
    "NCCL_COLLNET_ENABLE": "0",
}


def random_state() -> dict[str, Any]:
    """Python's, numpy's, torch's (CPU and CUDA), and megatron-core's for tensor-parallel ranks."""
    numpy_state: Any = np.random.get_state()
    name, keys, *numbers = numpy_state
    return {
        "random": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *numbers),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Go on from what `random_state` gave."""
    random.setstate(state["random"])
    name, keys, *numbers = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), *numbers))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"].cpu())
    tensor_parallel.get_cuda_rng_tracker().set_states({k: v.cpu() for k, v in state["tracker"].items()})


@contextmanager
def unchanged_random_state() -> Iterator[None]:
    """Restores the random states after the block."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def derive_random_state(seed: int) -> None:
    """Seed all of them, for every rank by its place in the layout, as at a run's start."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def use_deterministic() -> None:
    """Make this process deterministic. An operation without a deterministic kernel raises a RuntimeError that names it."""
    if torch.cuda.is_available():
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)  # flash attention's backward pass reads it, too
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # it costs time, and nothing reads it
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
