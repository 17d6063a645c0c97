"""Proof that bytes arrived whole: a 64-bit digest of them, on any device, and those of the buckets of a pass.

On CUDA one kernel reads a bucket (digest_kernel.py). Leaves out who compares (transport/, publish.py).

    digest_tensor(torch.zeros(3)) == digest_bytes(torch.zeros(12, dtype=torch.uint8))
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    pass

MASK = 2**64 - 1
CHUNK_WORDS = 32768  # 256 KiB: chunk and scratch stay in a core's cache
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
    the chunks joined by Horner's rule, all modulo 2**64; bytes after the last whole word are a chunk of their own, of one
    word. Any one changed byte changes it, since every step is one to one for that change; other changes, exchanged words
    among them, escape with a chance of about 2**-64. It finds faults, it does not stop forgers.
    """
    num_bytes = data.numel()
    if data.is_cuda:
        return (_joined_on_cuda(data) + num_bytes * LENGTH_FACTOR) & MASK
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


class BucketDigests:
    """The digests of the buckets of a pass, in their order; on CUDA beside what else the device does.

    There each bucket is one kernel on a stream of its own, and the sums are joined once, at the end.
    """

    def __init__(self, num_buckets: int, bucket_bytes: int, device: torch.device) -> None:
        """`num_buckets` and `bucket_bytes`: the most that a pass has, and that a bucket holds."""
        self._device = device
        self._sizes: list[int] = []
        self._on_cpu: list[int] = []
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._sums = torch.zeros(num_buckets, _num_sums(bucket_bytes), dtype=torch.int64, device=device)
            self._weights: tuple[list[int], torch.Tensor, torch.Tensor] | None = None
            _multipliers(device)

    def take(self, data: torch.Tensor, after: Any = None) -> Any:
        """Of the next bucket, `data` [n] uint8, which starts at a multiple of 8 bytes.

        On CUDA: after the event `after`; gives the event after which the memory may change. Elsewhere it is done: None.
        """
        self._sizes.append(data.numel())
        if self._stream is None:
            self._on_cpu.append(_signed(digest_bytes(data)))
            return None
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            _sums_on_cuda(data, self._sums[len(self._sizes) - 1])
            return self._stream.record_event()

    def join(self) -> torch.Tensor:
        """All since the last call, int64 [buckets] in two's complement; on CUDA queued on the current stream."""
        sizes, self._sizes = self._sizes, []
        if self._stream is None:
            values, self._on_cpu = self._on_cpu, []
            return torch.tensor(values, dtype=torch.int64)
        powers, lengths = self._weights_for(sizes)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        digests = (self._sums[: len(sizes)] * powers).sum(1) + lengths
        self._stream.wait_stream(current)  # the next pass writes where this reads
        return digests

    def _weights_for(self, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The power that each sum is multiplied with [buckets, sums], 0 for those of other passes, and what lengths add."""
        if self._weights is None or self._weights[0] != sizes:
            powers = torch.zeros_like(self._sums[: len(sizes)])
            for row, size in zip(powers, sizes, strict=True):
                row[: _num_sums(size)] = _powers(self._device, _num_sums(size))
            lengths = [_signed(size * LENGTH_FACTOR & MASK) for size in sizes]
            self._weights = sizes, powers, torch.tensor(lengths, dtype=torch.int64, device=self._device)
        return self._weights[1:]


def _num_sums(num_bytes: int) -> int:
    """How many a digest of so many bytes is joined from: one a chunk, one for what is no whole word."""
    return -(-(num_bytes // 8) // CHUNK_WORDS) + 1


def _sums_on_cuda(data: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    from bridge.digest_kernel import chunk_sums

    return chunk_sums(data, _multipliers(data.device), sums)


def _joined_on_cuda(data: torch.Tensor) -> int:
    aligned = data if data.data_ptr() % 8 == 0 else data.clone()
    sums = _sums_on_cuda(aligned, torch.empty(_num_sums(data.numel()), dtype=torch.int64, device=data.device))
    return int((sums * _powers(data.device, sums.numel())).sum())


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
