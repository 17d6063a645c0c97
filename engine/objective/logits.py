"""Log-probs, entropies and greedy matches from the logits of every token.

A micro-batch of many tokens is read by the output layer itself (head.py), a chunk of tokens after another, so that the logits of
one chunk alone are in memory; the backward pass computes them again. Shorter ones are read of the model's output, the logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.attention import context
from engine.model import exact
from engine.objective import head, loss
from engine.batch.batch import MicroBatch
from engine.objective.entropy import token_entropy
from engine.objective.head import LogitsFunction, Values
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

    def differentiable(self) -> LogProbs:
        """What reads the log-probs alone."""
        return dataclasses.replace(self, has_entropy=False)


@dataclass(frozen=True)
class ScoresAndMatches:
    """Reads the labels' log-probs and, as 1, where the largest logit is the label's."""

    log_probs: LogProbs

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> Values:
        whole = tensor_parallel.gather_from_tensor_model_parallel_region(logits)
        matches = (whole.argmax(-1) == labels).squeeze(0).float()
        return (*self.log_probs(logits, labels), matches)


@contextmanager
def read_in_chunks(
    chunk: torch.nn.Module, labels: torch.Tensor, read: LogitsFunction, read_again: LogitsFunction, chunk_tokens: int
) -> Iterator[None]:
    """Where there are more tokens than `chunk_tokens` and this stage has the output layer, the model's output is what is read."""
    layer = head.output_layer(chunk) if labels.shape[1] > chunk_tokens else None
    if layer is None:
        yield
        return
    layer.request = head.Request(labels, read, read_again, chunk_tokens)
    try:
        yield
    finally:
        layer.request = None


def values(output: torch.Tensor, micro: MicroBatch, read: LogitsFunction, chunk_tokens: int) -> Values:
    """What is read, from the model's output; of the whole micro-batch where context-parallel ranks share it."""
    found: Values = output[0].unbind(-1) if micro.labels.shape[1] > chunk_tokens else read(output, micro.labels)
    part = micro.sequences.context
    return found if part is None else tuple(context.gather(each, part) for each in found)
