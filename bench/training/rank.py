"""One rank of `python -m bench train`: trains on random tokens from random weights. Leaves out the tables (report.py)."""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch
import torch.distributed as dist

from bench.common.program import Measured, Program
from bench.common.random_engine import RandomEngine
from bench.config import BenchRoot
from bench.training.flops import attention_flops, num_active_parameters
from engine.attention import fused
from engine.config import OFFLOAD_KINDS
from engine.engine import Engine
from engine.offload import storages
from engine.runtime import device, parallel
from engine.runtime.memory import memory_metrics
from engine.sample import RolloutSampling, Sample
from megasync.models.folder import model_shape


class TrainBench(Program):
    """Measures training steps of the config's engine."""

    def run(self) -> Measured:
        """Train and time."""
        config, bench = self.config, self.config.bench_train
        parallel.initialize(config.engine.parallel, config.run.seed)
        begin = time.perf_counter()
        built = build_engine(config)
        measured: Measured = {
            "fusions": fused.describe(built.config.fusions),
            "kernels": built.kernels,
            "recompute": built.config.recompute,
            "build_seconds": time.perf_counter() - begin,
        }
        rounds, peaks = train(config, built)
        reserved = reserved_and_used()  # before the products below take memory of their own
        ceiling = product_ceiling()  # after the steps: the device is as warm as it was for them
        measured |= {"steps": rounds, **reserved, **memory_and_ceiling(built, peaks, ceiling)}
        return measured | _speed(config, rounds[bench.warm_up_steps :], measured["ceiling_flops"])


def build_engine(config: BenchRoot) -> Engine:
    """With random weights; its process groups are there."""
    bench = config.bench_train
    settings = config.engine.model_copy(update={"tokens_per_microbatch": bench.num_sequences * bench.sequence_length})
    algorithm = config.algorithm.model_copy(update={"name": "sft", "num_minibatches": 1})
    num_steps, longest = bench.warm_up_steps + bench.steps, config.rollout.max_new_tokens
    return RandomEngine(config.model, settings, algorithm, num_steps=num_steps, sampling=RolloutSampling(max_new_tokens=longest))


def random_samples(config: BenchRoot, step: int, data_size: int) -> list[Sample]:
    """A step's sequences, the same on every rank; all but the first token of each are trained on."""
    bench, vocabulary_size = config.bench_train, model_shape(config.model.path).vocab_size
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


def train(config: BenchRoot, built: Engine) -> tuple[list[Measured], tuple[float, float]]:
    """Each step's seconds and metrics, and this rank's peak bytes until the warm-up's end and after it."""
    bench, rounds = config.bench_train, list[Measured]()
    for step in range(bench.warm_up_steps + bench.steps):
        if step == bench.warm_up_steps:
            first_peak = restart_peak()
        samples = random_samples(config, step, built.layout.data_size)
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
        Path("/proc/self/clear_refs").write_text("5")  # man 5 proc: sets the peak back to the present resident memory
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
    """Bytes that this rank holds between steps, by OFFLOAD_KINDS; a storage of two kinds counts as the first of them."""
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
