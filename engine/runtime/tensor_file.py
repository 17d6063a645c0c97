"""Writes a safetensors file as `open` would: for whom the umask lets read it, and with an OSError where it cannot be written.

safetensors 0.8.0 writes a temporary file and renames it: mode 0600 whatever the umask, and a SafetensorError on a full disk.
Leaves out reading, and which tensors go to which file (engine/checkpoint/).

    save_tensors(tensors, folder / "model.safetensors", {"format": "pt"})
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

OS_ERROR = re.compile(r"\(os error (\d+)\)")


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write `tensors`, each contiguous and with memory of its own. A file that is there is replaced and keeps its mode.

    Raises:
        OSError: the file cannot be written; it names it.
    """
    path.touch()  # so the umask is asked without being set, which other threads would see
    mode = path.stat().st_mode & 0o777
    with _os_errors(path):
        save_file(tensors, path, metadata)
    path.chmod(mode)


def save_model(model: Any, folder: Path) -> None:
    """Write a model of transformers, whose `save_pretrained` leaves weights as safetensors does.

    Raises:
        OSError: a file cannot be written.
    """
    with _os_errors(folder):
        model.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", path)


@contextmanager
def _os_errors(path: Path) -> Iterator[None]:
    """The system's errors inside of those of safetensors, with the name of `path`."""
    try:
        yield
    except SafetensorError as error:
        code = OS_ERROR.search(str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
