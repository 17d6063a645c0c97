"""Fixtures of several files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.config_files import write_runnable


@pytest.fixture
def runnable(tmp_path: Path) -> Path:
    """A config that can run, with the model and the data that it names."""
    return write_runnable(tmp_path)
