"""Memory in use, as a run logs it; on a GPU also that batches of other lengths find room in what is there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from engine import memory

VARIED = """
import torch
from engine import memory
memory.let_blocks_grow()
for step in range(40):
    tensors = [torch.empty((500 + 13 * step + 7 * index) * 2**20, dtype=torch.uint8, device="cuda") for index in range(4)]
    del tensors
print(memory.in_use()["memory/tensors_peak_bytes"], torch.cuda.memory_reserved())
"""


def test_host_memory_follows_what_is_touched() -> None:
    before = memory.in_use()["memory/host_bytes"]
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    assert memory.in_use()["memory/host_bytes"] - before > 0.9 * held.numel()


@pytest.mark.parametrize("own", ["", "garbage_collection_threshold:0.8"])
def test_blocks_grow_unless_the_user_has_settings(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is torch's private one, there in 2.11 and 2.13; the call itself is torch's."""
    assert callable(torch._C._accelerator_setAllocatorSettings)  # type: ignore[attr-defined]
    said: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append)
    monkeypatch.setattr(memory, "has_cuda", lambda: True)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", own)
    memory.let_blocks_grow()
    assert said == ([] if own else ["expandable_segments:True"])


@pytest.mark.gpu
def test_other_lengths_each_step_leave_no_unused_blocks() -> None:
    own = {name: value for name, value in os.environ.items() if name not in memory.ENVIRONMENT}
    done = subprocess.run([sys.executable, "-c", VARIED], capture_output=True, text=True, timeout=300, check=False, env=own)
    assert done.returncode == 0, done.stderr
    peak, reserved = map(float, done.stdout.split())
    assert reserved < 1.2 * peak
