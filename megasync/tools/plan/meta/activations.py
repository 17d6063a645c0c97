"""One micro-batch forward and backward through a rank's chunks on the meta device: its memory beside weights and state.

The engine's own output layer reads log-probs in chunks as in training; a stage that is not the last ends with its hidden states.
Leaves out schedules: how many micro-batches wait at once for their backward pass is counted in layout.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.attention import context, fused, latent
from engine.batch.packed import ContextPart, PackedSequences, Routing
from engine.config import EngineConfig
from engine.model import head
from engine.model.build import gpt_model
from engine.objective import logits
from engine.runtime.megatron import parallel_state as mpu
from megasync.tools.plan.meta import stand_ins
from megasync.tools.plan.meta.ranks import META, MetaRank, OnMeta
from megasync.tools.plan.meta.tracker import Tracker

FEW_LAYERS = (3, 6)


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch, of all of a rank's chunks. Peaks include `held`."""

    held: int  # kept for the backward pass
    peak: int
    head_peak: int  # until the output layer's backward pass is over
    head_end: int  # at that moment: the layers'
    layer_peak: int  # from then until the last layer's backward pass is over


class Traced(NamedTuple):
    """The rank that is traced, with the sequences of its micro-batch and the kernels of its device."""

    rank: MetaRank
    engine: EngineConfig
    lengths: tuple[int, ...]
    has_entropy: bool
    kernels: Sequence[stand_ins.Kernel]

    @property
    def use_fused(self) -> bool:
        return self.engine.fusions == "all"


def trace(
    rank: MetaRank,
    engine: EngineConfig,
    lengths: tuple[int, ...],
    *,
    has_entropy: bool = False,
    kernels: Sequence[stand_ins.Kernel] | None = None,
) -> Activations:
    """`lengths`: tokens of the micro-batch's sequences, over all context ranks; `kernels`: those of GPUs by default.

    Of more than six equal layers three and six are traced, and the difference is that of three layers.
    """
    traced = Traced(rank, engine, lengths, has_entropy, stand_ins.kernels_of(rank.bridge.dtype) if kernels is None else kernels)
    found = [_trace_layers(traced, chunk) for chunk in rank.chunks]
    held = sum(each.held for each in found)
    moments = ("peak", "head_peak", "head_end", "layer_peak")
    return Activations(held, **{name: max(getattr(each, name) + held - each.held for each in found) for name in moments})


def packed(lengths: tuple[int, ...], engine: EngineConfig) -> PackedSequences:
    """Tensors whose numbers are read are on the CPU, all others on the meta device."""
    ends = torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))
    longest = max(lengths)
    sequences = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=lengths,
    )
    if engine.parallel.context > 1:
        group, uses_ulysses = mpu.get_context_parallel_group(), engine.parallel.context_attention == "ulysses"
        sequences.context = part = ContextPart.from_lengths(lengths, group, torch.device("cpu"), uses_ulysses=uses_ulysses)
        assert part.prefixes  # computed here, from numbers that the meta device does not have
    return sequences


def _trace_layers(traced: Traced, chunk: torch.nn.Module) -> Activations:
    decoder = gpt_model(chunk).decoder
    layers, count = decoder.layers, len(decoder.layers)
    if count <= FEW_LAYERS[1] or not _are_alike(layers):
        return _trace_chunk(traced, chunk)
    traces = []
    for some in FEW_LAYERS:
        decoder.layers, decoder.num_layers_per_pipeline_rank = layers[:some], some
        traces.append(_trace_chunk(traced, chunk))
    decoder.layers, decoder.num_layers_per_pipeline_rank = layers, count
    few, more = traces
    others = (more.held - few.held) * (count - FEW_LAYERS[1]) // (FEW_LAYERS[1] - FEW_LAYERS[0])
    # memory after the last layer, such as the gradient of the embeddings, does not grow with the layers: it may be more.peak
    found = Activations(*(size + others for size in dataclasses.astuple(more)))
    return dataclasses.replace(found, peak=max(found.head_peak, found.layer_peak, more.peak))


def _are_alike(layers: Any) -> bool:
    """Whether all layers have the same modules, sizes and windows."""
    kinds = {
        tuple((name, type(module).__name__, getattr(module, "window", None)) for name, module in layer.named_modules())
        + tuple(tuple(parameter.shape) for parameter in layer.parameters())
        for layer in layers
    }
    return len(kinds) == 1


def _trace_chunk(traced: Traced, chunk: Any) -> Activations:
    """Forward and backward pass."""
    tracker, model, moments = Tracker(), gpt_model(chunk), dict[str, tuple[int, int]]()
    tracker.leave_out(chunk.parameters())
    tokens, sequences = _inputs(traced, model)

    def ends_with_gradient_of(module: Any, phase: str) -> Any:
        """Keeps the phase's peak, and the bytes at its end, when the module's first input gets its gradient."""

        def keep(_: torch.Tensor) -> None:
            if phase not in moments:  # under recompute the input of the second forward pass comes first
                moments[phase] = tracker.restart_peak(), tracker.bytes_now

        def watch(_: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            states = args[0] if args else options["hidden_states"]
            if states.requires_grad:
                states.register_hook(keep)

        return module.register_forward_pre_hook(watch, with_kwargs=True)

    hooks = [ends_with_gradient_of(model.decoder.layers[-1], "layer")]
    if model.post_process:
        hooks.append(ends_with_gradient_of(model.decoder.final_layernorm, "head"))
    with stand_ins.installed(tracker, traced.kernels, use_fused=traced.use_fused), OnMeta(), tracker:
        loss = _forward(traced, chunk, tokens, sequences)
        held = tracker.bytes_now
        torch.autograd.backward(loss)
    for hook in hooks:
        hook.remove()
    moments = {"head": (held, held), **moments}
    peak = max(tracker.peak_bytes, *(each for each, _ in moments.values()))
    return Activations(held, peak, *moments["head"], moments["layer"][0])


def _inputs(traced: Traced, model: Any) -> tuple[torch.Tensor, PackedSequences]:
    """Tokens and sequences of this rank; a stage that is not the first also gets hidden states."""
    rank, engine, lengths = traced.rank, traced.engine, traced.lengths
    own_tokens = sum(lengths) // engine.parallel.context
    tokens, sequences = torch.empty(1, own_tokens, dtype=torch.int64, device=META), packed(lengths, engine)
    rotation = latent.rotation(rank.bridge.hf_config)
    with OnMeta():
        if rotation is not None:
            sequences.rotary = rotation._replace(frequencies=rotation.frequencies.to(META)).tables(tokens)
        elif traced.use_fused:
            sequences.rotary = fused.rotary_tables(model.rotary_pos_emb, tokens, max(lengths))
    if model.config.num_moe_experts:
        sequences.routing = Routing(torch.ones(own_tokens, dtype=torch.bool, device=META), 1.0)
    if not model.pre_process:
        rows = own_tokens // (engine.parallel.tensor if engine.parallel.sequence else 1)
        shape = rows, 1, model.config.hidden_size
        model.set_input_tensor(torch.empty(shape, dtype=rank.bridge.dtype, device=META, requires_grad=True))
    return tokens, sequences


def _forward(traced: Traced, chunk: Any, tokens: torch.Tensor, sequences: PackedSequences) -> torch.Tensor:
    """The scalar at which the backward pass begins."""
    bridge, size, model = traced.rank.bridge, traced.engine.logits_chunk_tokens, gpt_model(chunk)
    options = {"fp32_output": False} if traced.use_fused and bridge.dtype is not torch.float32 else {}
    reader = logits.reader(logits.LogProbs(1.0, traced.use_fused, traced.has_entropy), bridge)
    is_read = tokens.shape[1] > size
    logits.read_in_layer(model, head.Request((tokens,), reader, size) if is_read else None)
    output = chunk(tokens, tokens, None, packed_seq_params=sequences, **options)
    if not model.post_process:
        return output.sum()  # type: ignore[no-any-return]
    if not options:
        output = output.float()  # as megatron-core's wrapper (module.py:453), which knows no meta tensor's dtype
    # the fields that logits.values reads
    microbatch: Any = SimpleNamespace(labels=tokens, targets=(tokens,), sequences=sequences)
    return logits.values(output, microbatch, reader, is_read=is_read)[0].sum()


def multiple_of_tokens(engine: EngineConfig, num_experts: int, experts_per_token: int) -> int:
    """Sequences are rounded up to a multiple of this, so that all ranks and all experts get equal numbers of tokens."""
    parallel = engine.parallel
    multiple = context.num_chunks(parallel) * (parallel.tensor if parallel.sequence else 1)
    shares = max(1, num_experts // max(1, experts_per_token))
    return multiple * shares if num_experts else multiple
