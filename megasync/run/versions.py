"""The log of a run's versions (`sync.log`), written at each sync: who writes, and what goes.

    log = VersionLog(config, exporter)
    log.write(12)                # metrics; collective

Leaves out the files themselves (bridge/versions/), and what a run that begins cuts (checkpoints.py).
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bridge.export.exporter import Exporter
from bridge.export.source import whole_tensors
from bridge.versions.prune import VersionPruner
from bridge.versions.writer import VersionWriter, Written, forget_stages
from megasync.config.files import VERSIONS
from megasync.config.schema import Config
from megasync.run.rank_zero import control_group, on_rank_zero


class VersionLogWriteError(RuntimeError):
    """A stage could not write; raised on every rank with its text."""


class VersionLog:
    """Methods are collective. The sender of each pipeline stage writes what its stage has."""

    def __init__(self, config: Config, exporter: Exporter) -> None:
        self.folder: Path = config.run.folder / VERSIONS
        self.exporter = exporter
        self.writer: VersionWriter | None = None
        self._pruner = VersionPruner(self.folder, config.sync.log_keep) if config.sync.log_keep is not None else None
        self._last = -1
        if exporter.is_sender:
            keeps, every = config.sync.log == "deltas", config.sync.log_full_every
            stage, count = exporter.stage, exporter.num_stages
            self.writer = VersionWriter(self.folder, stage=stage, num_stages=count, keeps_weights=keeps, full_every=every)

    def write(self, version: int) -> dict[str, float]:
        """Metrics of all stages together: the slowest's time, the sum of the bytes. Raises VersionLogWriteError."""
        if version == self._last:  # published once more, to replicas that came later
            return {}
        tensors = whole_tensors(self.exporter)
        written, problem = None, ""
        try:
            if self.writer is not None:
                written = self.writer.write(version, tensors)
            else:
                deque(tensors, maxlen=0)
        except OSError as error:
            problem = f"sync.log: version {version} cannot be written: {error}"
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (written, problem), group=control_group())
        if problems := [each for _, each in found if each]:
            raise VersionLogWriteError(problems[0])
        if self._last < 0:
            on_rank_zero(lambda: forget_stages(self.folder, version, self.exporter.num_stages))
        self._last = version
        return metrics([each for each, _ in found if each is not None])

    def prune(self) -> None:
        """Take out what `sync.log_keep` does not keep, once the newest version is marked (checkpoints.py), from which a killed
        run goes on. Raises RankZeroError on every rank where a file cannot be removed.
        """
        if (pruner := self._pruner) is not None:
            on_rank_zero(pruner.prune)


def metrics(stages: list[Written]) -> dict[str, float]:
    num_elements, num_changed = (sum(getattr(each, name) for each in stages) for name in ("num_elements", "num_changed"))
    found = {
        "sync/log_seconds": max(each.seconds for each in stages),
        "sync/log_bytes": float(sum(each.num_bytes for each in stages)),
    }
    return found | ({"sync/changed_fraction": num_changed / num_elements} if num_changed else {})
