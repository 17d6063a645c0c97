"""What fits in the place of what does not, and which layouts are the fastest: plans of changed configs, compared.

Only what the engine's own checks let through is looked at. Leaves out what a plan is made of (make.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from megasync.config.errors import ConfigError
from megasync.config.load import with_changes
from megasync.config.schema import Config
from megasync.planning.make import Plan, make_plan

Changes = dict[str, Any]  # values by full key
LEAST_TOKENS = 1024
BEST = 3
STALENESS = (1, 4)
SIZES = (1, 2, 4, 8)
RECOMPUTES: tuple[Changes, ...] = (
    {"engine.recompute": "none"},
    {"engine.recompute": "selective", "engine.recompute_modules": ("layernorm", "mlp_act")},
    {"engine.recompute": "full"},
)


def written(changes: Changes) -> str:
    """As on the command line."""

    def value_text(value: Any) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value)

    return " ".join(f"{key}={value_text(value)}" for key, value in changes.items())


def try_plan(plan: Plan, changes: Changes, num_ranks: int | None = None) -> Plan | None:
    """None where training would refuse it."""
    request = plan.request
    if num_ranks is not None:
        request = dataclasses.replace(request, num_ranks=num_ranks)
    try:
        return make_plan(with_changes(plan.config, changes), request)
    except ConfigError:
        return None


def nearest(plan: Plan) -> str:
    """The change that costs least seconds of those that fit: of one key first, then of several."""
    for candidates in (_single(plan), _several(plan)):
        fitting = [(found.seconds.step, changes) for changes in candidates if (found := try_plan(plan, changes)) and found.fits]
        if fitting:
            least, changes = min(fitting, key=lambda pair: pair[0])
            return f"nearest that fits, {least:.2f} s a step: {written(changes)}"
    return "nothing that was tried fits: it takes more GPUs (--gpus N), or a smaller model"


def _single(plan: Plan) -> Iterator[Changes]:
    engine, rollout = plan.config.engine, plan.config.rollout
    tokens = engine.tokens_per_microbatch // 2
    while tokens > max(rollout.max_new_tokens, LEAST_TOKENS // 2):
        yield {"engine.tokens_per_microbatch": tokens}
        tokens //= 2
    if engine.logits_chunk_tokens > 2048:
        yield {"engine.logits_chunk_tokens": 2048}
    if engine.recompute != "full":
        yield from (changes for changes in RECOMPUTES[1:] if changes["engine.recompute"] != engine.recompute)
    if engine.wrap == "ddp" and plan.grid.shards > 1:
        yield {"engine.wrap": "megatron_fsdp"}
    if not engine.optimizer.offload:
        yield {"engine.optimizer.offload": True}
    yield from _tensor_sizes(plan.config)
    if plan.worker is not None:
        yield from _of_replicas(plan)


def _tensor_sizes(config: Config) -> Iterator[Changes]:
    for size in SIZES:
        if size > config.engine.parallel.tensor:
            yield {"engine.parallel.tensor": size, "engine.parallel.sequence": True}


def _of_replicas(plan: Plan) -> Iterator[Changes]:
    rollout = plan.config.rollout
    if rollout.kv_cache_bytes:
        yield from ({"rollout.kv_cache_bytes": rollout.kv_cache_bytes // share} for share in (2, 4))
    yield from ({"rollout.gpu_memory_utilization": share / 100} for share in (90, 80, 70, 60, 50, 40, 30))
    if rollout.is_colocated and len(rollout.offload_trainer) < len(STATE):
        yield {"rollout.offload_trainer": STATE}
    workers = rollout.replicas * rollout.tensor_parallel
    for size in SIZES:
        if size > rollout.tensor_parallel and workers % size == 0:
            yield {"rollout.tensor_parallel": size, "rollout.replicas": workers // size}


STATE = ("parameters", "gradients", "optimizer")


def _several(plan: Plan) -> Iterator[Changes]:
    tokens = max(plan.config.rollout.max_new_tokens + 1, plan.config.engine.tokens_per_microbatch // 4)
    base: Changes = {"engine.recompute": "full", "engine.tokens_per_microbatch": tokens, "engine.logits_chunk_tokens": 2048}
    if plan.grid.shards > 1:
        base["engine.wrap"] = "megatron_fsdp"
    if plan.config.rollout.is_colocated and plan.worker is not None:
        base |= {"rollout.offload_trainer": STATE}
    shares: Iterable[Changes] = ({},)
    if plan.worker is not None and plan.config.rollout.kv_cache_bytes is None:
        shares = ({}, {"rollout.gpu_memory_utilization": 0.5})
    for share, sizes, offload in itertools.product(shares, ({}, *_tensor_sizes(plan.config)), (False, True)):
        yield {**base, **share, **sizes, **({"engine.optimizer.offload": True} if offload else {})}


# ------------------------------------------------------------------------------------------------ the fastest


def suggest(plan: Plan) -> str:
    """The best of all layouts, placements and bounds of staleness on as many devices, with what speaks for each."""
    found: list[tuple[Plan, Changes]] = []
    for changes, num_ranks in _layouts(plan):
        tried = try_plan(plan, changes, num_ranks)
        if tried is not None and tried.fits:
            found.append((tried, changes))
    if not found:
        return f"suggestions: nothing that was tried fits on {plan.num_devices} devices"
    found.sort(key=lambda pair: (round(pair[0].seconds.step, 3), pair[0].seconds.staleness))
    lines = [f"the best of {len(found)} layouts that fit on {plan.num_devices} devices:"]
    for number, (tried, changes) in enumerate(_different(found), start=1):
        lines += [
            f"{number}. {tried.seconds.step:.2f} s a step: {written(_changed(plan.config, changes))}",
            f"   {_reason(tried)}",
        ]
    return "\n".join(lines)


def _layouts(plan: Plan) -> Iterator[tuple[Changes, int]]:
    config, devices = plan.config, plan.num_devices
    experts = [1] if not _has_experts(plan) else [size for size in (1, 2, 4, 8, 16) if devices % size == 0]
    wraps = ("ddp", "megatron_fsdp")
    whole = config.engine.tokens_per_microbatch
    tokens = [
        whole // share for share in (1, 2, 4) if share == 1 or whole // share > max(config.rollout.max_new_tokens, LEAST_TOKENS)
    ]
    for (placement, num_ranks), tensor, expert, recompute, wrap, limit in itertools.product(
        _placements(plan), [size for size in SIZES if size <= devices], experts, RECOMPUTES, wraps, tokens
    ):
        if num_ranks % tensor or (wrap == "megatron_fsdp" and num_ranks == tensor):
            continue
        layout: Changes = {"engine.parallel.tensor": tensor, "engine.parallel.sequence": tensor > 1}
        if expert > 1 or config.engine.parallel.expert > 1:
            layout["engine.parallel.expert"] = expert
        of_engine = {"engine.wrap": wrap, "engine.tokens_per_microbatch": limit}
        yield {**placement, **layout, **recompute, **of_engine}, num_ranks


def _has_experts(plan: Plan) -> bool:
    return any(stage.counts.experts for stage in plan.stages) or plan.config.engine.parallel.expert > 1


def _placements(plan: Plan) -> Iterator[tuple[Changes, int]]:
    """What is written of rollouts, and how many ranks the trainer gets; a replica is as large as it is."""
    devices, size = plan.num_devices, plan.config.rollout.tensor_parallel
    if plan.worker is None or plan.request.hardware.is_cpu:
        yield {}, plan.request.num_ranks
        return
    if devices % size == 0:
        colocated: Changes = {"rollout.placement": "colocated", "rollout.max_staleness": 0, "rollout.replicas": devices // size}
        yield {**colocated, "rollout.on_update": "drain", "rollout.gpu_memory_utilization": 0.6}, devices
    for workers in sorted({math.ceil(devices * share / size) * size for share in (0.25, 0.5, 0.75)}):
        if 0 < workers < devices:
            for staleness in STALENESS:
                separate = {"rollout.placement": "separate", "rollout.replicas": workers // size}
                yield {**separate, "rollout.max_staleness": staleness, "rollout.on_update": "continue"}, devices - workers


def _changed(config: Config, changes: Changes) -> Changes:
    """Those that are not so already."""
    nested = config.model_dump()

    def value(key: str) -> Any:
        found: Any = nested
        for name in key.split("."):
            found = found[name]
        return found

    return {key: new for key, new in changes.items() if value(key) != new} or {"run.name": config.run.name}


def _different(found: list[tuple[Plan, Changes]]) -> list[tuple[Plan, Changes]]:
    """The best few, of which no two differ only in what each rank does and in staleness."""
    kept: dict[tuple[Any, ...], tuple[Plan, Changes]] = {}
    for tried, changes in found:
        rollout, parallel = tried.config.rollout, tried.config.engine.parallel
        key = rollout.placement, rollout.replicas, parallel.tensor, parallel.expert
        kept.setdefault(key, (tried, changes))
    return list(kept.values())[:BEST]


def _reason(plan: Plan) -> str:
    found, memory = plan.seconds, plan.largest.memory
    room = plan.request.hardware.memory_bytes
    words = [f"{found.binding} binds"]
    if plan.worker is not None:
        words += [f"training {found.train + found.optimizer + found.log_probs:.2f} s, generation {found.generation:.2f} s"]
    if plan.config.rollout.max_staleness and plan.worker is not None:
        words += [f"{found.synchronous / found.step:.2f} times as fast as in turns, tokens {found.staleness:.1f} versions old"]
    elif found.moving:
        words += [f"every device in both phases, at {found.moving:.2f} s of moving state"]
    return "; ".join([*words, f"a trainer rank takes {memory.device / room:.0%} of its device"])
