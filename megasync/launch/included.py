"""Packages and modules of the user that `megasync submit --include` sends with a job. No torch in here.

Ray puts them on the import path of every process of the job. Leaves out the job (megasync/submit.py).
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megasync.config.errors import ConfigError, refuse_if
from megasync.config.own_packages import PACKAGES, rename


def included_modules(included: Sequence[Path]) -> list[Path]:
    """Packages and modules: the named ones, and the contents of a folder that is neither.

    Raises:
        ConfigError: a path is none of these.
    """
    found: list[Path] = []
    for path in map(Path.resolve, included):
        inner = sorted(one for one in path.iterdir() if _is_module(one)) if path.is_dir() and not _is_module(path) else [path]
        if not inner or not all(map(_is_module, inner)):
            remedy = "name a package (a folder with __init__.py), a module (a .py file), or a folder of such"
            raise ConfigError(f"--include {path}: there is nothing that Python could import", remedy=remedy)
        found += inner
    ours = [module.name for module in found if module.stem in PACKAGES]
    refuse_if(ours, f"--include {', '.join(ours)}: of the name of a package of ours", remedy=rename(ours))
    return found


def _is_module(path: Path) -> bool:
    return path.suffix == ".py" if path.is_file() else (path / "__init__.py").is_file()


def as_packages(modules: Sequence[Path]) -> list[Path]:
    """Ray's job client accepts folders alone: a module becomes a package of its name, until this process ends."""
    if all(map(Path.is_dir, modules)):
        return list(modules)
    folder = Path(tempfile.mkdtemp(prefix="megasync-include-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for module in (one for one in modules if one.is_file()):
        (folder / module.stem).mkdir()
        shutil.copyfile(module, folder / module.stem / "__init__.py")
    return [one if one.is_dir() else folder / one.stem for one in modules]


def import_roots(modules: Sequence[Path]) -> list[str]:
    """The folders from which they are imported here."""
    return list(dict.fromkeys(str(module.parent) for module in modules))


def refuse_excluded(modules: Sequence[Path], excludes: Sequence[str]) -> None:
    """Refuse packages with entries that Ray would leave out, because the repository excludes the same names."""
    for package in filter(Path.is_dir, modules):
        if left_out := sorted(entry.name for entry in package.iterdir() if f"/{entry.name}" in excludes):
            message = f"--include {package}: {left_out[0]} in it would not travel, since a folder of this repository has its name"
            raise ConfigError(message, remedy="rename it, or move it into a folder of the package")
