"""One stage's part of a version: its tensors, or their changes, in a file that is whole or does not exist.

The bytes of the tensors come first, then their description as JSON, then its length and digest and a mark: a truncated file
has no mark. It grows under another name and gets its own when it is on the disk.

    versions/version_00000012.stage_000

Leaves out the order of versions (reader.py) and what changed (weight_delta.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

NAME = re.compile(r"version_(\d{8})\.stage_(\d{3})")
PARTIAL = ".partial_"
MARK = b"megasync versions 1\n"
TRAILER = struct.Struct(f"<Q32s{len(MARK)}s")
FULL, DELTA, DIGESTS = "full", "delta", "digests"


class VersionLogError(ValueError):
    """The log cannot give the requested version; the message names the file and the reason."""


@dataclass(frozen=True)
class Entry:
    """One tensor. `digest`: of it in this version. `encoding`: raw, or one of weight_delta.ENCODINGS; "" in a log of digests."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: int
    encoding: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Header:
    """`parent`: the version that a delta is to be applied to, `parent_state` its state. `state`: of this version."""

    version: int
    stage: int
    num_stages: int
    kind: str
    parent: int
    parent_state: str
    state: str
    entries: tuple[Entry, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Header:
        fields = json.loads(text)
        fields["entries"] = tuple(Entry(**{**each, "shape": tuple(each["shape"])}) for each in fields["entries"])
        return Header(**fields)


def state_of(entries: Iterable[Entry]) -> str:
    """One digest for the names, shapes and values of all tensors."""
    fields = [[each.name, each.dtype, list(each.shape), each.digest] for each in entries]
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def path_of(folder: Path, version: int, stage: int) -> Path:
    return folder / f"version_{version:08d}.stage_{stage:03d}"


def there(folder: Path) -> dict[int, dict[int, Path]]:
    """Files by version and stage, in order."""
    found: dict[int, dict[int, Path]] = {}
    for path in sorted(folder.glob("version_*")):
        if match := NAME.fullmatch(path.name):
            found.setdefault(int(match[1]), {})[int(match[2])] = path
    return found


def shapes_of(folder: Path, version: int) -> dict[str, tuple[int, ...]]:
    """The digests of every tensor of a version, without reading weights.

    Raises:
        VersionLogError: a file of it is damaged, or one is missing.
    """
    headers = [read_header(path) for path in there(folder).get(version, {}).values()]
    if not headers or len(headers) < headers[0].num_stages:
        raise VersionLogError(f"{folder}: has no version {version}, or not all stages of it")
    return {entry.name: entry.shape for header in headers for entry in header.entries}


@contextmanager
def growing(path: Path) -> Iterator[BinaryIO]:
    """A file that is `path` once the block has ended well, and nothing else."""
    partial = path.with_name(f"{PARTIAL}{path.name}")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _flush_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    """Flushes a folder's entries, and so the name of a new file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def there_or_gone(path: Path) -> Iterator[None]:
    """VersionLogError where a file of the log is not there any more: a run removes old ones by sync.log_keep."""
    try:
        yield
    except FileNotFoundError as error:
        raise VersionLogError(f"{path}: is gone: its run has removed it by now (sync.log_keep)") from error


def write_header(file: BinaryIO, header: Header) -> None:
    """After the bytes of the tensors."""
    text = header.to_json().encode()
    file.write(text)
    file.write(TRAILER.pack(len(text), hashlib.sha256(text).digest(), MARK))


def read_header(path: Path) -> Header:
    """
    Raises:
        VersionLogError: the file is cut off, damaged or gone, or is another version's.
    """
    with there_or_gone(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - TRAILER.size))
        trailer = file.read()
        if len(trailer) < TRAILER.size or not trailer.endswith(MARK):
            raise VersionLogError(f"{path}: is torn: it ends in the middle, after {size} bytes")
        length, digest, _ = TRAILER.unpack(trailer)
        if length > size - TRAILER.size:
            raise VersionLogError(f"{path}: is damaged: its last bytes tell of more than it has")
        file.seek(max(0, size - TRAILER.size - length))
        text = file.read(length)
    if hashlib.sha256(text).digest() != digest:
        raise VersionLogError(f"{path}: is damaged: the description of its tensors differs from its digest")
    header, match = Header.from_json(text.decode()), NAME.fullmatch(path.name)
    if match is None or (header.version, header.stage) != (int(match[1]), int(match[2])):
        raise VersionLogError(f"{path}: is out of order: it holds version {header.version}, stage {header.stage}")
    if sum(entry.num_bytes for entry in header.entries) + length + TRAILER.size != size:
        raise VersionLogError(f"{path}: is torn: bytes are missing in the middle")
    return header
