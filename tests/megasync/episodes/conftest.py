"""Fixtures of several files."""

from __future__ import annotations

import pytest

from megasync.tools.assets.command import build_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    build_tokenizer().save_pretrained(path)
    return str(path)
