"""Our four packages are ours in every process, whatever files of their names lie where a run is started. No torch in here.

Python looks into the working folder first, and Ray's workers do: an `engine.py` or `bridge.py` of the user's would be taken for
the package. Such a file is not imported then, and refused where a config names it. Leaves out `megasync.py`, which
`python -m megasync` itself would run (megasync/cli.py refuses it).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

PACKAGES = ("bridge", "engine", "exact", "megasync")
ROOT = Path(__file__).resolve().parents[2]
# modules that Python would import from the working folder in place of those that every process of a run needs
NOT_IMPORTED = {"antigravity", "idlelib", "lib2to3", "test", "this", "turtle", "turtledemo"}  # of the standard library
LIBRARIES = ("jinja2", "numpy", "omegaconf", "packaging", "psutil", "pyarrow", "pydantic", "rich", "safetensors", "tokenizers")
SHADOWED = ("megasync", *sorted(sys.stdlib_module_names - NOT_IMPORTED), *LIBRARIES, "transformers", "yaml")
RAY_HOOK = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"  # ray 2.60.0 _private/ray_constants.py:674


class _OursFirst:
    """A finder for the four names alone."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(ROOT)], target) if path is None and name in PACKAGES else None


def find_ours_first() -> None:
    """In this process, from now on."""
    if _OursFirst not in sys.meta_path:
        sys.meta_path.insert(0, _OursFirst)


def in_ray_workers() -> dict[str, str]:
    """Environment of a Ray whose workers find ours first: they import `bridge` before anything of this package."""
    is_clone = not (Path(__file__).parents[1] / "shipped").is_dir()  # an installed package is found without
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {RAY_HOOK: f"{__name__}.find_ours_first"} | ({"PYTHONPATH": os.pathsep.join(paths)} if is_clone else {})


def hidden(folder: Path, names: Sequence[str] = PACKAGES) -> list[str]:
    """Modules and packages of the folder that have a name of ours, and are not ours."""
    if folder.resolve() == ROOT:
        return []
    files = [folder / f"{name}.py" for name in names] + [folder / name / "__init__.py" for name in names]
    return [str(file.relative_to(folder)) for file in files if file.is_file()]


def shadowing(folder: Path, of_lanes: Sequence[str]) -> str:
    """Which files of the folder hide modules that a run imports, for an error; `of_lanes`: more of these."""
    return ", ".join(hidden(folder, [*SHADOWED, *of_lanes]))


def rename(files: Sequence[str]) -> str:
    """What to do about them, for an error; empty for none."""
    one = "a name of a package of megasync's own" if len(files) == 1 else "names of packages of megasync's own"
    return f"rename {', '.join(files)}: {one}, which is imported in its place" if files else ""
