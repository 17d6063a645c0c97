"""One micro-batch forward and backward through a rank's chunks on the meta device: what it takes beside weights and state.

The engine's own output layer reads log-probs in chunks as in training; a stage that is not the last ends with its hidden states.
Leaves out schedules: how many micro-batches wait at once for their backward pass is shapes.py's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from engine.attention import context, fused, latent
from engine.batch.packed import ContextPart, PackedSequences, Routing
from engine.config import EngineConfig
from engine.model import vocabulary
from engine.model.build import gpt_model
from engine.objective import logits
from engine.runtime.megatron import parallel_state as mpu
from megasync.planning.meta import stand_ins
from megasync.planning.meta.operations import Operations
from megasync.planning.meta.ranks import META, MetaRank, OnMeta
from megasync.planning.meta.tracker import Tracker

FEW_LAYERS = (3, 6)


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch, of all of a rank's chunks."""

    held: int  # what waits for the backward pass
    peak: int  # the most at once, `held` included
    top_peak: int = 0  # the same until the last layer's backward pass is over: it grows with the layers as `held` does
    forward_peak: int = 0  # without gradients, as for log-probs
    passes: Operations = field(default_factory=Operations)  # for CPUs: what both passes compute
    forward: Operations = field(default_factory=Operations)  # likewise, a forward pass without gradients
    tokens: int = 0  # of the micro-batch


@dataclass(frozen=True)
class Traced:
    """What is traced, and for which kind of device."""

    rank: MetaRank
    engine: EngineConfig
    lengths: tuple[int, ...]
    has_entropy: bool = False
    on_cpu: bool = False


def trace(
    rank: MetaRank, engine: EngineConfig, lengths: tuple[int, ...], *, has_entropy: bool = False, on_cpu: bool = False
) -> Activations:
    """`lengths`: tokens of the micro-batch's sequences, over all context ranks; for `on_cpu` all alike.

    Of many layers that are alike some are run, twice, and the others take as much as the difference says.
    """
    traced = Traced(rank, engine, lengths, has_entropy, on_cpu)
    found = [_trace_layers(traced, chunk) for chunk in rank.chunks]
    held = [each.held for each in found]
    others = [sum(held) - own for own in held]
    peak = max(each.peak + other for each, other in zip(found, others, strict=True))
    passes, forward = (sum((getattr(each, name) for each in found), Operations()) for name in ("passes", "forward"))
    return Activations(sum(held), peak, 0, max(each.forward_peak for each in found), passes, forward, sum(lengths))


def packed(lengths: tuple[int, ...], engine: EngineConfig) -> PackedSequences:
    """Numbers that are read as such are on the CPU, whatever device all else is on."""
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
        assert part.prefixes  # which is kept, and made of numbers that the meta device does not have
    return sequences


def _trace_layers(traced: Traced, chunk: torch.nn.Module) -> Activations:
    decoder = gpt_model(chunk).decoder
    layers, count = decoder.layers, len(decoder.layers)
    if count <= FEW_LAYERS[1] or not _are_alike(layers):
        return _trace_chunk(traced, chunk)
    found = []
    for some in FEW_LAYERS:
        decoder.layers, decoder.num_layers_per_pipeline_rank = layers[:some], some
        found.append(_trace_chunk(traced, chunk))
    decoder.layers, decoder.num_layers_per_pipeline_rank = layers, count
    steps = (count - FEW_LAYERS[0]) / (FEW_LAYERS[1] - FEW_LAYERS[0])
    few, more = found

    def extended(size: str) -> int:
        one, other = int(getattr(few, size)), int(getattr(more, size))
        return round(one + (other - one) * steps)

    # what comes after the top does not grow with the layers, such as the gradient of the embeddings: in few it may be the peak
    top_peak = extended("top_peak")
    sizes = extended("held"), max(top_peak, more.peak), top_peak, extended("forward_peak")
    return Activations(*sizes, _extended(few.passes, more.passes, steps), _extended(few.forward, more.forward, steps))


def _extended(few: Operations, more: Operations, steps: float) -> Operations:
    return Operations({each: round(few[each] + (count - few[each]) * steps) for each, count in more.items()})


def _are_alike(layers: Any) -> bool:
    """Of the same modules and sizes; not those with a window beside those without."""
    kinds = {
        tuple((name, type(module).__name__, getattr(module, "window", None)) for name, module in layer.named_modules())
        + tuple(tuple(parameter.shape) for parameter in layer.parameters())
        for layer in layers
    }
    return len(kinds) == 1


def _trace_chunk(traced: Traced, chunk: torch.nn.Module) -> Activations:
    rank, engine, lengths = traced.rank, traced.engine, traced.lengths
    model, use_fused = gpt_model(chunk), engine.fusions == "all"
    own_tokens = sum(lengths) // engine.parallel.context
    tokens = torch.empty(1, own_tokens, dtype=torch.int64, device=META)
    sequences = packed(lengths, engine)
    rotation = latent.rotation(rank.bridge.hf_config)
    with OnMeta():
        if rotation is not None:
            sequences.rotary = rotation._replace(frequencies=rotation.frequencies.to(META)).tables(tokens)
        elif use_fused:
            sequences.rotary = fused.rotary_tables(model.rotary_pos_emb, tokens, max(lengths))
    if model.config.num_moe_experts:
        sequences.routing = Routing(torch.ones(own_tokens, dtype=torch.bool, device=META), 1.0)
    if not model.pre_process:
        rows = own_tokens // (engine.parallel.tensor if engine.parallel.sequence else 1)
        shape = rows, 1, model.config.hidden_size
        model.set_input_tensor(torch.empty(shape, dtype=rank.bridge.dtype, device=META, requires_grad=True))
    run = _Pass(chunk, tokens, sequences, traced)
    with torch.no_grad():
        _, forward = run.measure(backward=False)
    held, passes = run.measure(backward=True)
    return Activations(held, passes.peak_bytes, passes.marked_peak, forward.peak_bytes, passes.operations, forward.operations)


@dataclass
class _Pass:
    chunk: Any
    tokens: torch.Tensor
    sequences: PackedSequences
    traced: Traced

    def measure(self, *, backward: bool) -> tuple[int, Tracker]:
        """Bytes that wait after the forward pass, and what has been counted."""
        on_cpu, use_fused, dtype = self.traced.on_cpu, self.traced.engine.fusions == "all", self.traced.rank.bridge.dtype
        tracker = Tracker(counts_operations=on_cpu)
        tracker.leave_out(self.chunk.parameters())

        def when_over(_layer: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            states = args[0] if args else options["hidden_states"]
            if states.requires_grad:
                states.register_hook(lambda _: tracker.mark())

        top = gpt_model(self.chunk).decoder.layers[-1].register_forward_pre_hook(when_over, with_kwargs=True)
        with stand_ins.installed(tracker, dtype, use_fused=use_fused, on_cpu=on_cpu), OnMeta(), tracker:
            loss = self._forward(use_fused)
            held = tracker.bytes_now
            if backward:
                torch.autograd.backward(loss)
        top.remove()
        return held, tracker

    def _forward(self, use_fused: bool) -> torch.Tensor:
        """A number that the backward pass begins at."""
        bridge, size = self.traced.rank.bridge, self.traced.engine.logits_chunk_tokens
        options = {"fp32_output": False} if use_fused and bridge.dtype is not torch.float32 else {}
        read = logits.LogProbs(1.0, use_fused, self.traced.has_entropy)
        shown, again = (vocabulary.mask_padding(each, bridge) for each in (read, read.differentiable()))
        with logits.read_in_chunks(self.chunk, self.tokens, shown, again, size):
            output = self.chunk(self.tokens, self.tokens, None, packed_seq_params=self.sequences, **options)
        if not gpt_model(self.chunk).post_process:
            return output.sum()  # type: ignore[no-any-return]
        if not options:
            output = output.float()  # as megatron-core's wrapper (module.py:453), which knows no meta tensor's dtype
        values = logits.values(output, self._microbatch(), shown, size)
        return values[0].sum()

    def _microbatch(self) -> Any:
        """What of a MicroBatch is read there."""
        return SimpleNamespace(labels=self.tokens, sequences=self.sequences)


def multiple_of_tokens(engine: EngineConfig, num_experts: int, experts_per_token: int) -> int:
    """What a sequence is rounded up to, so that every rank and every expert gets as many tokens."""
    parallel = engine.parallel
    multiple = context.num_chunks(parallel) * (parallel.tensor if parallel.sequence else 1)
    shares = max(1, num_experts // max(1, experts_per_token))
    return multiple * shares if num_experts else multiple
