"""Digests: which changes of bytes they tell, on which machines and views they are the same, and what they leave as it was.

python -m pytest tests/bridge/layout/test_digest.py
"""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.layout.digest import (
    CHUNK_FACTOR,
    CHUNK_WORDS,
    LENGTH_FACTOR,
    digest_bytes,
    digest_tensor,
    digest_value,
    multipliers,
)
from bridge.layout.splitmix import FOLD_FACTOR


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=200), st.data())
def test_any_changed_byte_changes_the_digest(raw, data) -> None:
    tensor = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    where = data.draw(st.integers(0, len(raw) - 1))
    change = data.draw(st.integers(1, 255))
    changed = tensor.clone()
    changed[where] ^= change
    assert digest_bytes(changed) != digest_bytes(tensor)


@settings(deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=20), st.data())
def test_exchanged_words_change_the_digest(words, data) -> None:
    i, j = data.draw(st.tuples(*[st.integers(0, len(words) - 1)] * 2))
    swapped = list(words)
    swapped[i], swapped[j] = words[j], words[i]
    same = digest_tensor(torch.tensor(swapped)) == digest_tensor(torch.tensor(words))
    assert same == (words[i] == words[j])


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 3 * CHUNK_WORDS - 1), st.integers(0, 3 * CHUNK_WORDS - 1), st.sampled_from([0, 16, 31, 47, 63]))
def test_exchanged_words_of_distant_chunks(i, j, bit) -> None:
    words = torch.zeros(3 * CHUNK_WORDS, dtype=torch.int64)
    words[i] = -(2**63) if bit == 63 else 1 << bit
    swapped = words.clone()
    swapped[i], swapped[j] = words[j].clone(), words[i].clone()
    assert (digest_tensor(words) == digest_tensor(swapped)) == (i == j)


def test_signs_that_flip_change_the_digest() -> None:
    """Of all numbers, and of those of any two words: highest bits alone, which multiplying moves out of a word."""
    tensor = torch.randn(128, generator=torch.Generator().manual_seed(0))
    seen = {digest_tensor(tensor), digest_tensor(-tensor)}
    pairs = list(itertools.combinations(range(64), 2))
    for first, second in pairs:
        for halves in (slice(0, 2), slice(1, 2), slice(0, 1)):
            signs = torch.ones(64, 2)
            signs[[first, second], halves] = -1
            seen.add(digest_tensor(tensor * signs.flatten()))
    assert len(seen) == 2 + 3 * len(pairs)


def test_digest_of_lengths_views_and_zero_signs() -> None:
    assert len({digest_bytes(torch.zeros(n, dtype=torch.uint8)) for n in range(40)}) == 40
    base = torch.arange(100, dtype=torch.uint8)
    assert digest_bytes(base[3:90]) == digest_bytes(base[3:90].clone())
    strided = torch.randn(6, 8).t()
    assert digest_tensor(strided) == digest_tensor(strided.contiguous())
    assert digest_value(torch.tensor([-0.0, 1.0])) == digest_value(torch.tensor([0.0, 1.0]))
    assert digest_value(torch.tensor([-1.0])) != digest_value(torch.tensor([1.0]))


def test_a_digested_tensor_may_still_be_resized() -> None:
    """As those of Megatron-FSDP are."""
    tensor = torch.ones(100_000)
    digest_tensor(tensor)
    tensor.untyped_storage().resize_(0)


def test_digest_is_the_same_in_every_process() -> None:
    assert digest_bytes(torch.arange(256, dtype=torch.uint8)) == 17211503475680537088


def test_digest_is_what_its_definition_says() -> None:
    raw = torch.randint(0, 256, (8 * CHUNK_WORDS + 83,), dtype=torch.uint8)
    padded = bytes(raw.tolist()) + bytes(5)
    total, numbers = len(raw) * LENGTH_FACTOR, multipliers(raw.device).tolist()
    for index in range(len(padded) // 8):
        word = int.from_bytes(padded[8 * index : 8 * index + 8], "little", signed=True)
        total += (word + FOLD_FACTOR * (word >> 32)) * numbers[index % CHUNK_WORDS] * CHUNK_FACTOR ** (index // CHUNK_WORDS)
    assert digest_bytes(raw) == total % 2**64
