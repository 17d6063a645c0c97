"""The device that this rank computes on. How megatron-core runs where there is no CUDA: fake_cuda.py."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")
torch_compile = torch.compile


def has_cuda() -> bool:
    return torch.cuda.is_available()


def compute_device() -> torch.device:
    """The device that this rank's tensors live on."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else CPU


def compiles() -> bool:
    """Whether torch.compile does anything here."""
    return os.environ.get("TORCHDYNAMO_DISABLE") != "1" and not torch._dynamo.config.disable


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile at the first call: importing the compiler takes seconds, and a run without fused kernels never calls it."""

    @functools.cache
    def made() -> Callable[..., Any]:
        return function if os.environ.get("TORCHDYNAMO_DISABLE") == "1" else torch.compile(function)

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():  # it is part of a caller's kernel
            return function(*given, **named)
        return made()(*given, **named)

    return call


def compiled_late(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Replaces torch.compile while other packages are imported: `compiled`, where there are no options."""
    return torch_compile(function, **options) if function is None or options else compiled(function)


def synchronize() -> None:
    if has_cuda():
        torch.cuda.synchronize()
