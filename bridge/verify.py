"""Proof that weights arrived whole: the 64-bit digest of bytes, and full tensors rebuilt from what workers hold.

Leaves out how a worker finds its parameters (vllm_readback.py) and who compares (publish.py).

    digest_tensor(torch.zeros(3)) == digest_bytes(torch.zeros(12, dtype=torch.uint8))
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

MASK = 2**64 - 1
CHUNK_WORDS = 32768  # 256 KiB: chunk and scratch stay in a core's cache
SLAB_CHUNKS = 64  # 16 MiB: what is computed on the way stays in a GPU's second-level cache
CHUNK_FACTOR = 0x9E3779B97F4A7C15  # odd; 2**64 over the golden ratio
LENGTH_FACTOR = 0xD6E8FEB86659FD93  # odd


@lru_cache(maxsize=4)
def _multipliers(device: torch.device) -> torch.Tensor:
    """One odd 64-bit number a position in a chunk, the same on every machine; the low 17 bits are all different.

    splitmix64 (Steele, Lea, Flood, OOPSLA 2014) in Python, so that they depend on no library's generator.
    """
    state, values = 0, []
    for position in range(CHUNK_WORDS):
        state = (state + CHUNK_FACTOR) & MASK
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        value = (z ^ (z >> 31)) & ~0x1FFFF | (2 * position + 1)
        values.append(_signed(value))
    return torch.tensor(values, dtype=torch.int64, device=device)


def digest_bytes(data: torch.Tensor) -> int:
    """A position-sensitive 64-bit digest of `data` [n], uint8 and contiguous, on any device.

    Words x are mixed to x + (x >> 32), multiplied by their position's odd number, summed over a chunk of 256 KiB, and
    the chunks joined by Horner's rule, all modulo 2**64. Any one changed byte changes it, since every step is one to
    one for that change; other changes, exchanged words among them, escape with a chance of about 2**-64. It finds
    faults, it does not stop forgers.
    """
    if data.device.type != "cpu":
        return int(digest_in_slabs(data)) & MASK
    num_bytes = data.numel()
    whole = num_bytes // 8 * 8
    aligned = data[:whole] if data.storage_offset() % 8 == 0 else data[:whole].clone()
    words = aligned.view(torch.int64)
    if whole < num_bytes:
        tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
        tail[: num_bytes - whole] = data[whole:]
        tail_words = tail.view(torch.int64)
    else:
        tail_words = words[:0]
    sums = [_chunk_sum(words[start : start + CHUNK_WORDS]) for start in range(0, words.numel(), CHUNK_WORDS)]
    sums.append(_chunk_sum(tail_words))
    digest = 0
    for chunk_sum in torch.stack(sums).tolist():
        digest = (digest * CHUNK_FACTOR + chunk_sum) & MASK
    return (digest + num_bytes * LENGTH_FACTOR) & MASK


def digest_on_device(data: torch.Tensor) -> torch.Tensor:
    """digest_bytes as an int64 tensor [] on the device of `data`, in two's complement; on CUDA nothing waits for it."""
    if data.device.type == "cpu":
        return torch.tensor(_signed(digest_bytes(data)), dtype=torch.int64)
    return digest_in_slabs(data)


def digest_in_slabs(data: torch.Tensor) -> torch.Tensor:
    """digest_bytes in few large operations; scratch memory is that of one slab, on CUDA nearly none."""
    num_bytes = data.numel()
    whole = num_bytes // 8 * 8
    words = (data[:whole] if data.storage_offset() % 8 == 0 else data[:whole].clone()).view(torch.int64)
    tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
    tail[: num_bytes - whole] = data[whole:]
    sums = _sums_on_cuda(words) if data.is_cuda else _sums_by_slab(words)
    sums.append(_slab_sums(tail.view(torch.int64)[None, : (num_bytes - whole + 7) // 8]))
    joined = torch.cat(sums)
    return (joined * _powers(data.device, joined.numel())).sum() + _signed(num_bytes * LENGTH_FACTOR & MASK)


def _sums_on_cuda(words: torch.Tensor) -> list[torch.Tensor]:
    from bridge.digest_kernel import chunk_sums

    return [chunk_sums(words, _multipliers(words.device))]


def _sums_by_slab(words: torch.Tensor) -> list[torch.Tensor]:
    num_chunks = words.numel() // CHUNK_WORDS
    chunks, rest = words[: num_chunks * CHUNK_WORDS].view(-1, CHUNK_WORDS), words[num_chunks * CHUNK_WORDS :]
    sums = [_slab_sums(chunks[start : start + SLAB_CHUNKS]) for start in range(0, num_chunks, SLAB_CHUNKS)]
    return [*sums, _slab_sums(rest[None])] if rest.numel() else sums


def _slab_sums(chunks: torch.Tensor) -> torch.Tensor:
    """The sum of each row [rows] of a slab [rows, up to CHUNK_WORDS]."""
    mixed = torch.bitwise_right_shift(chunks, 32)
    mixed.add_(chunks).mul_(_multipliers(chunks.device)[: chunks.shape[1]])
    return mixed.sum(1)


@lru_cache(maxsize=64)
def _powers(device: torch.device, count: int) -> torch.Tensor:
    """CHUNK_FACTOR to the power of count - 1 down to 0, modulo 2**64: Horner's rule as a dot product."""
    values, power = [], 1
    for _ in range(count):
        values.append(_signed(power))
        power = power * CHUNK_FACTOR & MASK
    return torch.tensor(values[::-1], dtype=torch.int64, device=device)


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    return value - 2**64 if value >= 2**63 else value


def _chunk_sum(words: torch.Tensor) -> torch.Tensor:
    mixed = torch.bitwise_right_shift(words, 32)
    mixed.add_(words).mul_(_multipliers(words.device)[: words.numel()])
    return mixed.sum()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes [n] of a tensor, as a view where its memory allows."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def digest_tensor(tensor: torch.Tensor) -> int:
    return digest_bytes(as_bytes(tensor))


def digest_value(tensor: torch.Tensor) -> int:
    """The digest after -0.0 became 0.0: what a read-back through a matrix product can still tell (vllm_readback.py)."""
    return digest_tensor(tensor + 0 if tensor.is_floating_point() else tensor)


Part = tuple[tuple[int, ...], torch.Tensor]  # where a part of a tensor begins in it, one offset a dim, and the part


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of a full tensor: it begins at `offsets`, one a dim; `data` is the bytes of a tensor of `shape`."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    data: bytes

    def to_tensor(self) -> torch.Tensor:
        dtype = getattr(torch, self.dtype)
        flat = torch.frombuffer(bytearray(self.data), dtype=dtype) if self.data else torch.empty(0, dtype=dtype)
        return flat.view(self.shape)


def assemble(shards: Iterable[Shard]) -> dict[str, torch.Tensor]:
    """Full tensors by name from the shards of all workers; replicated shards have to agree bit for bit.

    Raises:
        ValueError: two workers disagree on the same elements, or elements are held by none.
    """
    by_name: dict[str, list[Part]] = {}
    for shard in shards:
        by_name.setdefault(shard.name, []).append((shard.offsets, shard.to_tensor()))
    return {name: assemble_one(name, parts) for name, parts in by_name.items()}


def assemble_one(name: str, parts: list[Part]) -> torch.Tensor:
    """As assemble, from one tensor's parts and where they begin; on their device, and no copy where one is all of it."""
    if len(parts) == 1 and not any(parts[0][0]):
        return parts[0][1]
    first = parts[0][1]
    shape = [max(offsets[dim] + part.shape[dim] for offsets, part in parts) for dim in range(first.ndim)]
    full = torch.empty(shape, dtype=first.dtype, device=first.device)
    filled = torch.zeros(shape, dtype=torch.bool, device=first.device)
    for offsets, part in parts:
        where = tuple(slice(o, o + s) for o, s in zip(offsets, part.shape, strict=True))
        seen = filled[where]
        if not torch.equal(full[where][seen], part[seen]):
            raise ValueError(f"workers of one replica hold different values of {name}")
        full[where] = part
        filled[where] = True
    if not filled.all():
        raise ValueError(f"no worker holds {int((~filled).sum())} of the {filled.numel()} elements of {name}")
    return full
