"""Log-probs, entropies and greedy matches from the logits of every token.

A micro-batch of many tokens is read by the output layer itself, a chunk of tokens after another, so that the logits of one chunk
alone are in memory; the backward pass computes them again. Shorter ones are read of the model's output, the logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from engine.attention import context
from engine.objective import loss
from engine.batch.batch import MicroBatch
from engine.objective.entropy import token_entropy
from engine.runtime.megatron import ColumnParallelLinear, tensor_parallel
from engine.model.build import gpt_model

Values = tuple[torch.Tensor, ...]  # each float32 [T]
# of logits [1, T, vocabulary / tensor size] and labels int64 [1, T]
LogitsFunction = Callable[[torch.Tensor, torch.Tensor], Values]


@dataclass(frozen=True)
class LogProbs:
    """Reads the labels' log-probs under softmax(logits / temperature) and, if asked for, the entropies."""

    temperature: float
    use_fused: bool
    has_entropy: bool = False

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> Values:
        log_probs = loss.token_log_probs(logits, labels, self.temperature, self.use_fused)
        return (log_probs, token_entropy(logits, self.temperature, self.use_fused)) if self.has_entropy else (log_probs,)

    def differentiable(self) -> LogProbs:
        """What reads the log-probs alone."""
        return dataclasses.replace(self, has_entropy=False)


def greedy_matches(logits: torch.Tensor, labels: torch.Tensor) -> Values:
    """1 where the largest logit is the label's."""
    whole = tensor_parallel.gather_from_tensor_model_parallel_region(logits)
    return ((whole.argmax(-1) == labels).squeeze(0).float(),)


class _Request(NamedTuple):
    labels: torch.Tensor
    read: LogitsFunction
    read_again: LogitsFunction  # in the backward pass: the first value, which alone has a gradient
    chunk_tokens: int


class OutputLayer(ColumnParallelLinear):  # type: ignore[misc]
    """megatron-core's; within `read_in_chunks` its output is what is read, float32 [T, 1, values], in the place of logits."""

    request: _Request | None = None

    def forward(self, input_: torch.Tensor, weight: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if self.request is None:
            return super().forward(input_, weight, *args, **kwargs)
        if self.sequence_parallel:
            gather = tensor_parallel.gather_from_sequence_parallel_region
            hidden = gather(input_, tensor_parallel_output_grad=True, group=self.tp_group)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(input_, group=self.tp_group)
        weight = self.weight if weight is None else weight
        values = _InChunks.apply(hidden.squeeze(1), weight, self.request)  # type: ignore[no-untyped-call]
        return torch.stack(values, -1)[:, None], None


@contextmanager
def read_in_chunks(
    chunk: torch.nn.Module, labels: torch.Tensor, read: LogitsFunction, read_again: LogitsFunction, chunk_tokens: int
) -> Iterator[None]:
    """Where there are more tokens than `chunk_tokens` and this stage has the output layer, the model's output is what is read."""
    layer = getattr(gpt_model(chunk), "output_layer", None)
    if layer is None or labels.shape[1] <= chunk_tokens:
        yield
        return
    layer.__class__ = OutputLayer  # hooks, names and references stay
    layer.request = _Request(labels, read, read_again, chunk_tokens)
    try:
        yield
    finally:
        layer.request = None


def values(output: torch.Tensor, micro: MicroBatch, read: LogitsFunction, chunk_tokens: int) -> Values:
    """What is read, from the model's output; of the whole micro-batch where context-parallel ranks share it."""
    found: Values = output[0].unbind(-1) if micro.labels.shape[1] > chunk_tokens else read(output, micro.labels)
    part = micro.sequences.context
    return found if part is None else tuple(context.gather(each, part) for each in found)


class _InChunks(torch.autograd.Function):
    """hidden [T, size] and weight [vocabulary / tensor size, size] to what the request's reader reads."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, request: _Request) -> Values:
        ctx.save_for_backward(hidden, weight)
        ctx.request = request
        parts = [request.read((hidden[part] @ weight.t())[None], request.labels[:, part]) for part in _parts(request)]
        results = tuple(torch.cat(columns) for columns in zip(*parts, strict=True))
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:  # else DDP takes this gradient for one that megatron-core's linear has added (layers.py:610)
            weight.grad_added_to_main_grad = False
        request, (gradient, *_) = ctx.request, gradients
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros(weight.shape, device=weight.device) if ctx.needs_input_grad[1] else None
        for part in _parts(request):
            logits = (hidden[part] @ weight.t())[None].requires_grad_()
            with torch.enable_grad():
                first, *_ = request.read_again(logits, request.labels[:, part])
            (of_logits,) = torch.autograd.grad(first, logits, gradient[part])
            of_hidden[part] = of_logits[0] @ weight
            if of_weight is not None:
                of_weight += of_logits[0].t() @ hidden[part]
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype), None


def _parts(request: _Request) -> list[slice]:
    """Nearly equal chunks of the tokens, of at most `chunk_tokens`."""
    num_tokens = request.labels.shape[1]
    size = -(-num_tokens // -(-num_tokens // request.chunk_tokens))
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]
