"""Memory in use, as a run logs it; on a GPU also that batches of other lengths find room in what is there."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from engine.runtime import memory

VARIED = """
import torch
from engine.runtime import memory
memory.enable_expandable_segments()
for step in range(40):
    tensors = [torch.empty((500 + 13 * step + 7 * index) * 2**20, dtype=torch.uint8, device="cuda") for index in range(4)]
    del tensors
print(memory.memory_metrics()["memory/tensors_peak_bytes"], torch.cuda.memory_reserved())
"""

HOLES = """
import torch
from engine.runtime import memory
for number in (100, 800):
    tensors = [torch.ones(2**18) for _ in range(2 * number)][::2]
    before = memory.memory_metrics()["memory/host_bytes"]
    memory.return_free_memory()
    print(round((before - memory.memory_metrics()["memory/host_bytes"]) / 2**20))
"""


@pytest.mark.parametrize("more", ["", ":glibc.malloc.trim_threshold=100000000000"])
def test_many_holes_of_the_heap_go_back_to_the_kernel_and_few_stay(more: str) -> None:
    """Of 1 MiB each, between tensors that live on; all stay where the user says when malloc gives back."""
    own = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4194304" + more, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", HOLES], env=own, capture_output=True, text=True, check=True)
    few, many = map(int, done.stdout.split())
    assert abs(few) < 20 and (abs(many) < 20 if more else many > 600), done.stdout


def test_host_memory_follows_what_is_touched() -> None:
    size = 64 * 2**20
    with mmap.mmap(-1, size) as held:  # pages of its own: malloc could hand out again what earlier tests had touched
        before = memory.memory_metrics()["memory/host_bytes"]
        held.write(b"\1" * size)
        assert memory.memory_metrics()["memory/host_bytes"] - before > 0.9 * size


@pytest.fixture
def allocator() -> Iterator[Callable[[], str]]:
    """What torch's allocator is set to, also in a build without CUDA."""
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        pytest.skip("torch 2.11 does not say how its allocator is set; on a GPU the next test shows it")
    before = torch._C._accelerator_getAllocatorSettings()
    yield torch._C._accelerator_getAllocatorSettings
    torch._C._accelerator_setAllocatorSettings(before)


@pytest.mark.parametrize("name", memory.ENVIRONMENT)
@pytest.mark.parametrize("own", ["", "garbage_collection_threshold:0.8"])
def test_blocks_grow_unless_the_user_has_settings(
    name: str, own: str, allocator: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = allocator()
    monkeypatch.setattr(memory, "has_cuda", lambda: True)
    for other in memory.ENVIRONMENT:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, own)
    memory.enable_expandable_segments()
    assert allocator() == (before if own else "expandable_segments:True")


@pytest.mark.gpu
def test_other_lengths_each_step_leave_no_unused_blocks() -> None:
    own = {name: value for name, value in os.environ.items() if name not in memory.ENVIRONMENT}
    done = subprocess.run([sys.executable, "-c", VARIED], capture_output=True, text=True, timeout=800, check=False, env=own)
    assert done.returncode == 0, done.stderr
    peak, reserved = map(float, done.stdout.split())
    assert reserved < 1.2 * peak
