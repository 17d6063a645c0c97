"""The job that `megasync.submit` hands to Ray: one trainer actor a rank, all running the program that torchrun runs.

Holds no training code: an actor sets the variables torchrun would set and calls `main` of megasync.train. The first
rank to fail decides the exit code; the others are ended, since they may wait for it without end. The config is read at the
start: whether the run was asked to stop is looked up in the folder that it named then. Leaves out config checks.

    python -m megasync.launch.driver --num-ranks 2 -- CONFIG.yaml [key=value ...]      # within a Ray job
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from bridge.processes import MALLOC, MALLOC_ON_CPU
from bridge.replicas.places import let_gloo_reach_others
from megasync.config.errors import main_errors
from megasync.config.files import is_asked_to_stop
from megasync.config.load import load_config
from megasync.launch.cluster_room import Demand, Pool, placement_problem
from megasync.launch.processes import REFUSED, STOPPED, run_and_leave
from megasync.launch.scope import HOSTS
from megasync.launch.stop_request import forget_former_stop, launched

PROGRAM = "megasync.train:main"
GRACE_SECONDS = 5.0  # after the first failure, for a rank's death to become known too: it is the likelier cause
PLACEMENT_SECONDS = 300.0
LOG_SECONDS = 1.0  # the ranks' last lines are on their way to this process


class Place(NamedTuple):
    """A rank's node, and the GPU that is its own, if any."""

    node: str
    gpu: str


class TrainerRank:
    """One process of the trainer."""

    def place(self) -> tuple[str, str]:
        """A Place."""
        context = ray.get_runtime_context()
        return context.get_node_id(), ",".join(context.get_accelerator_ids().get("GPU", []))

    def open_store(self) -> tuple[str, int]:
        """Address and port of a new store through which the ranks find each other; it lives as long as this process."""
        from bridge.transport.store import open_store

        address = ray.util.get_node_ip_address()
        self._store = open_store(address)
        return address, self._store.port

    def run(self, program: str, arguments: Sequence[str], environment: dict[str, str]) -> int:
        """The program's exit code. An exception is the rank's own error, with its traceback."""
        os.environ.update(environment)
        if int(environment[HOSTS]) > 1:
            let_gloo_reach_others()
        module, _, function = program.partition(":")
        try:
            code = getattr(importlib.import_module(module), function)(list(arguments))
        except SystemExit as leaving:
            code = leaving.code
        return code if isinstance(code, int) else int(code is not None)


def start_ranks(num_ranks: int, gpus_per_rank: int, trainer_nodes: int = 0) -> tuple[Any, list[Any]]:
    """A placement group and the actors in it: a bundle a rank, on as few nodes as may be, or a bundle each of `trainer_nodes`.

    Raises:
        RuntimeError: the cluster has no room for all ranks at once.
    """
    ranks_each = num_ranks // trainer_nodes if trainer_nodes else 1
    bundle = {"CPU": float(ranks_each)} | ({"GPU": float(gpus_per_rank * ranks_each)} if gpus_per_rank else {})
    group = placement_group([bundle] * (num_ranks // ranks_each), strategy="STRICT_SPREAD" if trainer_nodes else "PACK")
    if not group.wait(PLACEMENT_SECONDS):
        remove_placement_group(group)
        raise RuntimeError(
            f"the cluster has no room for {num_ranks} trainer ranks of {bundle}; it has {ray.cluster_resources()}, "
            f"with {ray.available_resources()} free. Start fewer ranks (--num-ranks) or add nodes."
        )
    variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if not gpus_per_rank:
        variables[MALLOC] = os.environ.get(MALLOC, MALLOC_ON_CPU)
    actor = ray.remote(num_cpus=1, num_gpus=gpus_per_rank, max_restarts=0)(TrainerRank)
    ranks = [
        actor.options(
            name=f"trainer-rank-{rank}",
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank // ranks_each),
            runtime_env={"env_vars": variables},
        ).remote()
        for rank in range(num_ranks)
    ]
    return group, ranks


def in_order_of_nodes(places: Sequence[Place], ranks: Sequence[Any]) -> tuple[list[Place], list[Any]]:
    """The ranks of one node in sequence, as under torchrun; Ray may place bundles in turns."""
    nodes = list(dict.fromkeys(place.node for place in places))
    order = sorted(range(len(places)), key=lambda rank: (nodes.index(places[rank].node), rank))
    return [places[rank] for rank in order], [ranks[rank] for rank in order]


def rank_environments(places: Sequence[Place], address: str, port: int, num_hosts: int = 1) -> list[dict[str, str]]:
    """Variables that torchrun would set for each rank, from the places of the ranks and the address of the first one's store.

    `num_hosts`: nodes of the cluster; every node may have replicas.

    As under torchrun all ranks of a node see each other's GPUs, and the local rank says which of them is the rank's own.
    """
    nodes = [place.node for place in places]
    environments = []
    for rank, (node, gpu) in enumerate(places):
        gpus = ",".join(place.gpu for place in places if place.node == node)
        environments.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "LOCAL_RANK": str(nodes[:rank].count(node)),
                "LOCAL_WORLD_SIZE": str(nodes.count(node)),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # no rank is to open a store of its own
                HOSTS: str(num_hosts),
                **({"CUDA_VISIBLE_DEVICES": gpus} if gpu else {}),
            }
        )
    return environments


def answers_at_start(references: list[Any]) -> list[Any]:
    """Answers of all ranks before they run the program, in order.

    Raises:
        RuntimeError: one gives no answer; why, with its name, is Ray's.
    """
    try:
        answers: list[Any] = ray.get(references, timeout=PLACEMENT_SECONDS)  # raises the first error, without the others' answers
    except RayError as error:
        raise RuntimeError(f"a trainer rank did not start: {type(error).__name__}: {error}") from error
    return answers


def wait_for_ranks(running: dict[Any, int]) -> int:
    """0 once all ranks ended well, else the first failure's exit code; `running` maps references to ranks."""
    pending = list(running)
    while pending:
        ready, pending = ray.wait(pending, num_returns=1)
        if outcome(ready[0]) != 0:
            return report_failure(ready[0], pending, running)
    return 0


def outcome(reference: Any) -> int | RayError:
    """A finished rank's exit code, or why it has none."""
    try:
        code = ray.get(reference, timeout=0)
    except RayError as error:
        return error
    assert isinstance(code, int)
    return code


def report_failure(first: Any, pending: list[Any], running: dict[Any, int]) -> int:
    """Print the likeliest cause: a rank whose process died, else the rank that failed first."""
    deadline = time.monotonic() + GRACE_SECONDS
    failed = {first: outcome(first)}
    while pending and (left := deadline - time.monotonic()) > 0:
        ready, pending = ray.wait(pending, num_returns=1, timeout=left)
        failed |= {reference: result for reference in ready if (result := outcome(reference)) != 0}
    lost = (ActorDiedError, ActorUnavailableError)  # a lost connection shows sooner than a death on a busy machine
    died = [reference for reference, result in failed.items() if isinstance(result, lost)]
    cause = died[0] if died else first
    result = failed[cause]
    if isinstance(result, int):
        print(f"trainer rank {running[cause]} ended with exit code {result}", file=sys.stderr)
        return result
    print(f"trainer rank {running[cause]} failed:\n{result}", file=sys.stderr)
    return 1


def drive(
    num_ranks: int, program: str, arguments: Sequence[str], gpus_per_rank: int, trainer_nodes: int, variables: Mapping[str, str]
) -> int:
    """Run the program on all ranks, with `variables` in their environment; the exit code is the run's."""
    group, ranks = start_ranks(num_ranks, gpus_per_rank, trainer_nodes)
    try:
        places = [Place(*place) for place in answers_at_start([rank.place.remote() for rank in ranks])]
        places, ranks = in_order_of_nodes(places, ranks)
        num_hosts = sum(node["Alive"] for node in ray.nodes())
        ((address, port),) = answers_at_start([ranks[0].open_store.remote()])
        environments = rank_environments(places, address, port, num_hosts)
        running = {
            rank.run.remote(program, list(arguments), {**environment, **variables}): index
            for index, (rank, environment) in enumerate(zip(ranks, environments, strict=True))
        }
        return wait_for_ranks(running)
    finally:
        for rank in ranks:
            ray.kill(rank)
        remove_placement_group(group)


def begin_run(program: str, arguments: Sequence[str], submitted: float = math.inf) -> Path | None:
    """The run's folder, from now on with no `stop` but this run's; None: the ranks run another program than the trainer.

    `submitted`: when the job was, in seconds since the epoch; a `stop` that is newer is this run's.

    Raises:
        ConfigError: the config cannot be read, or a run is going on in its folder.
    """
    if program != PROGRAM:
        return None
    config, *overrides = arguments
    folder = load_config(config, overrides).run.folder
    forget_former_stop(folder, submitted)
    return folder


def main(argv: Sequence[str]) -> int:
    """Exit code 0: done; 75: stopped when asked to; 2: refused; else that of the rank that failed first."""
    parser = argparse.ArgumentParser(prog="python -m megasync.launch.driver", description=__doc__)
    parser.add_argument("--num-ranks", type=int, required=True)
    parser.add_argument("--trainer-nodes", type=int, default=0, help="run.trainer_nodes")
    pool_help = "vLLM replicas with GPUs of their own: a key of the config, their number, the GPUs of each, on one node"
    parser.add_argument("--pool", nargs=3, action="append", default=[], metavar=("KEY", "REPLICAS", "GPUS"), help=pool_help)
    parser.add_argument("--submitted", type=float, default=math.inf, help="when, in seconds since the epoch (default: now)")
    parser.add_argument("--program", default=PROGRAM, help="module:function(argv) that every rank runs")
    parser.add_argument("arguments", nargs="+")
    options = parser.parse_args(argv)
    with main_errors():
        folder = begin_run(options.program, options.arguments, options.submitted)
    ray.init(log_to_driver=True)
    gpus_per_rank = 1 if ray.cluster_resources().get("GPU") else 0
    try:
        nodes = {
            node["NodeManagerHostname"] + " " + node["NodeID"][:6]: node["Resources"] for node in ray.nodes() if node["Alive"]
        }
        pools = tuple(Pool(key, int(number), int(width)) for key, number, width in options.pool)
        demand = Demand(options.num_ranks, options.trainer_nodes, pools)
        if problem := placement_problem(nodes, demand):
            print(problem, file=sys.stderr)
            return REFUSED
        variables = launched(folder) if folder is not None else {}
        code = drive(options.num_ranks, options.program, options.arguments, gpus_per_rank, options.trainer_nodes, variables)
        return STOPPED if code == 0 and folder is not None and is_asked_to_stop(folder) else code
    except (RuntimeError, RayError) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        time.sleep(LOG_SECONDS)
        ray.shutdown()


if __name__ == "__main__":
    run_and_leave(main)
