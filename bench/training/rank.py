"""One rank of `python -m bench train`: trains one variant on random tokens from random weights.

Leaves out which variants are run (variants.py).
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

import torch
import torch.distributed as dist

import engine.model
from bench.common.memory import restart_host_peak
from bench.common.program import Measured, Program
from bench.common.random_engine import RandomEngine
from bench.config import VARIANTS, BenchRoot, VariantName
from bench.training.flops import attention_flops, num_active_parameters
from engine.attention import fused
from engine.attention.core import CoreAttention
from engine.config import OFFLOAD_KINDS
from engine.engine import Engine
from engine.offload import Offload, storages
from engine.runtime import device, parallel
from engine.runtime.memory import memory_metrics
from engine.sample import RolloutSampling, Sample
from megasync.models.folder import model_shape


class DotProductCore(CoreAttention):
    """megatron-core's DotProductAttention instead of ours, for packed sequences of one length."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **options: Any) -> None:
        from megatron.core.transformer.dot_product_attention import DotProductAttention

        super().__init__(config, layer_number, attn_mask_type, attention_type, **options)
        self.core = DotProductAttention(config, layer_number, attn_mask_type, attention_type, **options)

    def _packed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed_seq_params: Any) -> torch.Tensor:
        length = packed_seq_params.max_seqlen_q
        parts = [x.reshape(-1, length, *x.shape[1:]).transpose(0, 1).contiguous() for x in (query, key, value)]
        hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)[None, None]
        out: torch.Tensor = self.core(*parts, hidden)
        return out.transpose(0, 1).reshape(query.shape[0], -1)


class TrainBench(Program):
    """Of the first of the config's variants."""

    def run(self) -> Measured:
        """Train and time; measurements are kept after each part."""
        config, bench = self.config, self.config.bench_train
        parallel.initialize(config.engine.parallel, config.run.seed, timeout_seconds=bench.variant_seconds)
        variant = bench.variants[0]
        vocabulary_size = model_shape(config.model.path).vocab_size
        begin = time.perf_counter()
        built = build_engine(config, variant)
        measured: Measured = {
            "fusions": fused.describe(built.config.fusions),
            "kernels": built.kernels,
            "recompute": built.config.recompute,
            "build_seconds": time.perf_counter() - begin,
        }
        rounds, peaks = train(config, built, vocabulary_size)
        reserved = reserved_and_used()  # before the products below take memory of their own
        ceiling = product_ceiling()  # after the steps: the device is as warm as it was for them
        measured |= {"steps": rounds, **reserved, **memory_and_ceiling(built, peaks, ceiling)}
        measured |= _speed(config, rounds[bench.warm_up_steps :], measured["ceiling_flops"])
        self.keep(measured, is_complete=False)
        if variant in bench.profile and device.has_cuda():
            measured["profile"] = profile(built, random_samples(config, 0, built.layout.data_size, vocabulary_size))
            self.keep(measured, is_complete=False)
        if variant in bench.offload:
            measured["offload"] = time_offload(built)
        dist.barrier()
        return measured


def build_engine(config: BenchRoot, name: VariantName) -> Engine:
    """The variant's engine; its process groups are there."""
    variant, bench = VARIANTS[name], config.bench_train
    changes = {
        "wrap": variant.wrap,
        "fusions": config.engine.fusions if variant.fusions else "none",
        "kernels": config.engine.kernels if variant.kernels else "torch",
        "recompute": "full" if variant.dot_product else config.engine.recompute,
        "tokens_per_microbatch": bench.num_sequences * bench.sequence_length,
    }
    settings = config.engine.model_copy(update=changes)
    if variant.dot_product:
        vars(engine.model)["CoreAttention"] = DotProductCore  # what the layer spec names
    algorithm = config.algorithm.model_copy(update={"name": "sft", "num_minibatches": 1})
    num_steps, longest = bench.warm_up_steps + bench.steps, config.rollout.max_new_tokens
    return RandomEngine(config.model, settings, algorithm, num_steps=num_steps, sampling=RolloutSampling(max_new_tokens=longest))


def random_samples(config: BenchRoot, step: int, data_size: int, vocabulary_size: int) -> list[Sample]:
    """A step's sequences, the same on every rank; all but the first token of each are trained on."""
    bench = config.bench_train
    count = data_size * bench.num_microbatches * bench.num_sequences
    generator = torch.Generator().manual_seed(1000 * config.run.seed + step)
    tokens = torch.randint(0, min(vocabulary_size, 30000), (count, bench.sequence_length), generator=generator)
    return [Sample(row[:1], row[1:]) for row in tokens.to(torch.int32).numpy()]


def product_ceiling() -> float:
    """FLOP/s of large matrix products: bf16 8192^3 with CUDA, fp32 512^3 without."""
    size, dtype, count = (8192, torch.bfloat16, 20) if device.has_cuda() else (512, torch.float32, 5)
    a, b = (torch.randn(size, size, device=device.compute_device(), dtype=dtype) for _ in range(2))
    for _ in range(3):
        a @ b
    begin = _now()
    for _ in range(count):
        a @ b
    return count * 2 * size**3 / (_now() - begin)


def train(config: BenchRoot, built: Engine, vocabulary_size: int) -> tuple[list[Measured], tuple[float, float]]:
    """Each step's seconds and metrics, and this rank's peak bytes until the warm-up's end and after it."""
    bench, rounds = config.bench_train, list[Measured]()
    for step in range(bench.warm_up_steps + bench.steps):
        if step == bench.warm_up_steps:
            first_peak = restart_peak()
        samples = random_samples(config, step, built.layout.data_size, vocabulary_size)
        begin = _now()
        minibatches = built.prepare(samples)
        prepared = _now()
        metrics = built.update(minibatches)
        seconds = {"prepare_seconds": prepared - begin, "update_seconds": _now() - prepared}
        rounds.append({**seconds, "loss": metrics["loss/sft"], **metrics})
    return rounds, (first_peak, restart_peak())


def restart_peak() -> float:
    """The most bytes of this rank since the last call: allocated by torch on its GPU, without CUDA resident in its process."""
    metrics = memory_metrics()  # restarts torch's
    if not device.has_cuda():
        restart_host_peak(os.getpid())
    return metrics.get("memory/tensors_peak_bytes", metrics["memory/host_peak_bytes"])


def reserved_and_used() -> Measured:
    """With CUDA, in bytes: what torch's allocator has reserved, and what all processes use of this rank's GPU.

    Their difference is the context: kernels, libraries' workspaces, NCCL. The allocator keeps its reserved memory.
    """
    if not device.has_cuda():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"reserved_bytes": torch.cuda.memory_reserved(), "device_bytes": total - free, "device_total_bytes": total}


def memory_and_ceiling(built: Engine, peaks: tuple[float, float], ceiling: float) -> Measured:
    """The most of all ranks. Collective. `step_peak_bytes` leaves the warm-up out."""
    state = state_bytes(built)
    totals = torch.tensor([*peaks, ceiling, *state.values()], dtype=torch.float64, device=built.device)
    dist.all_reduce(totals, op=dist.ReduceOp.MAX)
    first_peak, step_peak, ceiling, *sizes = totals.tolist()
    return {
        "peak_bytes": int(max(first_peak, step_peak)),
        "step_peak_bytes": int(step_peak),
        "state_bytes": {kind: int(size) for kind, size in zip(state, sizes, strict=True)},
        "gradient_dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in built.wrapped.gradients()}),
        "ceiling_flops": ceiling,
    }


def state_bytes(built: Engine) -> dict[str, int]:
    """What this rank holds between steps, by OFFLOAD_KINDS; a storage of two kinds counts as the first of them."""
    seen: set[int] = set()
    sizes: dict[str, int] = {}
    for kind in OFFLOAD_KINDS:
        found = {storage._cdata: storage.nbytes() for storage in storages(built, kind) if storage._cdata not in seen}
        seen |= found.keys()
        sizes[kind] = sum(found.values())
    return sizes


def _now() -> float:
    device.synchronize()
    return time.perf_counter()


def _speed(config: BenchRoot, rounds: list[Measured], ceiling: float) -> Measured:
    """Per GPU, from the median step."""
    bench = config.bench_train
    seconds = sorted(step["update_seconds"] for step in rounds)[len(rounds) // 2]
    split = math.prod(getattr(config.engine.parallel, axis) for axis in ("tensor", "pipeline", "context"))
    tokens = bench.num_microbatches * bench.num_sequences * bench.sequence_length / split
    of_attention = attention_flops(config.model.path, bench.sequence_length) * tokens / seconds
    model_flops = 6 * num_active_parameters(config.model.path) * tokens / seconds
    return {
        "step_seconds_median": seconds,
        "tokens_per_second_per_gpu": tokens / seconds,
        "model_flops_per_gpu": model_flops,
        "attention_flops_per_gpu": of_attention,
        "share_of_ceiling": model_flops / ceiling,
        "share_with_attention": (model_flops + of_attention) / ceiling,
    }


def profile(built: Engine, samples: list[Sample]) -> Measured:
    """One more step: its wall time, the time kernels ran (all streams added) and those that take longest, on this rank."""
    minibatches = built.prepare(samples)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        begin = _now()
        built.update(minibatches)
        seconds = _now() - begin
    kernels = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    return {
        "wall_seconds": seconds,
        "kernel_seconds": sum(event.self_device_time_total for event in kernels) / 1e6,
        "kernels": [[event.key[:120], event.self_device_time_total / 1e3, event.count] for event in kernels[:40]],
    }


def time_offload(built: Engine) -> Measured:
    """Of each kind and of all together: bytes of this rank's device and the seconds away and back."""
    begin = _now()
    offload = Offload(built)
    offload.offload()
    offload.reload()
    measured: Measured = {"first_seconds": _now() - begin}  # page-locks the host memory that the others use again
    for kinds in (*((kind,) for kind in OFFLOAD_KINDS), OFFLOAD_KINDS):
        begin = _now()
        num_bytes = offload.offload(kinds)
        away = _now()
        offload.reload()
        measured["+".join(kinds)] = {"bytes": num_bytes, "offload_seconds": away - begin, "reload_seconds": _now() - away}
    return measured
