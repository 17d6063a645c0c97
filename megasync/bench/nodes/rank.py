"""One trainer rank of the sync between nodes: every case, by lanes and by one group in turns, round by round.

A case is (sender nodes, receiving nodes, replicas on each of these). Rank 0 writes what was measured. Started by
docs/bench/nodes.sh in a namespace each, with torchrun's variables.

    python -m megasync.bench.nodes.rank RESULTS.json ROUNDS "1x1 2x4 2x1x2" 10.82.0.5:7000,10.82.0.5:7001 10.82.0.6:7000 ...
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bridge.config import SyncConfig
from bridge.export.source import Part
from bridge.layout.manifest import Manifest, TensorSpec
from bridge.layout.regions import Copy, contiguous
from bridge.send.publish import Publisher
from megasync.bench.common.model import qwen3, tensors_of
from megasync.bench.config import BenchConfig
from megasync.bench.nodes.pool import ReceiverPool, connect, num_lanes
from megasync.bench.nodes.receiver import link_bytes

WAYS = {"lanes": True, "one group": False}
MOST_ROUNDS = {"lanes": 100, "one group": 3}  # it takes long, and the same every time


class RandomSource:
    """Random weights of a Qwen3 of about 100 M parameters, in Hugging Face names, as a rank under DDP holds them: in place.

    The same on every rank that makes one. Without megatron-core: what is measured is how weights travel.
    """

    stage, num_stages, has_tensors = 0, 1, True

    def __init__(self, *, is_sender: bool) -> None:
        self.is_sender = is_sender
        generator, shapes = torch.Generator().manual_seed(0), tensors_of(qwen3(BenchConfig()))
        self.tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
        self._memory = {name: tensor.view(-1) for name, tensor in self.tensors.items()}
        whole = {name: contiguous(tensor.numel()) for name, tensor in self.tensors.items()}
        self._copies = [(Copy(region, name, region),) for name, region in whole.items()]

    def manifest(self) -> Manifest:
        return Manifest(tuple(TensorSpec(name, "bfloat16", tuple(tensor.shape)) for name, tensor in self.tensors.items()))

    def parts(self) -> Iterator[Part]:
        yield Part(self._copies, self._memory)

    def change(self) -> None:
        """Other weights to bring over, the same on every rank."""
        for tensor in self.tensors.values():
            tensor.neg_()


class Cases:
    """`nodes`: of each receiving node the receivers' addresses. Methods are collective over all ranks."""

    def __init__(self, nodes: list[list[str]]) -> None:
        self.rank = dist.get_rank()
        self.source = RandomSource(is_sender=self.rank == 0)
        self.connections = [
            [connect(host, int(port)) for host, _, port in (address.partition(":") for address in node)] if self.rank == 0 else []
            for node in nodes
        ]
        self.version = 0

    def measure(self, case: tuple[int, ...], num_rounds: int) -> dict[str, Any]:
        """Medians of each way; on rank 0."""
        num_senders, num_nodes, num_replicas = case
        group = dist.new_group(list(range(num_senders)), backend="gloo")
        rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        if self.rank < num_senders:
            receivers = [each for node in self.connections[:num_nodes] for each in node[:num_replicas]]
            pool = ReceiverPool(receivers) if self.rank == 0 else None
            publishers = {
                way: Publisher(self.source, pool, SyncConfig(transport="nccl", lanes=lanes, timeout_seconds=180.0), group)
                for way, lanes in WAYS.items()
            }
            for index in range(-1, num_rounds):  # -1 warms up: groups are made, the plan is agreed on
                for way, publisher in publishers.items():
                    if index >= min(num_rounds, MOST_ROUNDS[way]):
                        continue
                    measured = self._sync(publisher, pool, num_replicas, group)
                    if index >= 0:
                        rounds[way].append(measured)
                    if index == min(num_rounds, MOST_ROUNDS[way]) - 1:
                        self._compare(publisher, num_nodes * num_replicas)
            for publisher in publishers.values():
                publisher.close()
            if pool is not None:
                pool.call("leave")
        dist.barrier()
        return {"senders": num_senders, "nodes": num_nodes, "replicas": num_nodes * num_replicas, **self._summarise(rounds)}

    def _sync(self, publisher: Publisher, pool: ReceiverPool | None, num_replicas: int, group: Any) -> dict[str, Any]:
        self.version += 1
        self.source.change()
        before = self._count(pool, num_replicas, group)
        report = publisher.publish(self.version)
        after = self._count(pool, num_replicas, group)
        moved = {side: [b - a for a, b in zip(before[side], after[side], strict=True)] for side in before}
        counts = {"bytes": report.num_bytes, "buckets": report.num_buckets, "lanes": num_lanes(publisher)}
        return {"seconds": report.seconds, **counts, **moved}

    def _compare(self, publisher: Publisher, num_receivers: int) -> None:
        """Raises RuntimeError where a receiver holds something else than was sent."""
        for receiver in range(num_receivers):
            differing, problem = publisher.differing(receiver)
            if differing or problem:
                raise RuntimeError(f"version {self.version}, replica {receiver}: {problem or differing}")

    @staticmethod
    def _count(pool: ReceiverPool | None, num_replicas: int, group: Any) -> dict[str, list[int]]:
        """Bytes that links of senders have sent and those of receiving nodes have received and sent so far."""
        sent: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(sent, link_bytes()[1], group=group)
        counted = pool.call("link_bytes")[::num_replicas] if pool is not None else []
        return {"sent": sent, "received": [each[0] for each in counted], "passed_on": [each[1] for each in counted]}

    @staticmethod
    def _summarise(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
        return {
            way: {
                "seconds": [each["seconds"] for each in measured],
                "seconds_median": statistics.median(each["seconds"] for each in measured),
                **{name: measured[-1][name] for name in ("bytes", "buckets", "lanes")},
                **{
                    name: [statistics.median(column) for column in zip(*(each[name] for each in measured), strict=True)]
                    for name in ("sent", "received", "passed_on")
                },
            }
            for way, measured in rounds.items()
            if measured
        }


def main(arguments: Sequence[str]) -> int:
    path, rounds, wanted, *nodes = arguments
    cases = [tuple(int(number) for number in f"{case}x1".split("x")[:3]) for case in wanted.split()]
    dist.init_process_group("gloo")
    bench, results = Cases([node.split(",") for node in nodes]), []
    for case in cases:
        results.append(bench.measure(case, int(rounds)))
        if bench.rank == 0:
            Path(path).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(json.dumps(results[-1]), flush=True)
    for node in bench.connections:
        for each in node:
            each.send(None)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
