"""GPUs on a machine that has none, for code that counts them and starts nothing there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, folder: Path, number: int) -> None:
    """So many GPUs, as an nvidia-smi first in PATH lists them, and CUDA_VISIBLE_DEVICES with all of them."""
    lines = "\n".join(f"GPU {index}: NVIDIA H100 (UUID: GPU-{index})" for index in range(number))
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] && echo '{lines}'\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(number))))
