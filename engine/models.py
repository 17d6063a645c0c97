"""The models of an engine: the policy's chunks and adapters, and the frozen models beside it (KL reference, teacher).

Leaves out wraps' tables (wrap/table.py) and how a chunk is built from a folder (model/build.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine import alike
from engine.config import EngineConfig
from engine.model import exact, head, lora
from engine.model.build import build_chunks, gpt_model
from engine.peft import factors
from engine.teacher import ADAPTER, Teacher, TeacherChoice
from engine.wrap.table import FrozenModel, WrappedModel

NEW = "new"  # the name of new adapters, while another one is loaded


def build_model(mbridge: Any, config: EngineConfig, path: str | Path) -> list[torch.nn.Module]:
    """The chunks of a folder's model on this rank, not wrapped; the output layer makes logits by the configured product."""
    chunks = build_chunks(mbridge, path)
    for chunk in chunks:
        layer = head.output_layer(gpt_model(chunk))
        if layer is not None and (mbridge.is_exact or config.head_dtype == "float32"):
            layer.product = exact.product if mbridge.is_exact else head.in_float32
    if mbridge.is_exact:
        exact.prepare_machine(chunks, mbridge.hf_config)
    return chunks


@dataclass(frozen=True)
class FrozenModels:
    """Builds the models that are not trained, beside a wrapped policy. The methods are collective."""

    policy: WrappedModel
    config: EngineConfig
    model_config: Any  # megatron-core's TransformerConfig
    mbridge: Any
    path: str | Path  # model.path

    def reference(self) -> WrappedModel | FrozenModel:
        """The reference of the KL: with LoRA the policy without its adapters, else the folder's weights once more."""
        return self.policy if self.config.lora.rank else self._of(self.path)

    def teacher(self, choice: TeacherChoice, reference: WrappedModel | FrozenModel | None) -> Teacher:
        """`reference`: that of the KL, if there is one, which a teacher that is the start model shares."""
        model: WrappedModel | FrozenModel | None = None
        if choice.path:
            model = self._of(choice.path)
        elif choice.is_in_trainer:
            model = self.policy if choice.adapter_path else reference or self.reference()
        return Teacher(choice, model, self.mbridge, self.config.wrap)

    def _of(self, path: str | Path) -> FrozenModel:
        """A folder's weights, without adapters."""
        chunks = build_model(self.mbridge, self.config, path)
        alike.check_weights(chunks, path)
        return FrozenModel(self.config, self.model_config, chunks)


def add_adapters(
    chunks: list[torch.nn.Module],
    config: EngineConfig,
    load: Callable[[str | Path], None],
    *,
    seed: int,
    resumed: str | Path | None,
    has_reference: bool,
    teacher: TeacherChoice | None,
) -> None:
    """Add new adapters, or those of `lora.adapter_path`, which the reference of the KL has too; in the policy those of
    `resumed` replace them. An adapter of the teacher is kept beside them. No effect without LoRA.

    Args:
        load: puts a folder's adapter into the chunks (see `adapter_loader`).
        seed: of new adapters.
        resumed: folder of the adapter to resume from.
    """
    if not config.lora.rank:
        return
    lora.add_adapters(chunks, config.lora, seed)
    if teacher is not None and teacher.adapter_path:
        lora.keep(chunks, NEW)
        load(teacher.adapter_path)
        lora.keep(chunks, ADAPTER)
        lora.put_back(chunks, NEW)
    start, needs_start = config.lora.adapter_path, has_reference or (teacher is not None and teacher.is_start)
    if start and (needs_start or not resumed):
        load(start)
        if needs_start:
            lora.keep(chunks, lora.START)
    if resumed:
        load(resumed)


def adapter_loader(
    chunks: list[torch.nn.Module], config: EngineConfig, mbridge: Any, model_path: Path
) -> Callable[[str | Path], None]:
    """A function that loads a folder's PEFT adapter into the chunks."""
    return lambda path: factors.load_adapter(chunks, Path(path), config.lora, mbridge, model_path)
