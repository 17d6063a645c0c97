"""A vocabulary that tensor parallelism does not divide: embedding and output layer get rows of zeros, which no result depends on.

mbridge adds the rows where weights are loaded and cuts them off where they are exported (bridge.py:_weight_to_mcore_format,
:_weight_to_hf_format). Before logits are read, those of the rows become HIDDEN_LOGIT: softmax gives them the probability 0, and
they get gradients of 0, so that they stay zeros, and norms are those of the model without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

ROWS_PER_RANK = 128  # each rank has a multiple of it, as Megatron-LM's --make-vocab-size-divisible-by, for fast matrix products
HIDDEN_LOGIT = -1e30  # or the least of the dtype; finite, so that 0 * HIDDEN_LOGIT is 0 in an entropy; exp of it underflows
Rest = ParamSpec("Rest")
Result = TypeVar("Result")


def padding_multiple(vocab_size: int, tensor_size: int) -> int | None:
    """The padded vocabulary is a multiple of this; None where it needs no padding."""
    return ROWS_PER_RANK * tensor_size if vocab_size % tensor_size else None


@torch.no_grad()
def hide_padding(logits: torch.Tensor, mbridge: Any) -> torch.Tensor:
    """Set the padding's logits to HIDDEN_LOGIT, in place: their gradient is then 0 by itself.

    Through `data`, which leaves the version as it is: torch makes a view of a newer version another grad_fn, without the hook
    by which Megatron-FSDP begins a backward pass (megatron-fsdp 0.6.1 megatron_fsdp.py:_root_pre_backward).

    `logits`: [..., padded vocabulary / tensor size], this rank's shard; returned. `mbridge`: the bridge that has built the model.
    """
    if mbridge.padded_vocab_size > mbridge.vocab_size:
        first = mbridge.mpu.tp_rank * logits.shape[-1]
        logits.data[..., max(0, mbridge.vocab_size - first) :] = max(HIDDEN_LOGIT, torch.finfo(logits.dtype).min)
    return logits


def mask_padding(
    function: Callable[Concatenate[torch.Tensor, Rest], Result], mbridge: Any
) -> Callable[Concatenate[torch.Tensor, Rest], Result]:
    """The function of logits, its first argument, applied to logits without the vocabulary's padding."""

    def of_tokens(logits: torch.Tensor, /, *args: Rest.args, **kwargs: Rest.kwargs) -> Result:
        return function(hide_padding(logits, mbridge), *args, **kwargs)

    return of_tokens
