"""What a node tells of itself, to be compared with the others: code, Python, packages, config, files, shared memory.

Leaves out comparing (compare.py) and what takes two nodes to find out (wire.py). No torch in here.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megasync.checks.check import check_config
from megasync.config.own_packages import PACKAGES
from megasync.config.schema import Config
from megasync.config.shipped import CLONE
from megasync.diagnosis.needs import Needs
from megasync.diagnosis.packages import installed
from megasync.diagnosis.storage import check_shared_memory

HEADER_BYTES = 2**16  # of each file that is compared: the headers of safetensors and Parquet files, the first lines of JSONL
MAX_FILES = 2000  # of a folder


def node_facts(config: Config) -> dict[str, Any]:
    """JSON."""
    return {
        "code": code_digest(CLONE),
        "commit": commit(CLONE),
        "python": platform.python_version(),
        "packages": installed(),
        "config": flat(config.model_dump(mode="json")),
        "files": {key: described(Path(path)) for key, path in config.input_paths.items()},
    }


def problem_here(config: Config, num_ranks: int, free: int) -> str:
    """Why the config cannot run on this node, as `megasync train --check` would say; empty where it can.

    `num_ranks`: of the trainer on all nodes; `free`: bytes of shared memory.
    """
    try:
        check_config(config, num_ranks)
    except ValueError as error:
        return str(error)
    found = check_shared_memory(free, Needs())[0]
    return f"{found.check}: {found.seen}; {found.remedy}" if found.level == "error" else ""


def warning_here(config: Config, host: str, free: int) -> str:
    """What would make the run slow on this node; empty where nothing would. `free`: bytes of shared memory."""
    found = check_shared_memory(free, Needs())[0]
    is_short = config.algorithm.name == "grpo" and found.level == "warning"
    return f"{host}: {found.check}: {found.seen}; {found.remedy}" if is_short else ""


def code_digest(root: Path) -> str:
    """Of all source files, committed or not."""
    total = hashlib.sha256()
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        total.update(f"{path.relative_to(root)}\0".encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]


def commit(root: Path) -> str:
    """git's, with a + where the work tree has changes; empty where this is no clone."""
    told = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return told.stdout.strip()


def flat(values: dict[str, Any], above: str = "") -> dict[str, str]:
    """Full keys and their values in text."""
    found: dict[str, str] = {}
    for name, value in values.items():
        found |= flat(value, f"{above}{name}.") if isinstance(value, dict) and value else {f"{above}{name}": repr(value)}
    return found


def described(path: Path) -> str:
    """Number of files, bytes and a digest of names, sizes and headers; what to say where nothing is there."""
    if not path.exists():
        return "not there"
    total, num_files, num_bytes = hashlib.sha256(), 0, 0
    for file in _files(path):
        size = file.stat().st_size
        with file.open("rb") as opened:
            header = opened.read(HEADER_BYTES)
        total.update(f"{file.relative_to(path) if path.is_dir() else ''}\0{size}\0".encode() + header)
        num_files, num_bytes = num_files + 1, num_bytes + size
    return f"{num_files} files, {num_bytes} bytes, digest {total.hexdigest()[:12]}"


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    yield from sorted(file for file in path.rglob("*") if file.is_file())[:MAX_FILES]
