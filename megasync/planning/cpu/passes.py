"""Seconds of a rank's passes and optimizer steps, by calls that are timed on this machine.

What Python and autograd take beside the calls, and what a wrap takes for each parameter, goes by the time of a small layer
(calls.py: host), in units that measured.json holds. Leaves out collectives of tensor, context, expert and pipeline parallelism.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterable, Mapping, Sequence

import psutil
import torch

from bridge.config import CANARY_SEQUENCES, CANARY_TOKENS
from engine.config import EngineConfig
from engine.wrap.ddp_fields import SHARDS_PARAMETERS
from megasync.planning.cpu.calls import accumulation, adam, fresh, host
from megasync.planning.cpu.together import seconds_of, timed
from megasync.planning.hardware import seconds, units
from megasync.planning.meta.activations import Activations
from megasync.planning.meta.operations import LARGE_BYTES, Operation, Operations
from megasync.planning.meta.ranks import Counts
from megasync.planning.shapes import Grid, Work

CACHED_BYTES = 2**26  # of weights, more than the caches of a core's share
# Of so much the seconds hardly vary from one time to the next; of 512 MiB hosts take back all or nothing.
RESTED_BYTES, MOST_REST_SECONDS = 2**31, 8

Stages = Sequence[tuple[Counts, Activations]]


def train_seconds(
    stages: Stages, engine: EngineConfig, grid: Grid, work: Work, num_processes: int, threads: int = 1
) -> tuple[float, float]:
    """Forward and backward passes of all optimizer steps of a batch; and one forward pass over it, as for log-probs.

    `threads`: of each rank.
    """
    count, tokens = work.num_microbatches(grid) * work.num_minibatches, work.tokens / grid.data
    bubble = 1 + (grid.pipeline - 1) / (grid.virtual * work.num_microbatches(grid))
    cold = is_cold(counts for counts, _ in stages)
    asked = {each for _, traced in stages for each in (*traced.passes, *traced.forward)}
    added = {accumulation(size) for counts, _ in stages for size, _ in counts.sizes}
    found = seconds_of([*asked, *added], num_processes, threads=threads, is_cold=cold)
    found |= seconds_of([host(), fresh()], num_processes)
    recomputes = engine.recompute == "full" and cold
    warm = found | seconds_of(asked, num_processes, threads=threads) if recomputes else found

    def both(traced: Activations) -> float:
        """Backward passes that follow on a second forward pass find a layer's weights and activations in the caches."""
        backward = traced.passes - traced.forward - traced.forward if recomputes else Operations()
        parts = (traced.passes - backward, found), (backward, warm)
        return sum(pass_seconds(part, each, traced.tokens, tokens, count) for part, each in parts)

    more = units("in_step") * bubble
    train = max(both(traced) + _beside_calls(counts, engine, grid, found) * count for counts, traced in stages) * more
    return train, max(pass_seconds(traced.forward, found, traced.tokens, tokens, count) for _, traced in stages) * more


def _beside_calls(counts: Counts, engine: EngineConfig, grid: Grid, found: Mapping[Operation, float]) -> float:
    """What a micro-batch takes beside its calls: in the wrap, to add up gradients, and where parameters are gathered."""
    is_sharded = SHARDS_PARAMETERS[engine.wrap]
    wrap = units(f"host_wrap_{engine.wrap}") * sum(number for _, number in counts.sizes)
    gathered = 2 * gather_seconds(counts.whole, grid) + reduce_seconds(counts.trained, grid) if is_sharded else 0.0
    added = sum(number * found[accumulation(size)] for size, number in counts.sizes)
    if is_sharded and grid.shards > 1 and 4 * counts.largest_layer >= LARGE_BYTES:
        # weights twice, gradients, and gradients as they are received
        added += 4 * (2 * counts.whole + 2 * counts.trained) * found[fresh()]
    return wrap * found[host()] + gathered + added


def is_cold(stages: Iterable[Counts]) -> bool:
    """Whether a pass goes through more weights than caches hold, so that a call finds its own in memory."""
    return max(counts.whole for counts in stages) * 4 > CACHED_BYTES


def optimizer_seconds(
    counts: Counts, engine: EngineConfig, grid: Grid, work: Work, num_processes: int, threads: int = 1
) -> float:
    """Of all optimizer steps of a batch: its rank's share of the tensors."""
    found = seconds_of([host()], num_processes)
    found |= seconds_of([adam(size) for size, _ in counts.sizes], num_processes, threads=threads)
    own = sum(number * found[adam(size)] for size, number in counts.sizes) / grid.shards
    own += units(f"host_optimizer_{engine.wrap}") * sum(number for _, number in counts.sizes) * found[host()]
    if not SHARDS_PARAMETERS[engine.wrap]:
        own += sum(each(counts.trained, grid, "_large") for each in (reduce_seconds, gather_seconds))  # of one buffer
    return own * work.num_minibatches * units("in_step")


def rested_seconds(num_bytes: float, rest: float) -> float:
    """How much longer memory takes that comes from the kernel once it has been free for `rest` seconds, at most 8 of them, than
    memory that was free just now: hosts take back what a virtual machine has free. The first call for a rest takes as long.
    """
    whole = min(MOST_REST_SECONDS, 2 ** math.ceil(math.log2(max(1.0, rest))))
    size = max(1, min(RESTED_BYTES, round(num_bytes), psutil.virtual_memory().available // 2))
    return _rested(whole, size) * num_bytes


@functools.cache
def _rested(rest: int, size: int) -> float:
    """Of one byte of so many."""

    def take() -> None:
        torch.empty(size, dtype=torch.uint8).fill_(1)

    take()
    time.sleep(rest)
    return max(0.0, timed(take) - timed(take)) / size


def gather_seconds(elements: int, grid: Grid, size: str = "") -> float:
    """Of all-gathers of so many elements over the ranks that share them, as float32. `size`: of a collective, "" or "_large"."""
    return seconds(f"gloo_gathered{size}_mib") * elements * 4 / 2**20 * (1 - 1 / grid.shards)


def reduce_seconds(elements: int, grid: Grid, size: str = "") -> float:
    """Likewise, of reduce-scatters."""
    return seconds(f"gloo_reduced{size}_mib") * elements * 4 / 2**20 * (1 - 1 / grid.shards)


def samples_seconds(num_samples: int, num_processes: int) -> float:
    """To make a step's batch of samples: texts become tokens, tokens micro-batches."""
    return units("host_sample") * num_samples * seconds_of([host()], num_processes)[host()]


def canary_seconds(forward: float, tokens: float) -> float:
    """Trainer and a replica score it in turn. `forward`: seconds of a forward pass over `tokens`."""
    return 2 * forward * CANARY_SEQUENCES * CANARY_TOKENS / tokens


def pass_seconds(
    operations: Operations,
    found: Mapping[Operation, float],
    tokens: int,
    wanted_tokens: float,
    num_microbatches: int,
) -> float:
    """Of `wanted_tokens` in so many micro-batches, where the operations are those of one of `tokens`."""
    calls = sum(operations.values()) * units("host_call") * found[host()]
    own = sum(count * found[each] for each, count in operations.items())
    return own * wanted_tokens / tokens + calls * num_microbatches


def host_share(num_processes: int) -> float:
    """How much longer what Python does takes than where measured.json's seconds of a CPU were measured."""
    return float(seconds_of([host()], num_processes)[host()] / units("host_seconds"))
