"""Weight files are readable by whom the umask lets, and say why they cannot be written."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.runtime.tensor_file import save_tensors
from tests.support.file_limit import file_limit

ROOT = Path(__file__).resolve().parents[3]
TENSORS = {"weight": torch.arange(4096.0)}


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_a_file_has_the_mode_of_any_other(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "model.safetensors"
    former = os.umask(umask)
    try:
        save_tensors(TENSORS, path, {"format": "pt"})
        first = path.stat().st_mode & 0o777
        path.chmod(0o640)
        save_tensors(TENSORS, path)
    finally:
        os.umask(former)
    assert first == 0o666 & ~umask
    assert path.stat().st_mode & 0o777 == 0o640, "one that is there keeps its own"
    assert torch.equal(load_file(path)["weight"], TENSORS["weight"])


def test_a_full_disk_is_an_os_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(OSError) as caught, file_limit(1000):  # noqa: PT011 # its code is compared
        save_tensors(TENSORS, path)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))


def test_nothing_else_writes_safetensors() -> None:
    """But a trace, which is read once and deleted."""
    files = [file for package in ("engine", "bridge", "megasync") for file in (ROOT / package).rglob("*.py")]
    found = {str(file.relative_to(ROOT)) for file in files if re.search(r"import .*\bsave_file\b", file.read_text())}
    assert found == {"engine/runtime/tensor_file.py", "bridge/vllm/serving/trace.py"}
