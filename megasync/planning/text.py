"""A plan for the terminal. Leaves out what it says (make.py)."""

from __future__ import annotations

from megasync.planning.make import Plan
from megasync.planning.stages import gib

WIDTH = 24
HOSTS_DIFFER = 1.6  # docs/plan.md


def show(plan: Plan) -> str:
    """All of it: ranks, memory by part, seconds, what binds."""
    lines = [plan.grid.describe(), *_trainer(plan), *_replica(plan), *_version_log(plan), *_seconds(plan)]
    if plan.fits:
        return "\n".join([*lines, "fits"])
    return "\n".join([*lines, *(f"does not fit: {problem}" for problem in plan.problems)])


def _trainer(plan: Plan) -> list[str]:
    config, stage = plan.config, plan.largest
    memory = stage.memory
    which = f" (stage {stage.number}, the largest)" if plan.grid.pipeline > 1 else ""
    room = gib(plan.request.hardware.memory_bytes)
    recompute: str = config.engine.recompute
    if recompute == "selective":
        recompute += " " + "+".join(config.engine.recompute_modules)
    head = f"a trainer rank{which}, GiB of {room}; {config.engine.wrap}, recompute {recompute}:"
    lines = [head, *_parts(memory.parts)]
    if config.engine.optimizer.offload:
        lines += _parts({"optimizer away in passes": -memory.parts.get("optimizer", 0)})
    if plan.request.hardware.is_cpu:
        return [*lines, *_parts({"process": memory.host})]
    shown = {"peak of tensors": memory.tensors_peak, "peak of the GPU": memory.device, "host memory": memory.host}
    return [*lines, *_parts(shown)]


def _replica(plan: Plan) -> list[str]:
    if plan.worker is None:
        return []
    rollout = plan.config.rollout
    number = rollout.replicas * rollout.tensor_parallel
    head = f"a vLLM worker of {number}, {rollout.placement}, GiB:"
    whole = {"process": plan.worker.host} if plan.worker.host else {"together": plan.worker.total}
    return [head, *_parts(plan.worker.parts), *_parts(whole)]


def _version_log(plan: Plan) -> list[str]:
    parts = {"host memory of a sender": plan.largest.memory.version_log, "disk, by the end": plan.version_log_bytes}
    return ["kept of former versions, GiB:", *_parts(parts)] if any(parts.values()) else []


def _parts(parts: dict[str, int]) -> list[str]:
    return [f"  {name:<{WIDTH}} {size / 2**30:9.2f}" for name, size in parts.items()]


def _seconds(plan: Plan) -> list[str]:
    found = plan.seconds
    names = {
        "train": found.train,
        "optimizer": found.optimizer,
        "log-probs": found.log_probs,
        "generation": found.generation,
        "sync": found.sync,
        "moving state": found.moving,
    }
    work = plan.work
    head = f"seconds of a step of {work.num_samples} samples, {work.tokens / 1e3:.0f} k tokens:"
    lines = [head, *(f"  {name:<{WIDTH}} {value:9.3f}" for name, value in names.items() if value)]
    lines += [f"  {'step':<{WIDTH}} {found.step:9.3f}   {found.binding} binds"]
    if plan.bound_by_host:
        phases = " and ".join(plan.bound_by_host)
        told = f"the host, which launches kernels and schedules samples, binds {phases}"
        lines += [f"{told}: hosts differ in that by up to {HOSTS_DIFFER}"]
    if plan.config.rollout.max_staleness and plan.worker is not None:
        gain = found.synchronous / found.step
        lines += [f"expected staleness {found.staleness:.1f}; {gain:.2f} times as fast as max_staleness=0 on the same devices"]
    rate = f"{plan.tokens_per_day / 1e6:.0f} M tokens a day on {plan.num_devices} devices"
    return [*lines, rate]
