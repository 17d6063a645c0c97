"""A tensor's memory as numpy's numbers: of any dtype, written in place, and its storage may be resized afterwards.

python -m pytest tests/bridge/layout/test_words.py
"""

from __future__ import annotations

import pytest
import torch

from bridge.layout.words import words


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64])
def test_elements_are_numbers_of_their_width_in_the_same_memory(dtype: torch.dtype) -> None:
    storage = torch.arange(7 * dtype.itemsize, dtype=torch.uint8) % 2
    tensor = storage[dtype.itemsize :].view(dtype).view(2, 3)
    found = words(tensor)
    assert found.shape == (6,) and found.itemsize == dtype.itemsize
    assert found.tobytes() == bytes(storage[dtype.itemsize :].tolist())
    found[5] = 0
    assert not storage[6 * dtype.itemsize :].any() and storage[: 6 * dtype.itemsize].any()


def test_a_tensor_of_nothing_and_one_of_a_single_element() -> None:
    assert words(torch.empty(0, 3)).shape == (0,) and words(torch.tensor(1.0)).tolist() == [0x3F800000]


def test_numbers_outlive_the_name_of_their_tensor() -> None:
    found = words(torch.full((100_000,), 7, dtype=torch.int32))
    torch.zeros(100_000, dtype=torch.int32)  # would take the memory
    assert (found == 7).all()


def test_the_storage_may_still_be_resized() -> None:
    """As those of Megatron-FSDP are."""
    parameter = torch.nn.Parameter(torch.ones(100_000))
    words(parameter)
    parameter.untyped_storage().resize_(0)
