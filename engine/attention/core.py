"""Modules that our layer spec plugs into megatron-core: core attention over packed sequences, a sequence-parallel RMSNorm.

No TransformerEngine, apex or flash-attn. With CUDA, packed sequences in 16 bits go through flash.py; otherwise sequences of
similar length are padded and batched for torch's attention (dense.py), where a sliding window is a mask. With fusions the rotary
embedding is done here too (megatron-core's, rope_utils.py:185, synchronises with the device twice a layer). Leaves out dropout.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from engine.attention import context, dense, flash, fused, rope, windows
from engine.runtime import device
from engine.runtime.megatron import PackedSeqParams, TransformerConfig, parallel_state, tensor_parallel
from engine.batch.packed import PackedSequences


class CoreAttention(torch.nn.Module):
    """Causal softmax attention with grouped queries, a drop-in for megatron-core's DotProductAttention in a layer spec.

    Within a sliding window where windows.py has put one into the config for this layer.

    Takes query [tokens, heads, dim], key and value [tokens, groups, dim] with `packed_seq_params`, or [sequence, batch, ...]
    without, and returns [tokens, heads * dim] or [sequence, batch, heads * dim]. Values may have a smaller dim than queries and
    keys, which is then the result's.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, *_: Any, softmax_scale: float | None = None, **__: Any
    ) -> None:
        super().__init__()
        self.scale, self.window = softmax_scale, windows.layer_window(config, layer_number)
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            self._add_sinks(config)
        self.rotates = config.no_rope_freq is not None and config.no_rope_freq[layer_number - 1] == rope.BY_CORE_ATTENTION

    def _add_sinks(self, config: TransformerConfig) -> None:
        """A logit for each head of this rank. megatron-core's own (dot_product_attention.py:126) does not say that ranks have
        different ones, so that the norm of all gradients leaves out those of all tensor-parallel ranks but the first.
        """
        number = config.num_attention_heads // config.tensor_model_parallel_size
        sinks = torch.zeros(number, dtype=config.params_dtype, device=device.compute_device())
        self.softmax_offset = torch.nn.Parameter(sinks)
        tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,  # masks and biases, which are not used
        packed_seq_params: PackedSeqParams | None = None,
        **__: Any,
    ) -> torch.Tensor:
        if packed_seq_params is None:
            assert not self.rotates
            out = self._dense(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return out.permute(2, 0, 1, 3).flatten(2)
        if self.rotates:
            assert isinstance(packed_seq_params, PackedSequences)
            assert packed_seq_params.rotary is not None
            query, key = fused.rotate(query, key, self._tables(packed_seq_params.rotary))
        part = getattr(packed_seq_params, "context", None)
        if part is None:
            return self._packed(query, key, value, packed_seq_params)

        def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self._packed(q, k, v, packed_seq_params).view(*q.shape[:2], v.shape[-1])

        attended = context.attend(part, query, key, value, self.scale, whole, self.window, self.softmax_offset)
        return attended.flatten(1)

    def _tables(self, rotary: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The tables of this layer."""
        return rotary

    def _packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed_seq_params: PackedSeqParams
    ) -> torch.Tensor:
        assert isinstance(packed_seq_params, PackedSequences)
        if query.is_cuda and query.dtype is not torch.float32 and self.softmax_offset is None:  # no sinks, 16 bits
            return flash.attend(query, key, value, packed_seq_params, self.scale, self.window).flatten(1)
        return self._grouped(query, key, value, packed_seq_params).flatten(1)

    def _dense(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """All of [batch, heads, tokens, dim]; later tokens never reach earlier ones, so right padding does no harm."""
        num_tokens = query.shape[2]
        if not 0 < self.window < num_tokens:
            return dense.attend(query, key, value, self.scale, sinks=self._sinks(query))
        mask = context.causal_mask(num_tokens, num_tokens, self.window, query.device)
        return dense.attend(query, key, value, self.scale, mask, self._sinks(query))

    def _sinks(self, query: torch.Tensor) -> torch.Tensor | None:
        """The sinks of the heads of `query`, [batch, heads, ...], which Ulysses shares among context ranks."""
        sinks: torch.Tensor | None = self.softmax_offset
        number = query.shape[1]
        if sinks is None or number == len(sinks):
            return sinks
        return sinks[number * parallel_state.get_context_parallel_rank() :][:number]

    def _grouped(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
        groups, inverse = packed.length_groups
        pieces = []
        for index, valid in groups:
            q, k, v = (x[index].transpose(1, 2) for x in (query, key, value))
            pieces.append(self._dense(q, k, v).transpose(1, 2).flatten(0, 1)[valid])
        return torch.cat(pieces)[inverse]


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm for a layer spec, also under sequence parallelism, which torch_norm.py:32 refuses.

    Says that its weight is sequence-parallel, so that finalize_model_grads sums its gradient over tensor-parallel ranks.
    With `layernorm_zero_centered_gamma` 1 is added to the weight, in float32 as all else then.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        self.is_zero_centered = bool(config.layernorm_zero_centered_gamma)
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        if config.sequence_parallel:
            self.weight.sequence_parallel = True  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        torch.nn.init.constant_(self.weight, 0.0 if self.is_zero_centered else 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_zero_centered:
            return super().forward(x)
        return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)
