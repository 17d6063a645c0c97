"""`megasync serve CONFIG [key=value ...] --port N`: the engine and its replicas for clients of Tinker's package.

    megasync serve configs/smollm2.yaml engine.wrap=ddp engine.lora.rank=32 --port 8000
    TINKER_API_KEY=tml-mine python my_loop.py     # tinker.ServiceClient(base_url="http://127.0.0.1:8000")

Started by hand it checks the config and becomes torchrun; each rank runs `serve_rank`. Rank 0 has the HTTP server in a thread,
and takes one work after another from its desk; all ranks execute that work, over the control group. After a kill the
same command goes on where the log ends.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from engine.config import OFFLOAD_KINDS, ParallelConfig
from megasync.checks.check import check_packages, check_run_folder
from megasync.checks.data import check_engine_arguments
from megasync.checks.served_sizes import check_cache_memory
from megasync.checks.settings import check_layout, check_settings
from megasync.config.errors import ConfigError, main_errors, refuse, shown_value, wrong
from megasync.config.files import lock, write_atomically
from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.launch import launcher
from megasync.launch.devices import visible_devices
from megasync.launch.machine import check_temporary_folder
from megasync.launch.num_ranks import default_num_ranks
from megasync.launch.processes import end_on_sigterm, hold_signals, run_and_leave, torchrun
from megasync.launch.scope import check_ray, is_one_machine, listen_on_loopback
from megasync.models.folder import check_model_folder, read_json_object
from megasync.service.journal import LOG_FILE

if TYPE_CHECKING:
    from bridge.replicas.pool import ReplicaPool
    from megasync.run.rank_zero import RankZero
    from megasync.service.front import Front
    from megasync.service.requests import Request, Result
    from megasync.service.work_queue import Work
    from megasync.service.worker import Worker

KEY = "MEGASYNC_API_KEY"
SYNC_ATTEMPTS = 3
PORT_SECONDS = 10.0  # by then the ranks of a killed launcher have ended
# Keys that change the results of logged requests, which must be the same when these are done again.
RESULT_KEYS = (
    *("run.seed", "run.deterministic", "model.path", "model.dtype", "model.exact", "engine.tokens_per_microbatch"),
    *("rollout.max_model_len", "service.shared_clients"),
    *("service.base_model", "service.frozen_unembed", *(f"engine.parallel.{name}" for name in ParallelConfig.model_fields)),
    *(f"engine.lora.{name}" for name in ("rank", "alpha", "targets", "rslora")),
    *(f"engine.{name}" for name in ("wrap", "overrides", "gradient_dtype", "balance", "head_dtype", "logits_chunk_tokens")),
    *(f"engine.{name}" for name in ("fusions", "kernels")),
)
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="megasync serve", description="Serve an engine to clients that write the loop.")
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="such as engine.wrap=ddp")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="to listen on; 0: any that is free (default: 8000)")
    parser.add_argument("--nproc", type=int, metavar="N", help="trainer ranks on this machine")
    help_text = "start all ranks again where one has died, so often (default: 3)"
    parser.add_argument("--max-restarts", type=int, default=3, metavar="K", help=help_text)
    given = parser.parse_intermixed_args(list(arguments))
    if not 0 <= given.port < 2**16:
        parser.error(f"--port {given.port}: 0 to {2**16 - 1}")
    if given.nproc is not None and given.nproc < 1:
        parser.error(f"--nproc {given.nproc}: at least 1")
    if given.max_restarts < 0:
        parser.error(f"--max-restarts {given.max_restarts}: at least 0")
    with main_errors():
        is_rank = launcher.is_rank(os.environ)
    if is_rank:
        return serve_rank(given)
    with main_errors():
        config = load_config(given.config, given.overrides)
        num_ranks = given.nproc or default_num_ranks(config, len(visible_devices()))
        check_service(config, num_ranks)
        check_same(config, num_ranks)
        check_port(config, given.port)
        check_ray(config)
    command = torchrun(num_ranks, "megasync.service.command", given.config, *given.overrides, "--port", str(given.port))
    command[3:3] = ["--max-restarts", str(given.max_restarts)]
    sys.stdout.flush()
    hold_signals()
    return os.execv(command[0], command)  # noqa: S606 # no shell is wanted


def check_service(config: Config, num_ranks: int) -> None:
    """ConfigError for all that cannot work; data and rewards are the client's."""
    check_temporary_folder()
    check_settings(config, num_ranks)
    shape = check_model_folder(config.model.path)
    check_layout(config, shape, num_ranks)
    check_cache_memory(config)
    check_engine_arguments(config)
    check_packages(config)
    check_run_folder(config)
    refuse(_unserved(config))
    if config.service.host not in LOOPBACK and not os.environ.get(KEY):
        raise wrong(config, "service.host", f"others could connect, and {KEY} is not set", remedy=f"set {KEY} in the environment")


def check_port(config: Config, port: int) -> None:
    """ConfigError where nothing can listen there; for the launcher, since ranks that start again have to get their port back.

    Waits PORT_SECONDS for a port in use: ranks of a service that was killed end a moment later.
    """
    host, deadline = config.service.host, time.monotonic() + PORT_SECONDS
    while True:
        try:
            for family, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                socket.create_server(address[:2], family=family).close()
        except OSError as error:  # also a name without address
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(0.2)
                continue
            message = f"port = {port}: cannot listen at service.host = {host}: {error.strerror}"
            raise ConfigError(message, remedy="write --port N with another one, or 0 for any that is free") from error
        return


def check_same(config: Config, num_ranks: int) -> None:
    """ConfigError where the folder has requests that were logged with other settings; keeps those of a folder without any."""
    folder = config.run.folder / "service"
    file, log = folder / "settings.json", folder / LOG_FILE
    own = {"nproc": num_ranks} | {key: _shown(attrgetter(key)(config)) for key in RESULT_KEYS}
    if not file.exists() or not log.exists() or log.stat().st_size == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(own))
        return
    for key, former in read_json_object(file, "write another run.name, since its log is read by this file").items():
        if own.get(key, former) != former:
            problem = f"{key} = {own[key]}: the requests of {config.run.folder} were logged with {former}"
            given = f"--nproc {former}" if key == "nproc" else f"{key}=[{former}]" if "targets" in key else f"{key}={former}"
            raise ConfigError(problem, remedy=f"write {given}, or another run.name")


def _shown(value: Any) -> str:
    """Equal mappings alike."""
    return str(shown_value(dict(sorted(value.items())) if isinstance(value, dict) else value))


def _unserved(config: Config) -> Iterator[ConfigError]:
    """Errors for keys whose values a run may have, but no service."""
    only = {
        "algorithm.name": ("grpo", "clients sample from replicas, which supervised runs have not"),
        "algorithm.credit": ("episode", "clients compute advantages themselves"),
        "engine.lora.dropout": (0.0, "a request that is repeated must have the same result"),
        "engine.lora.adapter_path": ("", "each client's adapter has a start of its own"),
        "engine.optimizer.offload": (False, "a service moves adapters to host memory by itself"),
        "rollout.dtype": ("model", "replicas serve the first model before anything is trained"),
        "rollout.on_update": ("drain", "a sample has the tokens of one version alone"),
    }
    for key, (served, problem) in only.items():
        if attrgetter(key)(config) != served:
            yield wrong(config, key, problem, remedy=f"write {key}={shown_value(served)}" if served != "" else "leave it out")
    rollout = config.rollout
    if rollout.is_colocated and rollout.replicas * rollout.tensor_parallel > 1:
        remedy = "write rollout.replicas=1 and rollout.tensor_parallel=1, or rollout.placement=separate"
        yield wrong(config, "rollout.placement", "a service shares a GPU with one vLLM worker alone", remedy=remedy)
    if rollout.is_colocated and rollout.offload_trainer != OFFLOAD_KINDS:  # its default, which a service passes over
        problem = "a service leaves the trainer where it is, beside the replica"
        yield wrong(config, "rollout.offload_trainer", problem, remedy="leave it out")
    is_full, has_adapters = config.service.full_parameters, config.engine.lora.rank > 0
    if is_full and has_adapters:
        yield wrong(
            config, "engine.lora.rank", "service.full_parameters=true trains no adapters", remedy="write engine.lora.rank=0"
        )
    elif not is_full and not has_adapters:
        remedy = "set it to the largest rank that a client may have, or write service.full_parameters=true"
        yield wrong(config, "engine.lora.rank", "clients train adapters", remedy=remedy)
    if config.model.dtype == "float16":
        yield wrong(config, "model.dtype", "clients' losses are not scaled", choices="bfloat16, float32", remedy="write bfloat16")
    for name in config.teacher.names:
        yield wrong(config, f"teacher.{name}", "clients have no teachers here", remedy="leave the section out")


def serve_rank(given: argparse.Namespace) -> int:
    """One rank, until it is ended."""
    rank = int(os.environ["RANK"])
    with main_errors(speak=rank == 0):
        launcher.await_store(os.environ)
        config = load_config(given.config, given.overrides)
        check_service(config, int(os.environ["WORLD_SIZE"]))
        if rank == 0:
            config.run.folder.mkdir(parents=True, exist_ok=True)
            lock(config.run.folder)
        if is_one_machine(config):
            listen_on_loopback()  # before anything imports ray
    end_on_sigterm(and_on_sigint=True)
    if config.run.deterministic:
        from engine.runtime.random_state import use_deterministic

        use_deterministic()  # also by its environment, which replicas inherit
    with ExitStack() as ends:
        pool = _begin_replicas(config, rank, ends)
        from engine.runtime import parallel
        from megasync.run.rank_zero import RankZero
        from megasync.service.front import Front
        from megasync.service.worker import Worker, build_engine

        parallel.initialize(config.engine.parallel, config.run.seed)
        ends.callback(parallel.shutdown)
        with main_errors(speak=rank == 0, of_files=False):
            engine = build_engine(config)
            replicas: RankZero[ReplicaPool] = RankZero(pool)
            worker = Worker(config, engine, replicas)
            ends.callback(worker.close)
            done = worker.restore()
        front = RankZero(lambda: Front(config, worker, replicas, done, ends, given.port, os.environ.get(KEY, "")))
        serve(worker, front, done)
    return 0


def _begin_replicas(config: Config, rank: int, ends: ExitStack) -> Any:
    """Begin the start of rank 0's replicas; returns a function that waits for them. They end with `ends`."""
    if rank:
        return lambda: None
    from megasync.run.replica_start import ReplicaStart

    num_slots = config.service.adapter_slots if config.engine.lora.sync == "adapter" else 1
    start = ReplicaStart(config, detokenizes=True, adapter_slots=num_slots)
    ends.callback(start.close)
    start.begin()
    return start.finish


def serve(worker: Worker, front: RankZero[Front], done: int) -> None:
    """Every rank: one work after another. Collective."""
    every, executed = worker.config.service.checkpoint_every, done
    while True:
        work: Work = front.call(lambda front: next_work(front, worker.present))
        if work.kind == "end":
            return
        if work.kind == "sync":
            sync(worker, front, work.version, work.slot)
            continue
        first = work.requests[0]
        if worker.loses_former(first.call.kind, first.call.arguments):
            worker.checkpoint(executed)  # so that nothing before it is done again
        train(worker, front, work.requests)
        executed += len(work.requests)
        if every and executed % every == 0:  # then these are the first ones (work_queue.py)
            worker.checkpoint(executed)


def next_work(front: Front, present: Mapping[str, int]) -> Work:
    """Samples need no other rank: they are sent off here."""
    while (work := front.desk.queue.next_work(lambda: {} if front.sampling.lost else present)).kind == "sample":
        front.sampling.start(work.requests, present)
    return work


def train(worker: Worker, front: RankZero[Front], requests: Sequence[Request]) -> None:
    """A training request on all ranks, or passes done together. A refusal is returned to the client."""
    from engine.adapters import RefusedError
    from megasync.service.bodies import BadRequestError

    found: list[Any] = []
    try:
        if len(requests) > 1:
            found += worker.share([each.call.arguments for each in requests])
        else:
            found.append(getattr(worker, requests[0].call.kind)(**requests[0].call.arguments))
    except (RefusedError, BadRequestError) as refused:
        found.append(refused)
    if front.here is not None:
        front.here.finish_all([(request, result_of(done)) for request, done in zip(requests, found, strict=True)])


def result_of(done: Any) -> Result:
    """A client's result, from the value or the refusal of the worker."""
    from engine.driven import Passed
    from megasync.service.requests import Result, as_json, error
    from megasync.service.wire import forward_backward_output

    if isinstance(done, ValueError):
        return error(str(done), "user")
    if isinstance(done, Passed):
        return Result("protobuf", forward_backward_output(done.log_probs, {"loss:sum": done.loss}))
    return as_json(done)


def sync(worker: Worker, front: RankZero[Front], version: str, slot: int) -> None:
    """Bring a version to the replicas, into `slot`, which replaces dead ones; where that fails, its samples fail."""
    from bridge.messages import SyncError
    from engine.adapters import RefusedError
    from megasync.service.requests import error

    problem = error("", "server")
    for _ in range(SYNC_ATTEMPTS):
        if front.call(lambda front: front.renew_replicas()):
            worker.renew_members()
        try:
            worker.sync(version, slot)
        except RefusedError as refused:
            problem = error(str(refused), "user")
            break
        except SyncError as failed:
            problem = error(str(failed), "server")
            if front.here is not None:
                front.here.sampling.lost |= set(failed.failed_replicas)
        else:
            return
    if front.here is not None:
        front.here.finish_all([(request, problem) for request in front.here.desk.queue.take_samples(version)])


if __name__ == "__main__":
    run_and_leave(main)
