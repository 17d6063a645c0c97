"""The changes of a tensor from one version to the next in few bytes, and the tensor rebuilt from them, bit for bit.

Elements are whole numbers of their width here, so that NaN and -0.0 are values like others. Of what changed the difference of
these numbers is kept, which between bf16 weights of two steps is mostly 1 or -1; where few changed, with the gaps between their
places. Bytes lie by significance, low ones first, and are compressed with zstd. All on the CPU, but `find_changes`
compares where the new tensor is: of one on a GPU only what changed comes to the host.

    encoding, data = encode(new, old)       # "same", "sparse" or "dense"
    apply(old, encoding, data)              # old becomes new
    encoding, data = advance(old, new)      # both at once, with `new` on any device
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from bridge.layout.words import Words, words

ENCODINGS = ("same", "sparse", "dense")
SPARSE_BELOW = 0.25  # of the elements changed
LEVEL = 1  # of zstd: higher ones save little on such bytes
HEADER = struct.Struct("<QBQQ")  # number of changed elements, bytes of a gap, compressed bytes of gaps and of differences

COMPARED_ELEMENTS = 2**25  # at a time, for which a GPU needs some hundred MB
MAX_THREADS = 8  # numpy and zstd leave Python's lock alone while they work


class DamagedError(ValueError):
    """Bytes that no `encode` has made for this tensor."""


class Changes(NamedTuple):
    """Places [k] int64, rising, and what was added there [k], as words."""

    places: npt.NDArray[np.int64]
    differences: Words


def num_threads() -> int:
    """Among which the tensors of a version are dealt out."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) - 1))


def encode(new: torch.Tensor, old: torch.Tensor) -> tuple[str, bytes]:
    """Both contiguous, of the same dtype and shape."""
    after, before = words(new), words(old)
    places = np.flatnonzero(after != before)
    with np.errstate(over="ignore"):
        if len(places) and len(places) >= SPARSE_BELOW * len(after):
            return "dense", _pack(after - before)
        return encode_changes(Changes(places, after[places] - before[places]))


def encode_changes(changes: Changes) -> tuple[str, bytes]:
    """`encode` for the case that few elements changed."""
    if not len(changes.places):
        return "same", b""
    gaps = np.diff(changes.places, prepend=-1) - 1
    width = next(size for size in (1, 2, 4, 8) if int(gaps.max()) < 1 << 8 * size)
    parts = _pack(gaps.astype(f"<u{width}")), _pack(changes.differences)
    return "sparse", HEADER.pack(len(changes.places), width, *map(len, parts)) + b"".join(parts)


def find_changes(new: torch.Tensor, old: torch.Tensor) -> Changes | None:
    """The changes from `old` in host memory to `new` on any device, of one dtype and shape; None if many elements changed."""
    after, before = _numbers(new), _numbers(old)
    found: list[Changes] = []
    count = 0
    for start in range(0, len(after), COMPARED_ELEMENTS):
        part = slice(start, start + COMPARED_ELEMENTS)
        differences = after[part] - before[part].to(after.device)
        places = differences.nonzero().squeeze(1)
        count += len(places)
        if count >= SPARSE_BELOW * len(after):
            return None
        changed = differences[places].cpu().numpy()
        found.append(Changes(places.int().cpu().numpy().astype(np.int64) + start, changed.view(f"<u{changed.itemsize}")))
    return Changes(*map(np.concatenate, zip(*found, strict=True))) if found else None


def add(held: torch.Tensor, changes: Changes) -> None:
    """Add changes to a tensor in host memory, in place."""
    with np.errstate(over="ignore"):
        words(held)[changes.places] += changes.differences


def advance(held: torch.Tensor, new: torch.Tensor) -> tuple[str, bytes]:
    """`held`, in host memory, becomes `new`, of the same dtype and shape on any device. As `encode`."""
    if new.is_cuda and (found := find_changes(new, held)) is not None:
        add(held, found)
        return encode_changes(found)
    new = new.cpu()
    encoded = encode(new, held)
    held.copy_(new)
    return encoded


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
            add(tensor, _read_sparse(data, held))
        elif encoding != "same":
            raise DamagedError(f"encoding {encoding!r}: none of {', '.join(ENCODINGS)}")


def num_changed(encoding: str, data: bytes, num_elements: int) -> int:
    """The number of changed elements in an encoding; all of a dense one."""
    if encoding == "sparse":
        return int(HEADER.unpack_from(data)[0])
    return num_elements if encoding == "dense" else 0


def _read_sparse(data: bytes, held: Words) -> Changes:
    if len(data) < HEADER.size:
        raise DamagedError("too short")
    count, width, gap_bytes, value_bytes = HEADER.unpack_from(data)
    if width not in (1, 2, 4, 8) or count > len(held) or len(data) != HEADER.size + gap_bytes + value_bytes:
        raise DamagedError("sizes that do not fit")
    gaps = _unpack(data[HEADER.size : HEADER.size + gap_bytes], np.dtype(f"<u{width}"), count).astype(np.int64)
    places = np.cumsum(gaps + 1) - 1
    if count and not 0 <= places.min() <= places.max() < len(held):
        raise DamagedError("places outside of the tensor")
    return Changes(places, _unpack(data[HEADER.size + gap_bytes :], held.dtype, count))


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as numbers [n] of their width, which torch can subtract on any device."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(-1).view(width)


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
