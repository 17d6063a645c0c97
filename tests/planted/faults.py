"""The planted faults: one-line mistakes that a tired engineer could make, each with the tests that are expected to fail.

    for fault in read_faults(): print(fault.name, fault.file, fault.suffers)

`faults.toml` is the list, `python -m tests.planted` plants them one after the other in a copy of the repository.
"""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("faults.toml")


@dataclass(frozen=True)
class Fault:
    """`old` stands exactly once in `file` and becomes `new`; `tests`: files or `file::test`, quick ones first."""

    name: str
    file: str
    old: str
    new: str
    suffers: str  # from it a user, in words
    tests: tuple[str, ...]

    def problem(self, root: Path) -> str:
        """Why the fault cannot be planted any more; empty where it can."""
        count = (root / self.file).read_text().count(self.old) if (root / self.file).is_file() else 0
        if count != 1:
            return f"{self.name}: {self.file} has its old text {count} times"
        missing = [test for test in self.tests if not _is_there(root, *test.split("::"))]
        return f"{self.name}: there is no {', '.join(missing)}" if missing or not self.tests else ""

    @contextmanager
    def planted(self, root: Path) -> Iterator[None]:
        """The fault is in the copy of the repository at `root` within the block."""
        path = root / self.file
        sound = path.read_text()
        _write(path, sound.replace(self.old, self.new))
        try:
            yield
        finally:
            _write(path, sound)


def _is_there(root: Path, file: str, test: str = "") -> bool:
    return (root / file).is_file() and (not test or f"\ndef {test}(" in (root / file).read_text())


def _write(path: Path, text: str) -> None:
    """Bytecode is identified by its source's size and second, which may both stay the same."""
    path.write_text(text)
    if path.suffix == ".py":
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def read_faults() -> list[Fault]:
    rows = tomllib.loads(LIST.read_text())["fault"]
    return [Fault(**{**row, "tests": tuple(row["tests"])}) for row in rows]
