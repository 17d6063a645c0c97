"""What changed in a tensor from one version to the next, as few bytes; and the tensor again out of it, bit for bit.

Elements are whole numbers of their width here, so that NaN and -0.0 are values like others. Of what changed the difference of
these numbers is kept, which between bf16 weights of two steps is mostly 1 or -1; where few changed, with the gaps between their
places. Bytes lie by significance, low ones first, and are compressed with zstd. Pure functions, on the CPU.

    encoding, data = encode(new, old)       # "same", "sparse" or "dense"
    apply(old, encoding, data)              # old becomes new
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

ENCODINGS = ("same", "sparse", "dense")
SPARSE_BELOW = 0.25  # of the elements changed
LEVEL = 1  # of zstd: higher ones save little on such bytes
HEADER = struct.Struct("<QBQQ")  # number of changed elements, bytes of a gap, compressed bytes of gaps and of differences

Words = npt.NDArray[np.unsignedinteger]


class DamagedError(ValueError):
    """Bytes that no `encode` has made for this tensor."""


def encode(new: torch.Tensor, old: torch.Tensor) -> tuple[str, bytes]:
    """Both contiguous, of the same dtype and shape."""
    after, before = words(new), words(old)
    changed = np.flatnonzero(after != before)
    if not len(changed):
        return "same", b""
    with np.errstate(over="ignore"):
        if len(changed) >= SPARSE_BELOW * len(after):
            return "dense", _pack(after - before)
        gaps = np.diff(changed, prepend=-1) - 1
        width = next(size for size in (1, 2, 4, 8) if int(gaps.max()) < 1 << 8 * size)
        parts = _pack(gaps.astype(f"<u{width}")), _pack(after[changed] - before[changed])
    return "sparse", HEADER.pack(len(changed), width, *map(len, parts)) + b"".join(parts)


def apply(tensor: torch.Tensor, encoding: str, data: bytes) -> None:
    """In place.

    Raises:
        DamagedError: `data` is none of this tensor's.
    """
    held = words(tensor)
    with np.errstate(over="ignore"):
        if encoding == "dense":
            held += _unpack(data, held.dtype, len(held))
        elif encoding == "sparse":
            places, differences = _read_sparse(data, held)
            held[places] += differences
        elif encoding != "same":
            raise DamagedError(f"encoding {encoding!r}: none of {', '.join(ENCODINGS)}")


def num_changed(encoding: str, data: bytes, num_elements: int) -> int:
    """Of `encode`; of a dense one all."""
    if encoding == "sparse":
        return int(HEADER.unpack_from(data)[0])
    return num_elements if encoding == "dense" else 0


def _read_sparse(data: bytes, held: Words) -> tuple[npt.NDArray[np.int64], Words]:
    if len(data) < HEADER.size:
        raise DamagedError("too short")
    count, width, gap_bytes, value_bytes = HEADER.unpack_from(data)
    if width not in (1, 2, 4, 8) or count > len(held) or len(data) != HEADER.size + gap_bytes + value_bytes:
        raise DamagedError("sizes that do not fit")
    gaps = _unpack(data[HEADER.size : HEADER.size + gap_bytes], np.dtype(f"<u{width}"), count).astype(np.int64)
    places = np.cumsum(gaps + 1) - 1
    if count and not 0 <= places.min() <= places.max() < len(held):
        raise DamagedError("places outside of the tensor")
    return places, _unpack(data[HEADER.size + gap_bytes :], held.dtype, count)


def words(tensor: torch.Tensor) -> Words:
    """The elements as unsigned numbers [n], in the tensor's own memory."""
    assert tensor.is_contiguous()
    bytes_ = tensor.detach().view(-1).view(torch.uint8).numpy()
    return bytes_.view(f"<u{tensor.element_size()}")


def _pack(values: Words) -> bytes:
    planes = np.ascontiguousarray(values.view(np.uint8).reshape(len(values), -1).T)
    return bytes(pa.Codec("zstd", LEVEL).compress(planes.tobytes(), asbytes=True))


def _unpack(data: bytes, dtype: np.dtype[np.unsignedinteger], count: int) -> Words:
    try:
        planes = pa.decompress(data, decompressed_size=count * dtype.itemsize, codec="zstd", asbytes=True)
    except (OSError, ValueError) as error:
        raise DamagedError(str(error)) from error
    if len(planes) != count * dtype.itemsize:
        raise DamagedError("another number of elements")
    interleaved = np.frombuffer(planes, np.uint8).reshape(dtype.itemsize, count).T
    return np.ascontiguousarray(interleaved).view(dtype).reshape(count)
