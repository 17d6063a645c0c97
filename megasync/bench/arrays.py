"""`python -m megasync.bench arrays`: a large batch from the replicas' messages to packed micro-batches, generation stood in for.

Two processes over gloo: rank 0 runs the stream of groups with its scheduler and rewards, and hands each data-parallel rank its
share; the other process is each of the other ranks in turn. Measured are the seconds of each stage and the most memory above
what the process had before. Leaves out generation, the decoding of responses and training.

    python -m megasync.bench arrays --config configs/bench_cpu.yaml [key=value ...] [--json FILE]
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bridge.generation import GenerationRequest
from engine.batch import MicroBatch, SampleTable, needed_samples, pack, plan_microbatches, split_evenly
from engine.parallel import Layout
from engine.sample import Sample
from megasync.bench.config import ArraysBenchConfig, BenchRoot
from megasync.bench.machine import describe_machine
from megasync.bench.memory import give_back_free_memory, status_bytes
from megasync.bench.stand_in import VERSION, StandInPool, message
from megasync.bench.tables import print_table
from megasync.config.load import load_config, save_config
from megasync.distribute import TokenScatter
from megasync.files import write_atomically
from megasync.launch.processes import run_to_end, torchrun
from megasync.launch.scope import listen_on_loopback
from megasync.rollouts.group import Group, StreamSettings
from megasync.rollouts.rewards.functions import RewardInput
from megasync.rollouts.rewards.pool import RewardPool, Scored
from megasync.rollouts.rollout import batch_metrics, samples_of
from megasync.rollouts.stream import RolloutStream

MIB = 2**20
OTHER_RANK = 1
STAGES = {
    "stream": "groups handed out, messages become arrays, token_count in its process, batch chosen",
    "samples": "groups become samples",
    "table": "sizes and rewards of all samples, metrics",
    "plan": "who packs what",
    "scatter": "each rank's share, sent one after another",
    "pack": "the rank's own micro-batches",
}


class Stages:
    """Seconds, summed, and most resident bytes above those at the beginning, by stage."""

    def __init__(self) -> None:
        give_back_free_memory()
        self.before = status_bytes(os.getpid())["VmRSS"]
        self.seconds: dict[str, float] = {}
        self.peak_bytes: dict[str, int] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5")
        begin = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
        peak = status_bytes(os.getpid())["VmHWM"] - self.before
        self.peak_bytes[name] = max(self.peak_bytes.get(name, 0), peak)

    def measured(self) -> dict[str, Any]:
        total = {"seconds": sum(self.seconds.values()), "peak_bytes": max(self.peak_bytes.values())}
        return {**total, "stage_seconds": self.seconds, "stage_peak_bytes": self.peak_bytes}


def take_batch(config: BenchRoot, stages: Stages) -> list[Sample]:
    """The first batch of a stream whose replicas have every answer ready."""
    sizes, rollout = config.bench_arrays, config.rollout.model_copy(update={"reward": "token_count"})
    prompt_ids = np.zeros(sizes.prompt_tokens, np.int32)
    request = GenerationRequest(tuple(prompt_ids.tolist()), sizes.group_size, sizes.response_tokens)
    most = sizes.response_tokens

    async def score(group: Group, samples: Sequence[int]) -> list[Scored]:
        done = [completion for sample in samples if (completion := group.completions[sample]) is not None]
        return await rewards.score_group([RewardInput("", "", "", len(one.token_ids), most) for one in done])

    staleness, steps = rollout.max_staleness, VERSION + rollout.max_staleness + 2
    slots = rollout.max_num_seqs + sizes.group_size if staleness else None
    settings = StreamSettings(staleness, sizes.num_prompts, steps, slots, most / 2, 600.0)
    with RewardPool(rollout) as rewards:
        pool: Any = StandInPool(sizes)
        stream = RolloutStream(pool, settings, lambda ordinal: Group(ordinal, request), score, print)
        stream.run(rewards.score(RewardInput("", "", "", 1, most)))  # its process has started
        with stages.measure("stream"):
            stream.serve(VERSION)
            stream.admit(VERSION)
            groups = stream.take(VERSION)
        stream.close()
    assert groups is not None
    with stages.measure("samples"):
        return [sample for place, group in enumerate(groups) for sample in samples_of(group, place)]


def run_rank(config: BenchRoot) -> dict[str, Any]:
    """What this process measured; 0 is the trainer's rank 0, the other one is the last of all after it was each of the others."""
    sizes, rank = config.bench_arrays, dist.get_rank()
    last, stages = sizes.data_size - 1, Stages()
    table = first_table(config, stages)
    num_minibatches, limit = config.algorithm.num_minibatches, config.engine.tokens_per_microbatch
    with stages.measure("plan"):
        needed = needed_samples(table.lengths, num_minibatches, sizes.data_size, limit)
    peers = [[0], *[[OTHER_RANK]] * last]
    for data_rank in range(1, last if rank else 1):
        TokenScatter(layout(data_rank, sizes), peers)(table, needed)
    data_rank = last if rank else 0
    with stages.measure("scatter"):
        table = TokenScatter(layout(data_rank, sizes), peers)(table, needed)
    with stages.measure("pack"):
        microbatches = pack_own(config, table, data_rank)
    assert sum(len(micro.samples) for micro in microbatches) == len(needed[data_rank])
    return stages.measured()


def first_table(config: BenchRoot, stages: Stages) -> SampleTable:
    """The batch's table, with tokens on rank 0 alone."""
    box: list[SampleTable | None] = [None]
    if dist.get_rank() == 0:
        samples = take_batch(config, stages)
        with stages.measure("table"):
            batch_metrics(samples, VERSION, 1.0, 0.0)
            table = SampleTable.of(samples)
        box[0] = table.only([])
    dist.broadcast_object_list(box, src=0)
    return table if dist.get_rank() == 0 else box[0]  # type: ignore[return-value]


def layout(data_rank: int, sizes: ArraysBenchConfig) -> Layout:
    """Of this process as that data-parallel rank."""
    alone = {"tensor_rank": 0, "tensor_size": 1, "pipeline_rank": 0, "pipeline_size": 1, "expert_size": 1}
    data = {"data_rank": data_rank, "data_size": sizes.data_size, "expert_data_rank": data_rank}
    return Layout(dist.get_rank(), dist.get_world_size(), **alone, **data)


def pack_own(config: BenchRoot, table: SampleTable, data_rank: int) -> list[MicroBatch]:
    """As Engine.prepare does."""
    microbatches = []
    for part in split_evenly(len(table), config.algorithm.num_minibatches):
        own = table.part(part)
        bins = plan_microbatches(own.lengths, config.bench_arrays.data_size, config.engine.tokens_per_microbatch)
        microbatches += [pack(own, indices, 1, torch.device("cpu")) for indices in bins[data_rank]]
    return microbatches


def show(results: dict[str, Any]) -> None:
    sizes = results["config"]["bench_arrays"]
    print(
        f"{sizes['num_prompts']} prompts of {sizes['prompt_tokens']} tokens x {sizes['group_size']} samples of "
        f"{sizes['response_tokens']} tokens, {sizes['data_size']} data-parallel ranks; messages of "
        f"{results['message_bytes'] / MIB:.2f} MiB"
    )
    ranks = results["ranks"]
    rows = [
        [stage, *(cell for rank in ranks for cell in _cells(rank["stage_seconds"], rank["stage_peak_bytes"], stage))]
        for stage in STAGES
    ]
    rows.append(["all", *(cell for rank in ranks for cell in (f"{rank['seconds']:.2f}", f"{rank['peak_bytes'] / MIB:.0f}"))])
    titles = ("stage", "rank 0, s", "peak MiB", "another, s", "peak MiB")
    print_table("a batch's arrays; memory above what the process had before", titles, rows)
    for stage, meaning in STAGES.items():
        print(f"{stage:<9}{meaning}")


def _cells(seconds: dict[str, float], peak_bytes: dict[str, int], stage: str) -> tuple[str, str]:
    return (f"{seconds[stage]:.3f}", f"{peak_bytes[stage] / MIB:.0f}") if stage in seconds else ("", "")


def run(config: BenchRoot, json_path: Path | None) -> int:
    """Measure on two processes; prints a table, writes JSON. Exit code 0, or that of the processes."""
    config_path, results_path = config.run.folder / "config.yaml", config.run.folder / "bench_arrays.json"
    save_config(config, config_path)
    results_path.unlink(missing_ok=True)
    listen_on_loopback()
    code = run_to_end(torchrun(2, "megasync.bench.arrays", str(config_path), str(results_path)))
    if code or not results_path.exists():
        return code or 1
    results = {"bench": "arrays", **describe_machine(), "config": config.model_dump(), **json.loads(results_path.read_text())}
    for path in filter(None, (results_path, json_path)):
        write_atomically(path, json.dumps(results, indent=1) + "\n")
    show(results)
    return 0


def main(arguments: Sequence[str]) -> int:
    """One of the two processes."""
    config_path, results_path = arguments
    config = load_config(config_path, root=BenchRoot)
    dist.init_process_group("gloo")
    ranks: list[Any] = [None, None]
    dist.all_gather_object(ranks, run_rank(config))
    if dist.get_rank() == 0:
        write_atomically(Path(results_path), json.dumps({"ranks": ranks, "message_bytes": len(message(config.bench_arrays, 0))}))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
