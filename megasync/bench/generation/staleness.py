"""`python -m megasync.bench staleness` on one trainer rank: seconds of so many batches at several `rollout.max_staleness`.

The run's own stream of groups over real replicas, GRPO steps of a real engine, and a real sync after each; responses have
lengths with a long tail, set per request. All rows train the same prompts, one after another, on the same replicas. Each
process is pinned to a core: replica r to core r, as far as there are cores, the trainer to the last. Leaves out tables
(report.py) and rewards, which are made up.

    python -m megasync.bench staleness --config configs/bench_staleness.yaml [key=value ...] [--json FILE]
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import psutil

from bridge.generation import GenerationRequest
from bridge.replicas.pool import ReplicaPool
from megasync.bench.common.program import Measured
from megasync.bench.common.rank import BenchRank
from megasync.bench.generation.requests import long_tail
from megasync.config.load import with_changes
from megasync.rewards.pool import Scored
from megasync.rollouts.dispatch import COLLECT_SECONDS
from megasync.rollouts.group import Group
from megasync.rollouts.rollout import batch_metrics, samples_of, stream_settings
from megasync.rollouts.stream import RolloutStream
from megasync.run.weights import build_exporter

ROWS = ((0, "drain"), (1, "drain"), (1, "continue"), (4, "drain"), (4, "continue"))
LONGEST_TO_MEDIAN = 8


class StalenessBench(BenchRank):
    """Everything of the one rank."""

    def start(self) -> None:
        self.engine = self.build_engine(self.config.engine)
        self.pool = self.start_pool()
        self.sender = self.publisher(build_exporter(self.engine), self.pool)
        bench, longest = self.config.bench, self.config.rollout.max_new_tokens
        number, median = bench.num_batches * self.config.data.batch_size, bench.median_tokens or longest / LONGEST_TO_MEDIAN
        self.lengths = long_tail(number, median, longest, self.config.run.seed)

    def run(self) -> Measured:
        assert self.pool is not None
        cores = pin(self.pool)
        self.say("warming up")
        self._run_row(1, "continue", min(2, self.config.bench.num_batches))
        rows: list[Measured] = []
        lengths = {"median": statistics.median(self.lengths), "mean": statistics.fmean(self.lengths), "most": max(self.lengths)}
        results: Measured = {"rounds": rows, "cores": cores, "lengths": lengths}
        for number in range(self.config.bench.rounds):
            for staleness, on_update in ROWS[:: -1 if number % 2 else 1]:
                row = {"round": number, **self._run_row(staleness, on_update, self.config.bench.num_batches)}
                self.say(f"round {number + 1}  {staleness} {on_update:<9}{row['seconds']:.1f} s")
                rows.append(row)
            self.keep(results, is_complete=False)
        return results

    def _run_row(self, staleness: int, on_update: str, num_batches: int) -> Measured:
        """As loop.py has it."""
        pool, sender = self.pool, self.sender
        assert pool is not None
        pool.call("set_on_update", on_update)
        config = with_changes(self.config, {"rollout.max_staleness": staleness, "run.steps": num_batches})
        settings = replace(stream_settings(config, scores_groups=False), expected_tokens=statistics.fmean(self.lengths))
        stream = RolloutStream(pool, settings, self._group, score, print)
        sender.publish(0)
        stream.serve(0)
        found: list[dict[str, float]] = []
        pauses: list[float] = []
        begin = time.perf_counter()
        for step in range(num_batches):
            stream.admit(step)
            waited_from = time.perf_counter()
            groups = stream.take(step)
            assert groups is not None, "a replica died"
            samples = [sample for place, group in enumerate(groups) for sample in samples_of(group, place)]
            found.append(batch_metrics(samples, step, 1.0, time.perf_counter() - waited_from))
            self.engine.update(self.engine.prepare(samples))
            pauses.append(sender.publish(step + 1).pause_seconds)
            stream.serve(step + 1)
        seconds = time.perf_counter() - begin
        stream.close()
        # these end after the stream's last calls, which would take the samples of the next row
        pool.gather([pool.collect(replica, COLLECT_SECONDS) for replica in pool.members])
        return {
            "max_staleness": staleness,
            "on_update": on_update,
            "seconds": seconds,
            "wait_seconds": sum(one["rollout/wait_seconds"] for one in found),
            "pause_seconds": sum(pauses),
            "staleness_mean": statistics.fmean(one["staleness/mean"] for one in found),
            "staleness_max": max(one["staleness/max"] for one in found),
        }

    def _group(self, ordinal: int) -> Group:
        sizes, generator = self.config.bench, random.Random(f"{self.config.run.seed} {ordinal}")
        vocabulary: int = self.engine.mbridge.hf_config.vocab_size
        prompt = tuple(generator.randrange(vocabulary) for _ in range(sizes.prompt_tokens))
        size, length = self.config.rollout.group_size, self.lengths[ordinal]
        return Group(ordinal, GenerationRequest(prompt, num_samples=size, max_new_tokens=length, seed=ordinal))


async def score(group: Group, samples: Sequence[int]) -> list[Scored]:
    """Half of a group is worth something, so that it teaches."""
    return [Scored(float((group.key + sample) % 2), {}) for sample in samples]


def pin(pool: ReplicaPool) -> dict[str, list[int]]:
    """Give each replica, with its engine, a core, and this process the last; who has which."""
    cores = sorted(os.sched_getaffinity(0))
    chosen = {"trainer": cores[-1:]}
    for place, (replica, actor) in enumerate(zip(pool.members, pool._chosen(), strict=True)):
        process, own = psutil.Process(actor.pid), cores[place % len(cores) :][:1]
        chosen[f"replica {replica}"] = own
        for each in (process, *process.children(recursive=True)):
            _pin_threads(each, own)
    _pin_threads(psutil.Process(), cores[-1:])
    return chosen


def _pin_threads(process: psutil.Process, cores: list[int]) -> None:
    with suppress(psutil.NoSuchProcess):
        for thread in process.threads():
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(thread.id, cores)
