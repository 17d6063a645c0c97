"""The teacher of an engine: its model, and the tensors that it adds to micro-batches before training.

In the trainer it is a model of the policy's shape and layout: the start model, another adapter on the policy's base, or a folder,
sharded as the reference of a KL is. With `objective` full its hidden states of a batch are kept, [T, hidden size] in the model's
dtype, and its output layer's weight, so that both models' logits are compared chunk by chunk, and only one chunk's are in memory.
Leaves out teachers that were asked in the rollout, whose values come with the samples, and the formulas
(objective/distillation.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.batch.batch import MicroBatch
from engine.algorithm import TeacherObjective
from engine.model import head, lora, vocabulary
from engine.model.build import gpt_model
from engine.moe import router
from engine.objective.distillation import Divergence, top_tokens
from engine.objective.logits import LogProbs
from engine.passes import PipelineRunner
from engine.runtime.megatron import parallel_state as mpu
from engine.wrap.table import FrozenModel, WrappedModel

ADAPTER = "teacher"  # the name of its adapter among those kept


@dataclass(frozen=True)
class TeacherChoice:
    """The teacher of an engine. In the trainer: a folder, an adapter, or with neither the start model."""

    objective: TeacherObjective
    is_in_trainer: bool = False
    path: str | Path = ""
    adapter_path: str | Path = ""

    @property
    def is_start(self) -> bool:
        return self.is_in_trainer and not (self.path or self.adapter_path)


class Teacher:
    """Methods are collective."""

    def __init__(self, choice: TeacherChoice, model: WrappedModel | FrozenModel | None, mbridge: Any, wrap: str) -> None:
        """`model`: None where the values come with the samples; `mbridge` built it, `wrap` is the policy's."""
        self.objective, self.model, self.mbridge, self.wrap = choice.objective, model, mbridge, wrap
        self.adapter = ADAPTER if choice.adapter_path else lora.START
        self.weight: torch.Tensor | None = None  # of its output layer, on the last stage
        self.product: head.Product = head.plain

    def divergence(self, temperature: float) -> Divergence | None:
        """Computes the divergence from the policy's logits; None where log-probs of the sampled tokens are enough."""
        if self.objective.objective == "sampled":
            return None
        logits = self._logits if self.objective.objective == "full" else None
        return Divergence(self.objective, temperature, self.mbridge.vocab_size, logits)

    def fill(self, microbatches: Sequence[MicroBatch], runner: PipelineRunner, read: LogProbs) -> None:
        """Set the teacher's fields of micro-batches on the last stage, unless their samples have them. `read`: of labels."""
        if self.model is None:
            return
        chunks = self.model.modules
        with torch.no_grad(), lora.showing(chunks, self.adapter), router.own_choice(microbatches):
            if self.objective.objective == "sampled":
                for micro, (log_probs,) in zip(microbatches, runner.run([*microbatches], chunks, read), strict=False):
                    micro.teacher_log_probs = log_probs
            else:
                with self._hidden_states(chunks):
                    found = runner.run([*microbatches], chunks, None)
                for micro, hidden in zip(microbatches, found, strict=False):
                    self._keep(micro, hidden.to(self.mbridge.dtype), read.temperature, runner.logits_chunk_tokens)
        if isinstance(self.model, FrozenModel):
            self.model.release()

    @contextmanager
    def _hidden_states(self, chunks: list[torch.nn.Module]) -> Iterator[None]:
        """Within the block the output layer gives its input; after it the weight of the pass is known.

        A weight that Megatron-FSDP has gathered is copied, once.
        """
        layers = [layer for chunk in chunks if (layer := head.output_layer(gpt_model(chunk))) is not None]
        for layer in layers:
            layer.gives_hidden = True
        try:
            yield
        finally:
            for layer in layers:
                layer.gives_hidden = False
        for layer in layers:
            assert layer.used_weight is not None
            if self.weight is None:
                self.weight = layer.used_weight if self.wrap == "ddp" else layer.used_weight.clone()
            layer.used_weight, self.product = None, layer.product

    def _keep(self, micro: MicroBatch, hidden: torch.Tensor, temperature: float, chunk_tokens: int) -> None:
        if self.objective.objective == "full":
            micro.teacher_hidden = hidden
            return
        group, top_k = mpu.get_tensor_model_parallel_group(), self.objective.top_k
        chunks = [hidden[0][part] for part in head.parts(hidden.shape[1], chunk_tokens)]
        found = [top_tokens(self._logits(chunk), top_k, temperature, group) for chunk in chunks]
        ids, log_probs = (torch.cat(each)[None] for each in zip(*found, strict=True))
        micro.teacher_top_ids, micro.teacher_top_log_probs = ids, log_probs

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, vocabulary / tensor size] of hidden states [T, size]."""
        assert self.weight is not None
        logits: torch.Tensor = vocabulary.hide_padding(self.product(hidden, self.weight), self.mbridge)
        return logits

    def parameters(self) -> Iterator[torch.Tensor]:
        """Tensors whose storages it keeps in memory between passes."""
        if self.model is not None:
            yield from self.model.parameters()
        if self.weight is not None:
            yield self.weight
