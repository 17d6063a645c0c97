"""The output layer: the product that makes logits of hidden states, and reading the logits chunk by chunk inside the layer.

A product is a function of hidden states [T, size] and the weight [vocabulary / tensor size, size], through which gradients flow.
Leaves out values read from the logits (objective/logits.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from engine.runtime.megatron import ColumnParallelLinear, tensor_parallel

Values = tuple[torch.Tensor, ...]  # each float32 [T]
# of logits [1, T, vocabulary / tensor size], labels int64 [1, T], and other values of each token [1, T, ...]
LogitsFunction = Callable[..., Values]
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Reader(NamedTuple):
    """Functions that read values from logits. Only the first `num_trained` values have a gradient."""

    read: LogitsFunction
    reread: LogitsFunction  # in the backward pass, where logits are read in chunks; gives at least these values
    num_trained: int = 1


class Request(NamedTuple):
    """Reading of a micro-batch's logits, in chunks of at most `chunk_tokens` tokens."""

    targets: tuple[torch.Tensor, ...]  # what the reader gets beside logits; the labels are the first
    reader: Reader
    chunk_tokens: int

    @property
    def parts(self) -> list[slice]:
        return parts(self.targets[0].shape[1], self.chunk_tokens)

    def read(self, function: LogitsFunction, logits: torch.Tensor, part: slice) -> Values:
        """The values of some tokens, `part`, with their logits."""
        return function(logits, *(each[:, part] for each in self.targets))


def plain(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product in the dtype of the inputs."""
    return hidden @ weight.t()


def in_float32(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """vLLM's product with head_dtype float32 (layers/logits_processor.py:_apply_head); gradients in the inputs' dtype."""
    return _InFloat32.apply(hidden, weight)  # type: ignore[no-any-return, no-untyped-call]


class _InFloat32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        if hidden.is_cuda and hidden.dtype is not torch.float32:  # without a copy of the weight
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return hidden.float() @ weight.float().t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        gradient = gradients[0].to(weight.dtype)
        own_gradient(weight, ctx.needs_input_grad[1])
        return gradient @ weight, gradient.t() @ hidden if ctx.needs_input_grad[1] else None


def own_gradient(weight: torch.Tensor, is_needed: bool) -> None:
    """Mark that a weight's gradient comes from autograd; else DDP assumes that megatron-core has added it (layers.py:610)."""
    if is_needed:
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]


class OutputLayer(ColumnParallelLinear):  # type: ignore[misc]
    """megatron-core's with another product. With a `next_request` the next output is what it reads, float32 [T, 1, values]; if it
    `gives_hidden` that is its input, whole [T, 1, size], and the weight is remembered.
    """

    next_request: Request | None = None
    gives_hidden = False
    used_weight: torch.Tensor | None = None
    product: Product = staticmethod(plain)

    def forward(self, input_: torch.Tensor, weight: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        request, self.next_request = self.next_request, None
        if request is None and self.product is plain and not self.gives_hidden:
            return super().forward(input_, weight, *args, **kwargs)
        if self.sequence_parallel:
            gather = tensor_parallel.gather_from_sequence_parallel_region
            hidden = gather(input_, tensor_parallel_output_grad=True, group=self.tp_group)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(input_, group=self.tp_group)
        weight = self.weight if weight is None else weight
        if self.gives_hidden:
            self.used_weight = weight.detach()
            return hidden, None
        hidden = hidden.squeeze(1)
        if request is None:
            return self.product(hidden, weight)[:, None], None
        values = _InChunks.apply(hidden, weight, self.product, request)  # type: ignore[no-untyped-call]
        return torch.stack(values, -1)[:, None], None


def replace_output_layer(model: Any) -> None:
    """Make the output layer of a GPTModel one of ours, where this stage has one. Hooks, names and references stay."""
    if output_layer(model) is not None:
        model.output_layer.__class__ = OutputLayer


def output_layer(model: Any) -> OutputLayer | None:
    """A GPTModel's; None on stages without one."""
    return getattr(model, "output_layer", None)


class _InChunks(torch.autograd.Function):
    """Hidden states [T, size] and weight [vocabulary / tensor size, size] to the values that the request's reader reads."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, product: Product, request: Request) -> Values:
        ctx.save_for_backward(hidden, weight)
        ctx.product, ctx.request = product, request
        read = request.reader.read
        parts = [request.read(read, product(hidden[part], weight)[None], part) for part in request.parts]
        results = tuple(torch.cat(columns) for columns in zip(*parts, strict=True))
        ctx.mark_non_differentiable(*results[request.reader.num_trained :])
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        own_gradient(weight, ctx.needs_input_grad[1])
        request = ctx.request
        number = request.reader.num_trained
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros(weight.shape, device=weight.device) if ctx.needs_input_grad[1] else None
        for part in request.parts:
            logits = ctx.product(hidden[part], weight)[None].requires_grad_()
            with torch.enable_grad():
                trained = request.read(request.reader.reread, logits, part)[:number]
            of_values = [gradient[part] for gradient in gradients[:number]]
            of_logits = torch.autograd.grad(trained, logits, of_values)[0][0].to(weight.dtype)
            of_hidden[part] = of_logits @ weight
            if of_weight is not None:
                of_weight += of_logits.t() @ hidden[part]
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype), None, None


def parts(num_tokens: int, chunk_tokens: int) -> list[slice]:
    """Nearly equal chunks of the tokens, of at most `chunk_tokens`."""
    size = -(-num_tokens // -(-num_tokens // chunk_tokens))
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]
