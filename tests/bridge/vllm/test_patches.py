"""patches.py where vLLM is not needed: what runs in a fork, and whether a process may still be forked for CUDA."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.vllm.serving import patches

CUDA_SUCCESS, CUDA_ERROR_NO_DEVICE = 0, 100


ANSWERS = [(patches.CUDA_ERROR_NOT_INITIALIZED, True), (CUDA_SUCCESS, False), (CUDA_ERROR_NO_DEVICE, False)]


@pytest.mark.parametrize(("answer", "expected"), ANSWERS)
def test_a_process_may_be_forked_until_someone_initialises_the_driver(
    monkeypatch: pytest.MonkeyPatch, answer: int, expected: bool
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuDeviceGetCount=lambda count: answer))
    assert patches.is_cuda_untouched() is expected


def test_without_a_driver_nothing_is_said_to_be_fit_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not patches.is_cuda_untouched()


def test_a_fork_returns_what_was_found_and_leaves_this_process_as_it_was() -> None:
    seen = []

    def look() -> int:
        seen.append(os.getpid())
        return os.getpid()

    assert patches.run_in_fork(look) != os.getpid()
    assert seen == []


def test_what_goes_wrong_in_a_fork_is_reported() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        patches.run_in_fork(lambda: 1 // 0)
    with pytest.raises(RuntimeError, match="ended without an answer"):
        patches.run_in_fork(lambda: os._exit(3))
