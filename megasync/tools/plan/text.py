"""A plan for the terminal. Leaves out its numbers (make.py)."""

from __future__ import annotations

from megasync.tools.plan.hardware import GIB
from megasync.tools.plan.make import Plan

WIDTH = 26
KEYS = {  # that shrink a part of memory
    "weights": "engine.wrap=megatron_fsdp, engine.parallel; of a vLLM worker rollout.tensor_parallel",
    "embeddings, gathered": "engine.parallel.tensor, engine.parallel.pipeline",
    "gradients": "engine.wrap=megatron_fsdp, engine.gradient_dtype, engine.lora.rank, engine.parallel",
    "optimizer": "more GPUs, engine.optimizer.offload, engine.lora.rank",
    "reference": "engine.lora.rank, algorithm.kl_coefficient=0",
    "teacher": "engine.lora.rank with teacher.adapter_path, teacher.place=replicas",
    "activations": "engine.recompute, engine.tokens_per_microbatch, engine.parallel",
    "logits and temporaries": "engine.logits_chunk_tokens, engine.tokens_per_microbatch, engine.parallel",
    "layers, gathered": "engine.overrides.suggested_communication_unit_size",
    "gradients before reduction": "engine.overrides.suggested_communication_unit_size, engine.gradient_dtype",
    "sync buckets": "sync.bucket_bytes",
    "KV cache": "rollout.kv_cache_bytes, rollout.gpu_memory_utilization, rollout.placement=separate",
    "draft model": "rollout.speculation.path",
    "sampling state": "rollout.max_num_seqs",
    "working memory": "rollout.max_num_seqs, rollout.max_model_len",
    "CUDA graphs": "rollout.enforce_eager=true, rollout.max_num_seqs",
}


def show(plan: Plan) -> str:
    """Ranks, memory by part, seconds, and the largest parts of each process that does not fit."""
    lines = [plan.grid.describe(), *_trainer(plan), *_replica(plan), *_seconds(plan)]
    for problem, parts in plan.problems.items():
        lines += [f"does not fit: {problem}; its largest parts, and keys that shrink them:"]
        largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
        lines += [f"{line}   {KEYS.get(name, '')}" for (name, _), line in zip(largest, _parts(dict(largest)), strict=True)]
    return "\n".join(lines if plan.problems else [*lines, "fits"])


def _trainer(plan: Plan) -> list[str]:
    config, stage = plan.config, plan.largest
    memory = stage.memory
    which = f" (stage {stage.number}, the largest)" if plan.grid.pipeline > 1 else ""
    recompute: str = config.engine.recompute
    if recompute == "selective":
        recompute += " " + "+".join(config.engine.recompute_modules)
    room = plan.request.hardware.memory_bytes / GIB
    head = f"a trainer rank{which}, GiB of {room:.1f}; {config.engine.wrap}, recompute {recompute}:"
    shown = {"peak of tensors": memory.tensors_peak, "peak of the GPU": memory.device, "host memory": memory.host}
    if config.engine.optimizer.offload:
        shown = {"optimizer, on the host": -memory.parts["optimizer"], **shown}
    return [head, *_parts({**memory.parts, **shown})]


def _replica(plan: Plan) -> list[str]:
    if plan.worker is None:
        return []
    rollout, worker = plan.config.rollout, plan.worker
    head = f"a vLLM worker of {rollout.replicas * rollout.tensor_parallel}, {rollout.placement}, GiB:"
    return [head, *_parts({**worker.parts, "together": worker.total})]


def _parts(parts: dict[str, int]) -> list[str]:
    return [f"  {name:<{WIDTH}} {size / GIB:9.2f}" for name, size in parts.items()]


def _seconds(plan: Plan) -> list[str]:
    found, work = plan.seconds, plan.work
    parts = {name: value for name, value in found._asdict().items() if name not in ("step", "binding") and value}
    lines = [f"seconds of a step of {work.num_samples} samples, {work.tokens / 1e3:.0f} k tokens:"]
    lines += [f"  {name.replace('_', '-'):<{WIDTH}} {value:9.3f}" for name, value in parts.items()]
    lines += [f"  {'step':<{WIDTH}} {found.step:9.3f}   {found.binding} takes the longest"]
    return [*lines, f"{work.tokens / found.step * 86400 / 1e6:.0f} M tokens a day on {plan.num_devices} devices"]
