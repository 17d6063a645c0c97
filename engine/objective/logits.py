"""Log-probs, divergences from a teacher, entropies and greedy matches from the logits of every token.

The output layer itself (model/head.py) reads a micro-batch of many tokens, chunk after chunk, so that only one chunk's logits are
in memory; the backward pass computes them again. Shorter micro-batches are read from the model's output, the logits, unless they
are compared with a teacher's.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention import context
from engine.model import exact, head, vocabulary
from engine.objective import loss
from engine.batch.batch import MicroBatch
from engine.objective.distillation import Divergence
from engine.objective.entropy import entropy_with_gradient, token_entropy
from engine.model.head import LogitsFunction, Reader, Values
from engine.runtime.megatron import tensor_parallel


@dataclass(frozen=True)
class LogProbs:
    """Reads the labels' log-probs under softmax(logits / temperature) and, if asked for, divergences from a teacher and the
    entropies.

    Where `labels` has more rows, those of a support (MicroBatch.targets), the softmax is over these tokens alone; divergences
    and entropies are over the whole vocabulary.
    """

    temperature: float
    use_fused: bool
    has_entropy: bool = False
    is_exact: bool = False
    trains_entropy: bool = False  # entropies have a gradient
    divergence: Divergence | None = None

    @property
    def num_trained(self) -> int:
        """Values that have a gradient, the first ones."""
        return 1 + (self.divergence is not None) + self.trains_entropy

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, *teacher: torch.Tensor) -> Values:
        if len(labels) > 1:
            log_probs = loss.support_log_probs(logits, labels, self.temperature)
        elif self.is_exact:
            log_probs = exact.log_probs(logits, labels, self.temperature, use_fused=self.use_fused)
        else:
            log_probs = loss.token_log_probs(logits, labels, self.temperature, self.use_fused)
        found = (log_probs,) if self.divergence is None else (log_probs, self.divergence(logits, *teacher))
        if self.trains_entropy:
            return *found, entropy_with_gradient(logits, self.temperature)
        return (*found, token_entropy(logits, self.temperature, self.use_fused)) if self.has_entropy else found


@dataclass(frozen=True)
class ScoresAndMatches:
    """Reads the labels' log-probs and, as 1, where the largest logit is the label's."""

    log_probs: LogProbs

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, *_: torch.Tensor) -> Values:
        whole = tensor_parallel.gather_from_tensor_model_parallel_region(logits)
        matches = (whole.argmax(-1) == labels[:1]).squeeze(0).float()
        return (*self.log_probs(logits, labels), matches)


def reader(read: LogitsFunction, mbridge: Any) -> Reader:
    """`read` of the vocabulary without its padding; rereading leaves out what has no gradient."""
    reread = dataclasses.replace(read, has_entropy=False) if isinstance(read, LogProbs) else read
    num_trained = read.num_trained if isinstance(read, LogProbs) else 1
    return Reader(vocabulary.mask_padding(read, mbridge), vocabulary.mask_padding(reread, mbridge), num_trained)


def read_in_layer(model: Any, request: head.Request | None) -> None:
    """With a request, let the next output of this GPTModel be the values that are read, not logits."""
    layer = head.output_layer(model)
    if layer is not None:
        layer.next_request = request


def values(output: torch.Tensor, micro: MicroBatch, reader: Reader, *, is_read: bool) -> Values:
    """The values from the model's output, which are in it where it `is_read`; of the whole micro-batch where context-parallel
    ranks share it.
    """
    found: Values = output[0].unbind(-1) if is_read else reader.read(output, *micro.targets)
    part = micro.sequences.context
    return found if part is None else tuple(context.gather(each, part) for each in found)
