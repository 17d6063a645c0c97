"""torch.compile at the first call."""

from __future__ import annotations

import functools

import pytest
import torch

from engine.runtime import device


def test_what_is_compiled_late_is_one_kernel_with_what_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As megatron-core's weighted_swiglu with its swiglu."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager", fullgraph=True))
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)

    @device.compiled
    def gated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return torch.nn.functional.silu(first) * second

    @device.compiled
    def weighted(x: torch.Tensor, *, weights: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = gated(x) * weights
        return result

    x, weights = torch.randn(4, 8), torch.randn(4, 1)
    expected = torch.nn.functional.silu(x[:, :4]) * x[:, 4:]
    torch.testing.assert_close(gated(x), expected)
    torch.testing.assert_close(weighted(x, weights=weights), expected * weights)


def test_megatron_core_decorates_with_it() -> None:
    import engine.runtime.megatron  # noqa: F401 # replaces it
    import megatron.core.jit

    assert megatron.core.jit.jit_fuser is device.compiled_late


def test_options_are_those_of_torch() -> None:
    """As a decorator with and without a function; `disable` leaves the function as it is."""
    def double(x: int) -> int:
        return 2 * x

    assert device.compiled_late(double, disable=True)(2) == device.compiled_late(disable=True)(double)(2) == 4
