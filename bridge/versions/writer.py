"""Writes a stage's log, version after version: changes, and from time to time all tensors.

    log = VersionWriter(folder, stage=0, num_stages=1, keeps_weights=True, full_every=20)
    written = log.write(12, whole_tensors(source))       # by the one rank of the stage that has them

The weights of the former version stay in host memory, to compare with. Tensors on a GPU are compared there, and only what changed
comes from it; others in threads, several at a time. Leaves out who calls it when (megasync/run/weights.py).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Self

import torch

from bridge.layout.digest import digest_tensor
from bridge.layout.words import words
from bridge.versions import weight_delta
from bridge.versions.file import (
    DELTA,
    DIGESTS,
    FULL,
    PARTIAL,
    Entry,
    Header,
    growing,
    path_of,
    state_of,
    there,
    write_header,
)


@dataclass(frozen=True)
class Written:
    """Statistics of one version; `num_changed` of `num_elements` elements, 0 where changes are not computed."""

    num_bytes: int
    weight_bytes: int
    num_changed: int
    num_elements: int
    seconds: float


class VersionWriter:
    """Writes the log of one stage. A version that failed leaves nothing, and the next one is complete."""

    def __init__(self, folder: Path, *, stage: int, num_stages: int, keeps_weights: bool, full_every: int) -> None:
        self.folder, self.stage, self.num_stages = folder, stage, num_stages
        self.keeps_weights, self.full_every = keeps_weights, full_every
        self._former: dict[str, torch.Tensor] = {}
        self._former_header: Header | None = None
        self._since_full = 0

    def write(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Written:
        """All tensors of the stage. Takes all of them, whatever fails: others may wait for each.

        Raises:
            OSError: the file cannot be written.
        """
        begin, rest = time.monotonic(), iter(tensors)
        parent = self._former_header
        is_delta = self.keeps_weights and parent is not None and self._since_full + 1 < self.full_every
        kind = DIGESTS if not self.keeps_weights else DELTA if is_delta else FULL
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with growing(path_of(self.folder, version, self.stage)) as file, _Pass(file, kind, self._former) as pass_:
                for name, tensor in rest:
                    pass_.add(name, tensor)
                pass_.finish()
                former = (parent.version, parent.state) if is_delta and parent is not None else (-1, "")
                state = state_of(pass_.entries)
                header = Header(version, self.stage, self.num_stages, kind, *former, state, tuple(pass_.entries))
                write_header(file, header)
                num_bytes = file.tell()
        except BaseException as error:
            self._former, self._former_header = {}, None
            for _ in rest if isinstance(error, Exception) else ():  # a signal ends the others as well: nobody waits
                pass
            raise
        self._former_header = header
        self._since_full = self._since_full + 1 if is_delta else 0
        elements = sum(tensor.numel() for tensor in self._former.values())
        return Written(num_bytes, pass_.weight_bytes, pass_.num_changed, elements, time.monotonic() - begin)


class _Pass:
    """Tensor after tensor of one version."""

    def __init__(self, file: BinaryIO, kind: str, former: dict[str, torch.Tensor]) -> None:
        self.kind, self.former = kind, former
        self.entries: list[Entry] = []
        self.weight_bytes = self.num_changed = self._offset = 0
        self._file = file
        self._num_threads = weight_delta.num_threads()
        self._threads = ThreadPoolExecutor(self._num_threads, "version log")
        self._under_way: deque[tuple[Entry, Future[tuple[str, bytes]]]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        entry = Entry(name, dtype, shape, digest_tensor(tensor.contiguous()), "", 0, 0)
        self.weight_bytes += tensor.nbytes
        if self.kind == DIGESTS:
            self._write(entry, b"")
            return
        former = self.former.get(name)
        changes = None
        if self.kind == DELTA and tensor.is_cuda and former is not None:
            changes = weight_delta.find_changes(tensor, former)
        if former is not None and changes is not None:
            encoded = self._threads.submit(_add_and_encode, former, changes)
        else:
            own = tensor.detach().to("cpu", copy=True).contiguous()
            self.former[name] = own
            encoded = self._threads.submit(self._encode, own, former)
        self._under_way.append((entry, encoded))
        if len(self._under_way) > self._num_threads:
            self._write_oldest()

    def finish(self) -> None:
        """Entries that are being written to the file."""
        while self._under_way:
            self._write_oldest()

    def _encode(self, own: torch.Tensor, former: torch.Tensor | None) -> tuple[str, bytes]:
        if self.kind == FULL:
            return "raw", words(own).tobytes()
        assert former is not None
        return weight_delta.encode(own, former)

    def _write_oldest(self) -> None:
        entry, encoded = self._under_way.popleft()
        encoding, data = encoded.result()
        if self.kind == DELTA:
            self.num_changed += weight_delta.num_changed(encoding, data, math.prod(entry.shape))
        self._write(replace(entry, encoding=encoding), data)

    def _write(self, entry: Entry, data: bytes) -> None:
        self._file.write(data)
        self.entries.append(replace(entry, offset=self._offset, num_bytes=len(data)))
        self._offset += len(data)


def _add_and_encode(former: torch.Tensor, changes: weight_delta.Changes) -> tuple[str, bytes]:
    weight_delta.add(former, changes)
    return weight_delta.encode_changes(changes)


def cut(folder: Path, version: int) -> list[int]:
    """Take `version` and all that follow out of a log, and what was not finished; which there were. The newest goes first."""
    found = {number: files for number, files in there(folder).items() if number >= version}
    for number in sorted(found, reverse=True):
        for path in found[number].values():
            path.unlink()
    for path in folder.glob(f"{PARTIAL}*"):
        path.unlink()
    return sorted(found)


def forget_stages(folder: Path, version: int, num_stages: int) -> None:
    """Files of `version` by a run of more stages, once those of this one are there."""
    for stage, path in there(folder).get(version, {}).items():
        if stage >= num_stages:
            path.unlink()
