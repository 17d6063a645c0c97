"""A 64-bit digest of bytes, on any device, to check that a bucket arrived as it was sent.

On CUDA a kernel sums (digest_kernel.py), or copies and sums (copy_kernel.py). Leaves out who compares (transport/, publish.py).

    digest_tensor(torch.zeros(3)) == digest_bytes(torch.zeros(12, dtype=torch.uint8))
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from bridge.layout.splitmix import FOLD_FACTOR, GAMMA, splitmix64
from bridge.layout.upload import upload
from bridge.layout.words import words

MASK = 2**64 - 1
CHUNK_WORDS = 4096  # 32 KiB: the multipliers, one a position, stay in a GPU core's cache
TILE_WORDS = 2048  # 16 KiB, a divisor of CHUNK_WORDS: copies.py copies and digests so much at a time
ROWS = 64  # chunks at a time on a CPU: 2 MiB and as much scratch stay in a core's cache, threads seldom wait for Python's lock
CHUNK_FACTOR = GAMMA
LENGTH_FACTOR = 0xD6E8FEB86659FD93  # odd
MIN_POWERS = 1024


@lru_cache(maxsize=4)
def multipliers(device: torch.device) -> torch.Tensor:
    """One odd 64-bit number a position in a chunk, the same on every machine; the low 14 bits are all different."""
    positions = np.arange(CHUNK_WORDS, dtype=np.uint64)
    numbers = splitmix64(positions) & ~np.uint64(0x3FFF) | (positions * np.uint64(2) + np.uint64(1))
    return upload(torch.from_numpy(numbers.view(np.int64)), device)


def powers(device: torch.device, count: int) -> torch.Tensor:
    """The weights of the chunks: powers of CHUNK_FACTOR from 0 on, modulo 2**64, at least `count` of them."""
    size = max(MIN_POWERS, 1 << (count - 1).bit_length())
    return _powers(device, size)


@lru_cache(maxsize=32)
def _powers(device: torch.device, count: int) -> torch.Tensor:
    factors = np.full(count, CHUNK_FACTOR, np.uint64)
    factors[0] = 1
    return upload(torch.from_numpy(np.multiply.accumulate(factors).view(np.int64)), device)


def digest_bytes(data: torch.Tensor) -> int:
    """A position-sensitive 64-bit digest of `data` [n], uint8 and contiguous, on any device.

    Words x, the last filled up with zeros, are mixed to x + FOLD_FACTOR * (x >> 32), whose shift keeps the sign, multiplied by
    their position's odd number and summed over a chunk of 32 KiB; the chunks' sums are weighted with powers of an odd number and
    added, the length as well, all modulo 2**64. The mixed word is H * (FOLD_FACTOR + 2**32) + L, for its halves H and L: any one
    changed byte changes it, since both factors are odd. Other changes escape with a chance of about 2**-64, and of 2**-30 where
    only the highest bits of 32-bit numbers change, as the signs of a float32 tensor. It finds faults, it does not stop forgers.
    """
    return (int(_sum(data)) + data.numel() * LENGTH_FACTOR) & MASK


class BucketDigests:
    """The digests of the buckets of a pass, in order. `finish` computes a bucket's unless copies have added it already.

    On CUDA all is queued on the current stream.
    """

    def __init__(self, num_buckets: int, device: torch.device) -> None:
        """`num_buckets`: the most that a pass has."""
        self._sums = torch.zeros(num_buckets, dtype=torch.int64, device=device)
        self._sizes: list[int] = []
        self._num_accumulated = 0
        self._lengths: tuple[list[int], torch.Tensor] = ([], self._sums[:0])

    def accumulate(self, num_bytes: int) -> torch.Tensor:
        """The sum, int64 [], to which a copy of `num_bytes` of the current bucket adds; gaps between tensors have to be zero."""
        self._num_accumulated += num_bytes
        return self._sums[len(self._sizes)]

    def finish(self, data: torch.Tensor) -> None:
        """The current bucket is over, `data` [n] uint8 are its bytes."""
        if self._num_accumulated != data.numel():
            self._sums[len(self._sizes)] = _sum(data)
        self._sizes.append(data.numel())
        self._num_accumulated = 0

    def join(self) -> torch.Tensor:
        """All since the last call, int64 [buckets] in two's complement."""
        sizes, self._sizes = self._sizes, []
        if self._lengths[0] != sizes:
            lengths = np.array(sizes, np.uint64) * np.uint64(LENGTH_FACTOR)
            self._lengths = sizes, upload(torch.from_numpy(lengths.view(np.int64)), self._sums.device)
        digests = self._sums[: len(sizes)] + self._lengths[1]
        self._sums.zero_()
        return digests


def _sum(data: torch.Tensor) -> torch.Tensor:
    """The digest without the length's share, int64 [] on the device of `data`."""
    return _sum_on_cuda(data) if data.is_cuda else _sum_on_cpu(data)


def _sum_on_cuda(data: torch.Tensor) -> torch.Tensor:
    from bridge.layout.digest_kernel import add_digest

    aligned = data if data.data_ptr() % 8 == 0 else data.clone()
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    num_chunks = data.numel() // (8 * CHUNK_WORDS) + 1
    add_digest(aligned, multipliers(data.device), powers(data.device, num_chunks), total)
    return total


def _sum_on_cpu(data: torch.Tensor) -> torch.Tensor:
    num_words = data.numel() // 8
    whole = data[: num_words * 8]
    numbers = words((whole if data.storage_offset() % 8 == 0 else whole.clone()).view(torch.int64)).view(np.int64)
    num_chunks = num_words // CHUNK_WORDS
    chunks = numbers[: num_chunks * CHUNK_WORDS].reshape(-1, CHUNK_WORDS)
    last = torch.zeros(num_words % CHUNK_WORDS + 1, dtype=torch.int64)  # and the bytes after the last whole word
    last[:-1].numpy()[:] = numbers[num_chunks * CHUNK_WORDS :]
    last[-1:].view(torch.uint8)[: data.numel() - num_words * 8] = data[num_words * 8 :]
    sums = [_chunk_sums(chunks[start : start + ROWS]) for start in range(0, num_chunks, ROWS)]
    joined = np.concatenate([*sums, _chunk_sums(last[None].numpy())])
    return torch.from_numpy(joined * powers(data.device, len(joined))[: len(joined)].numpy()).sum()


def _chunk_sums(chunks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """int64 [rows] of chunks [rows, up to CHUNK_WORDS]. By numpy, which leaves Python's lock alone, and takes one core."""
    factors = multipliers(torch.device("cpu")).numpy()[: chunks.shape[1]]
    low, high = (np.einsum("ij,j->i", each, factors) for each in (chunks, chunks >> 32))
    sums: npt.NDArray[np.int64] = low + np.int64(FOLD_FACTOR) * high
    return sums


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes [n] of a tensor, as a view where its memory allows."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def digest_tensor(tensor: torch.Tensor) -> int:
    return digest_bytes(as_bytes(tensor))


def digest_value(tensor: torch.Tensor) -> int:
    """The digest after -0.0 became 0.0, which a read-back through a matrix product cannot tell apart (vllm/weights/readback.py).

    Numbers of one byte are read as they are.
    """
    return digest_tensor(tensor + 0 if tensor.is_floating_point() and tensor.element_size() > 1 else tensor)
