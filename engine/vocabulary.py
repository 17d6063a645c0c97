"""A vocabulary that tensor parallelism does not divide: embedding and output layer get rows of zeros, which no result depends on.

mbridge adds the rows where weights are loaded and cuts them off where they are exported (bridge.py:_weight_to_mcore_format,
:_weight_to_hf_format). Their logits become HIDDEN_LOGIT where the output layer makes them, so that softmax gives them the
probability 0, and they get gradients of 0: they stay zeros, and norms are those of the model without them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

ROWS_PER_RANK = 128  # each rank has a multiple of it, as Megatron-LM's --make-vocab-size-divisible-by, for fast matrix products
HIDDEN_LOGIT = -1e30  # finite in bfloat16, so that 0 * HIDDEN_LOGIT is 0 in an entropy; exp underflows at any temperature


def padding_multiple(vocab_size: int, tensor_size: int) -> int | None:
    """What the padded vocabulary is a multiple of; None where it needs no padding."""
    return ROWS_PER_RANK * tensor_size if vocab_size % tensor_size else None


def hide_padding(model: Any, vocab_size: int) -> None:
    """Let a GPTModel's output layer, where this pipeline stage has one, give HIDDEN_LOGIT for all tokens from `vocab_size` on."""
    layer = getattr(model, "output_layer", None)
    if layer is None:
        return
    width = layer.output_size // layer.tp_group.size()
    num_own = min(max(vocab_size - layer.tp_group.rank() * width, 0), width)
    if num_own < width:
        layer.register_forward_hook(partial(_hide, num_own))


@torch.no_grad()
def _hide(num_own: int, _layer: Any, _inputs: Any, output: tuple[torch.Tensor, Any]) -> None:
    """In place: no other tensor of the logits' size is made; their softmax's gradient is 0 there by itself."""
    output[0][..., num_own:] = HIDDEN_LOGIT
