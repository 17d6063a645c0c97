"""Imports megasync's packages in every process, even if the working folder has files of the same names. No torch in here.

Python and Ray's workers search the working folder first, so that a user's `engine.py` or `bridge.py` would hide the package.
Such a file is not imported, and a config that names it is refused. Leaves out `megasync.py`, which `python -m megasync` itself
would run (megasync/cli.py refuses it).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

PACKAGES = ("bridge", "engine", "exact", "megasync", "model_folder")
ROOT = Path(__file__).resolve().parents[2]
# modules that every process of a run imports, and that files of the working folder must not hide
NOT_IMPORTED = {"antigravity", "idlelib", "lib2to3", "test", "this", "turtle", "turtledemo"}  # unused standard library
LIBRARIES = (  # of site-packages; a test compares them with the imports of a launcher, a rank and a replica
    "absl", "accelerate", "aiohappyeyeballs", "aiohttp_cors", "aiosignal", "annotated_doc", "annotated_types", "anyio", "attr",
    "attrs", "cachetools", "cbor2", "certifi", "charset_normalizer", "click", "cloudpickle", "colorama", "colorful", "cpuinfo",
    "cv2", "dill", "einops", "email_validator", "fastapi", "filelock", "frozenlist", "fsspec", "functorch", "google", "grpc",
    "h11", "httpcore", "httpcore2", "httpx", "httpx2", "huggingface_hub", "idna", "jinja2", "jsonschema",
    "jsonschema_specifications", "llguidance", "markupsafe", "more_itertools", "mpmath", "msgpack", "msgspec", "multidict",
    "networkx", "numpy", "omegaconf", "openai", "openai_harmony", "opencensus", "opentelemetry", "packaging",
    "partial_json_parser", "PIL", "prometheus_client", "propcache", "psutil", "pyarrow", "pybase64", "pydantic",
    "pydantic_core", "pydantic_extra_types", "python_multipart", "referencing", "regex", "requests", "rich", "rpds",
    "safetensors", "sentencepiece", "setuptools", "six", "sniffio", "starlette", "sympy", "tiktoken", "tiktoken_ext",
    "tokenizers", "torchgen", "tqdm", "transformers", "triton", "truststore", "tvm_ffi", "typing_extensions",
    "typing_inspection", "urllib3", "uvloop", "xgrammar", "xxhash", "yaml", "yarl", "zmq",
)  # fmt: skip
SHADOWED = ("megasync", *sorted(sys.stdlib_module_names - NOT_IMPORTED), *LIBRARIES)
RAY_HOOK = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"  # ray 2.60.0 _private/ray_constants.py:674


class _OursFirst:
    """A finder that resolves only PACKAGES."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(ROOT)], target) if path is None and name in PACKAGES else None


def find_ours_first() -> None:
    """Makes this process import our packages from ROOT from now on."""
    if _OursFirst not in sys.meta_path:
        sys.meta_path.insert(0, _OursFirst)


def in_ray_workers() -> dict[str, str]:
    """Environment variables for Ray, with which its workers call `find_ours_first` before they import `bridge`."""
    is_clone = not (Path(__file__).parents[1] / "shipped").is_dir()  # an installed package needs no PYTHONPATH
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {RAY_HOOK: f"{__name__}.find_ours_first"} | ({"PYTHONPATH": os.pathsep.join(paths)} if is_clone else {})


def hidden(folder: Path, names: Sequence[str] = PACKAGES) -> list[str]:
    """Modules and packages of the folder with one of `names`, relative to it; empty for megasync's own folder."""
    if folder.resolve() == ROOT:
        return []
    files = [folder / f"{name}.py" for name in names] + [folder / name / "__init__.py" for name in names]
    return [str(file.relative_to(folder)) for file in files if file.is_file()]


def shadowing(folder: Path, of_lanes: Sequence[str]) -> str:
    """Files of the folder that hide modules of a run, as text; `of_lanes`: names in addition to SHADOWED."""
    return ", ".join(hidden(folder, [*SHADOWED, *of_lanes]))


def rename(files: Sequence[str]) -> str:
    """The remedy for files that have names of our packages; empty for no files."""
    return f"rename {', '.join(files)}: megasync's own package of that name is imported instead" if files else ""
