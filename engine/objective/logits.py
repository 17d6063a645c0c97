"""Log-probs, entropies and greedy matches from the logits of every token.

The output layer itself (model/head.py) reads a micro-batch of many tokens, chunk after chunk, so that only one chunk's logits are
in memory; the backward pass computes them again. Shorter micro-batches are read from the model's output, the logits.
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
from engine.objective.entropy import token_entropy
from engine.model.head import LogitsFunction, Reader, Values
from engine.runtime.megatron import tensor_parallel


@dataclass(frozen=True)
class LogProbs:
    """Reads the labels' log-probs under softmax(logits / temperature) and, if asked for, the entropies."""

    temperature: float
    use_fused: bool
    has_entropy: bool = False
    is_exact: bool = False

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> Values:
        if self.is_exact:
            log_probs = exact.log_probs(logits, labels, self.temperature, use_fused=self.use_fused)
        else:
            log_probs = loss.token_log_probs(logits, labels, self.temperature, self.use_fused)
        return (log_probs, token_entropy(logits, self.temperature, self.use_fused)) if self.has_entropy else (log_probs,)


@dataclass(frozen=True)
class ScoresAndMatches:
    """Reads the labels' log-probs and, as 1, where the largest logit is the label's."""

    log_probs: LogProbs

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> Values:
        whole = tensor_parallel.gather_from_tensor_model_parallel_region(logits)
        matches = (whole.argmax(-1) == labels).squeeze(0).float()
        return (*self.log_probs(logits, labels), matches)


def reader(read: LogitsFunction, mbridge: Any) -> Reader:
    """`read` of the vocabulary without its padding; rereading leaves out what has no gradient."""
    reread = dataclasses.replace(read, has_entropy=False) if isinstance(read, LogProbs) else read
    return Reader(vocabulary.mask_padding(read, mbridge), vocabulary.mask_padding(reread, mbridge))


def read_in_chunks(model: Any, labels: torch.Tensor, reader: Reader, chunk_tokens: int) -> None:
    """With more tokens than `chunk_tokens`, let the next output of this GPTModel be the values that are read, not logits."""
    layer = head.output_layer(model)
    if layer is not None:
        layer.next_request = head.Request(labels, reader, chunk_tokens) if labels.shape[1] > chunk_tokens else None


def values(output: torch.Tensor, micro: MicroBatch, reader: Reader, chunk_tokens: int) -> Values:
    """The values read from the model's output; of the whole micro-batch where context-parallel ranks share it."""
    found: Values = output[0].unbind(-1) if micro.labels.shape[1] > chunk_tokens else reader.read(output, micro.labels)
    part = micro.sequences.context
    return found if part is None else tuple(context.gather(each, part) for each in found)
