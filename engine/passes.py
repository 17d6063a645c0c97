"""Micro-batches through the model: megatron-core's pipeline schedule, forward and backward.

Leaves out the logits' values and the loss (objective/), and the gradients' further way (engine.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from engine.attention import fused, latent
from engine.objective import logits
from engine.model import exact, head
from engine.batch.batch import MicroBatch
from engine.runtime.megatron import get_forward_backward_func
from engine.model.build import gpt_model

LossFunction = Callable[[MicroBatch, head.Values], tuple[torch.Tensor, Any]]


class PipelineRunner:
    """Runs an engine's micro-batches."""

    def __init__(self, mbridge: Any, logits_chunk_tokens: int, *, use_fused: bool, reads_in_layer: bool = False) -> None:
        """`mbridge`: the bridge that built the model; `logits_chunk_tokens`: see EngineConfig; `reads_in_layer`: also those of
        shorter micro-batches.
        """
        self.mbridge, self.logits_chunk_tokens, self.use_fused = mbridge, logits_chunk_tokens, use_fused
        self.reads_in_layer = reads_in_layer
        self.rotation = exact.Rotation(mbridge.hf_config) if mbridge.is_exact else latent.rotation(mbridge.hf_config)

    def run(
        self,
        microbatches: list[MicroBatch],
        chunks: list[torch.nn.Module],
        read: head.LogitsFunction | None,
        loss_function: LossFunction | None = None,
    ) -> list[Any]:
        """Run megatron-core's schedule. Returns what `loss_function` reports of each micro-batch, [] on all but the last stage.

        Without `loss_function` there is no backward pass, and the values that are read are returned; without `read` what the
        model gives, [1, T, ...], on each context-parallel rank its part.
        """
        options, reader = {}, None if read is None else logits.reader(read, self.mbridge)
        if self.use_fused and self.mbridge.dtype is not torch.float32:
            options["fp32_output"] = False  # module.py:453: else the wrapper makes a float32 copy of all logits

        def forward_step(iterator: Iterator[MicroBatch], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            micro = next(iterator)
            if reader is not None:
                request = head.Request(micro.targets, reader, self.logits_chunk_tokens)
                logits.read_in_layer(gpt_model(chunk), request if self._is_read_in_layer(micro) else None)
            output = chunk(micro.tokens, micro.position_ids, None, packed_seq_params=micro.sequences, **options)
            return output, partial(report, micro)

        def report(micro: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, Any]:
            if reader is None:
                return output.new_zeros(()), output
            values = logits.values(output, micro, reader, is_read=self._is_read_in_layer(micro))
            return loss_function(micro, values) if loss_function else (values[0].new_zeros(()), values)

        iterators = [iter(microbatches) for _ in chunks]
        return get_forward_backward_func()(  # type: ignore[no-any-return]
            forward_step_func=forward_step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(microbatches),
            seq_length=max(micro.num_tokens for micro in microbatches),
            micro_batch_size=1,
            forward_only=loss_function is None,
        )

    def _is_read_in_layer(self, micro: MicroBatch) -> bool:
        return self.reads_in_layer or micro.labels.shape[1] > self.logits_chunk_tokens

    def set_rotary(self, microbatches: list[MicroBatch], chunk: torch.nn.Module) -> None:
        """Add the tables by which the engine's own attention rotates queries and keys; none where megatron-core rotates them."""
        for micro in microbatches:
            sequences = micro.sequences
            if self.rotation is not None:
                sequences.rotary = self.rotation.tables(micro.position_ids)
            elif self.use_fused:
                embedding = gpt_model(chunk).rotary_pos_emb
                sequences.rotary = fused.rotary_tables(embedding, micro.position_ids, sequences.max_seqlen_q)
