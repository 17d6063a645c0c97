"""Any version out of a log: from the newest whole one before it, delta after delta, each tensor verified by its digest.

    log = VersionReader(run_folder / "versions")
    log.versions                            # complete on all stages
    dict(log.tensors(12))                   # VersionLogError where the log is torn, lacks a version or is out of order

Leaves out folders of models (megasync/tools/export/command.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from bridge.layout.digest import digest_tensor
from bridge.versions import weight_delta
from bridge.versions.file import DELTA, DIGESTS, Entry, Header, VersionLogError, read_header, there, there_or_gone


class VersionReader:
    """Reads one log, as it was when opened."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._files = folder, there(folder)
        self._header = lru_cache(maxsize=None)(read_header)

    @property
    def versions(self) -> list[int]:
        """Versions for which every stage has a file."""
        return [version for version, files in self._files.items() if self._is_whole(files)]

    @property
    def with_weights(self) -> list[int]:
        """The versions that hold more than digests: a run may have been resumed with another `sync.log`."""
        return [version for version in self.versions if self._has_weights(version)]

    def _has_weights(self, version: int) -> bool:
        try:
            return all(header.kind != DIGESTS for header in self._headers(version))
        except VersionLogError:
            return False

    def _is_whole(self, files: dict[int, Path]) -> bool:
        try:
            return set(files) == set(range(self._header(next(iter(files.values()))).num_stages))
        except VersionLogError:
            return False

    def digests(self, version: int) -> dict[str, int]:
        """For every tensor of a version, without reading weights."""
        return {entry.name: entry.digest for header in self._headers(version) for entry in header.entries}

    def shapes(self, version: int) -> dict[str, tuple[int, ...]]:
        """For every tensor of a version, without reading weights. Raises VersionLogError as `tensors` does."""
        return {entry.name: entry.shape for header in self._headers(version) for entry in header.entries}

    def tensors(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """All of them, stage after stage.

        Raises:
            VersionLogError: names the file or the version that is torn, damaged, missing or out of order.
        """
        for header in self._headers(version):
            yield from self.of_stage(version, header.stage).items()

    def _headers(self, version: int) -> list[Header]:
        """The tensors of all stages."""
        if version not in self._files:
            listed = ", ".join(map(str, self.versions[-12:])) or "none"
            raise VersionLogError(f"{self.folder}: has no version {version}; the last there are: {listed}")
        files = self._files[version]
        headers = [self._header(path) for path in files.values()]
        count = headers[0].num_stages
        if missing := sorted(set(range(count)) - set(files)):
            raise VersionLogError(f"{self.folder}: version {version} lacks stage {missing[0]} of {count}")
        return headers

    def chain(self, version: int, stage: int) -> list[tuple[Path, Header]]:
        """The files to go through, the whole one first."""
        chain: list[tuple[Path, Header]] = []
        wanted, state = version, ""
        while True:
            path = self._files.get(wanted, {}).get(stage)
            if path is None:
                needed = f", which version {chain[-1][1].version} was added to" if chain else ""
                raise VersionLogError(f"{self.folder}: version {wanted} of stage {stage} is missing{needed}")
            header = self._header(path)
            if header.kind == DIGESTS:
                raise VersionLogError(f"{path}: holds digests alone (sync.log: digests), no weights")
            if chain and header.state != state:
                raise VersionLogError(f"{path}: is out of order: version {chain[-1][1].version} was added to other weights")
            chain.append((path, header))
            if header.kind != DELTA:
                return chain[::-1]
            if not header.parent < wanted:
                raise VersionLogError(f"{path}: is out of order: it was added to version {header.parent}")
            wanted, state = header.parent, header.parent_state

    def of_stage(self, version: int, stage: int) -> dict[str, torch.Tensor]:
        """Raises VersionLogError as `tensors` does."""
        tensors: dict[str, torch.Tensor] = {}
        for path, header in self.chain(version, stage):
            _take_all(path, header, tensors)
        return tensors

    def walk(self, stage: int) -> Iterator[tuple[Header, dict[str, torch.Tensor]]]:
        """Every version of a stage in order, each made out of the one before it; the tensors are the same, and change.

        Raises VersionLogError as `tensors` does.
        """
        tensors: dict[str, torch.Tensor] = {}
        former = ""
        for version in self.versions:
            path, header = self.chain(version, stage)[-1]
            if header.kind != DELTA:
                tensors.clear()
            elif header.parent_state != former:
                raise VersionLogError(f"{path}: is out of order: it was added to version {header.parent}")
            _take_all(path, header, tensors)
            former = header.state
            yield header, tensors


def _take_all(path: Path, header: Header, tensors: dict[str, torch.Tensor]) -> None:
    """One file's, into the tensors that it was added to; several at a time, in threads."""
    threads = ThreadPoolExecutor(weight_delta.num_threads(), "version log")
    try:
        taken = threads.map(lambda entry: _taken(path, tensors.get(entry.name), entry), header.entries)
        for entry, tensor in zip(header.entries, taken, strict=True):
            tensors[entry.name] = tensor
    finally:
        threads.shutdown(cancel_futures=True)


def _taken(path: Path, former: torch.Tensor | None, entry: Entry) -> torch.Tensor:
    """The tensor, verified: `former`, which becomes it, or a new one."""
    with there_or_gone(path):
        data = np.fromfile(path, np.uint8, entry.num_bytes, offset=entry.offset)
    if former is None and entry.encoding != "raw":
        raise VersionLogError(f"{path}: {entry.name} is damaged: there is nothing that it was added to")
    try:
        tensor = _whole(entry, data) if former is None or entry.encoding == "raw" else _added(former, entry, data)
    except weight_delta.DamagedError as error:
        raise VersionLogError(f"{path}: {entry.name} is damaged: {error}") from error
    if entry.encoding != "same" and digest_tensor(tensor) != entry.digest:
        raise VersionLogError(f"{path}: {entry.name} is damaged: it differs from its digest")
    return tensor


def _added(former: torch.Tensor, entry: Entry, data: npt.NDArray[np.uint8]) -> torch.Tensor:
    weight_delta.apply(former, entry.encoding, data.tobytes())
    return former


def _whole(entry: Entry, data: npt.NDArray[np.uint8]) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype)
    if len(data) != math.prod(entry.shape) * dtype.itemsize:
        raise weight_delta.DamagedError("another number of bytes")
    if not len(data):  # numpy gives it a stride that torch does not take
        return torch.empty(entry.shape, dtype=dtype)
    return torch.from_numpy(data).view(dtype).view(entry.shape)
