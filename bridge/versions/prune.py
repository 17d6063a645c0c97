"""Takes the oldest versions out of a log, and none that a kept one is made of.

    pruner = VersionPruner(folder, keep=20)
    pruner.prune()               # once every stage has written the newest version

Leaves out checkpoints, which hold their own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bridge.versions.file import DELTA, VersionLogError, read_header, there


class VersionPruner:
    """Prunes the files of all stages; called by one process."""

    def __init__(self, folder: Path, keep: int) -> None:
        """`keep`: the number of newest versions that stay, with the files that they are built from."""
        self.folder, self.keep = folder, keep
        self._is_delta: dict[Path, bool] = {}

    def prune(self) -> list[int]:
        """The versions that were removed. The newest of them goes first, so that what a kill leaves of them can still be read.

        Raises:
            OSError: a file cannot be removed.
        """
        files = there(self.folder)
        first = first_needed(list(files), self.keep, lambda version: not any(map(self._needs_others, files[version].values())))
        removed = [version for version in files if version < first]
        for version in reversed(removed):
            for path in files[version].values():
                path.unlink(missing_ok=True)
                self._is_delta.pop(path, None)
        return removed

    def _needs_others(self, path: Path) -> bool:
        """Whether it is a delta, or damaged: nothing is made of it then."""
        if path not in self._is_delta:
            try:
                self._is_delta[path] = read_header(path).kind == DELTA
            except VersionLogError:
                self._is_delta[path] = True
        return self._is_delta[path]


def first_needed(versions: Sequence[int], keep: int, is_whole: Callable[[int], bool]) -> int:
    """The oldest version that the newest `keep` of `versions`, in order, need: the newest whole one not after these, or all."""
    if len(versions) <= keep:
        return versions[0] if versions else 0
    whole = (version for version in reversed(versions[: len(versions) - keep + 1]) if is_whole(version))
    return next(whole, versions[0])
