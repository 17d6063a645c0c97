"""`megasync serve CONFIG [key=value ...] --port N`: the engine and its replicas for clients of Tinker's package.

    megasync serve configs/smollm2.yaml engine.wrap=ddp engine.lora.rank=32 --port 8000
    TINKER_API_KEY=tml-mine python my_loop.py     # tinker.ServiceClient(base_url="http://127.0.0.1:8000")

Started by hand it checks the config and becomes torchrun; each rank runs `serve_rank`. Rank 0 has the HTTP server in a thread,
and takes one work after another from its desk; all ranks execute what it hands out, over the control group. After a kill the
same command goes on where the log ends.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasync.checks.check import check_run_folder
from megasync.checks.settings import check_layout, check_settings
from megasync.checks.sizes import check_cache_memory
from megasync.config.errors import ConfigError, main_errors, refuse, refuse_if, wrong
from megasync.config.files import lock
from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.launch import launcher
from megasync.launch.devices import visible_devices
from megasync.launch.num_ranks import default_num_ranks
from megasync.launch.processes import end_on_sigterm, run_and_leave, torchrun
from megasync.launch.scope import check_ray, is_one_machine, listen_on_loopback
from megasync.models.folder import check_model_folder

if TYPE_CHECKING:
    from bridge.replicas.pool import ReplicaPool
    from engine.engine import Engine
    from megasync.run.rank_zero import RankZeroPart
    from megasync.service.desk import Request, Work
    from megasync.service.worker import Worker

KEY = "MEGASYNC_API_KEY"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="megasync serve", description="Serve an engine to clients that write the loop.")
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="such as engine.wrap=ddp")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="to listen on; 0: any that is free (default: 8000)")
    parser.add_argument("--nproc", type=int, metavar="N", help="trainer ranks on this machine")
    given = parser.parse_intermixed_args(list(arguments))
    if launcher.is_rank(os.environ):
        return serve_rank(given)
    with main_errors():
        config = load_config(given.config, given.overrides)
        num_ranks = given.nproc or default_num_ranks(config, len(visible_devices()))
        check_service(config, num_ranks)
        check_ray(config)
    command = torchrun(num_ranks, "megasync.service.command", given.config, *given.overrides, "--port", str(given.port))
    sys.stdout.flush()
    return os.execv(command[0], command)  # noqa: S606 # no shell is wanted


def check_service(config: Config, num_ranks: int) -> None:
    """ConfigError for all that cannot work; data and rewards are the client's."""
    check_settings(config, num_ranks)
    check_layout(config, check_model_folder(config.model.path), num_ranks)
    check_cache_memory(config)
    check_run_folder(config)
    if gpus := visible_devices():
        remedy = "serve from lane cpu, with CUDA_VISIBLE_DEVICES= in the environment"
        raise ConfigError(f"{len(gpus)} GPUs are visible: a service runs on CPUs alone yet", remedy=remedy)
    remedy = "write --nproc 1"
    refuse_if(num_ranks > 1, f"nproc = {num_ranks}: a service has one trainer rank yet", remedy=remedy)
    refuse(_unserved(config))
    if config.service.host not in LOOPBACK and not os.environ.get(KEY):
        raise wrong(config, "service.host", f"others could connect, and {KEY} is not set", remedy=f"set {KEY} in the environment")


def _unserved(config: Config) -> Iterator[ConfigError]:
    """Of keys whose values a run may have, but no service."""
    engine = config.engine
    if not engine.lora.rank:
        remedy = "set it to the largest rank that a client may have"
        yield wrong(config, "engine.lora.rank", "clients train adapters", remedy=remedy)
    if engine.wrap != "ddp":
        problem = "adapters of several clients take turns with ddp alone"
        yield wrong(config, "engine.wrap", problem, choices="ddp", remedy="write engine.wrap=ddp")
    if engine.lora.sync != "merged":
        problem = "replicas of a service get merged weights"
        yield wrong(config, "engine.lora.sync", problem, choices="merged", remedy="write engine.lora.sync=merged")
    if config.rollout.placement != "separate":
        problem = "replicas that sleep while the trainer works do not serve clients yet"
        yield wrong(config, "rollout.placement", problem, choices="separate", remedy="write rollout.placement=separate")
    if engine.lora.dropout:
        yield wrong(config, "engine.lora.dropout", "a request that is repeated must have the same result", remedy="write 0")
    if engine.lora.adapter_path:
        yield wrong(config, "engine.lora.adapter_path", "each client's adapter has a start of its own", remedy="leave it out")
    if engine.optimizer.offload:
        problem = "adapters that wait lie in host memory already"
        yield wrong(config, "engine.optimizer.offload", problem, remedy="write false")
    if config.model.dtype == "float16":
        yield wrong(config, "model.dtype", "clients' losses are not scaled", choices="bfloat16, float32", remedy="write bfloat16")
    if config.teacher.paths:
        yield wrong(config, "teacher.path", "clients have no teachers here", remedy="leave the section out")


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
    with ExitStack() as ends:
        pool = _begin_replicas(config, rank, ends)
        from engine.runtime import parallel
        from megasync.run.rank_zero import RankZeroPart
        from megasync.service.worker import Worker, build_engine

        parallel.initialize(config.engine.parallel, config.run.seed)
        ends.callback(parallel.shutdown)
        with main_errors(speak=rank == 0, of_files=False):
            engine = build_engine(config)
            replicas: RankZeroPart[ReplicaPool] = RankZeroPart(pool)
            worker = Worker(config, engine, replicas)
        ends.callback(worker.close)
        done = worker.restore()
        front = RankZeroPart(lambda: Front(config, given.port, worker, replicas, done, ends))
        serve(worker, front, done)
    return 0


def _begin_replicas(config: Config, rank: int, ends: ExitStack) -> Any:
    """What gives rank 0's replicas once they have started; they end with `ends`."""
    if rank:
        return lambda: None
    from megasync.run.replica_start import ReplicaStart

    start = ReplicaStart(config, detokenizes=True)
    ends.callback(start.close)
    start.begin()
    return start.finish


class Front:
    """Rank 0's desk, server and sampling."""

    def __init__(
        self, config: Config, port: int, worker: Worker, replicas: RankZeroPart[ReplicaPool], done: int, ends: ExitStack
    ) -> None:
        from megasync.run.rank_zero import of_rank_zero
        from megasync.service.calls import Reader
        from megasync.service.desk import Desk
        from megasync.service.http import Server
        from megasync.service.journal import Journal
        from megasync.service.sampling import Sampling

        self.config, self.worker = config, worker
        hf_config = worker.engine.mbridge.hf_config
        names = (config.service.base_model or Path(config.model.path).resolve().name, config.model.path)
        most = config.rollout.max_model_len or hf_config.max_position_embeddings
        reader = Reader(names, hf_config.vocab_size, most, config.service.frozen_unembed)
        journal = Journal(worker.folder / "log.jsonl")
        ends.callback(journal.close)
        self.desk = Desk(config.service, journal, reader, done)
        self.sampling = Sampling(of_rank_zero(replicas.here), _ends_of(worker.engine), self.finish)
        ends.callback(self.sampling.close)
        server = Server(config.service, self.desk, os.environ.get(KEY, ""), self.info, most)
        port = server.start(config.service.host, port)
        ends.callback(server.close)
        print(f"{names[0]} is served at http://{config.service.host}:{port}", flush=True)

    def finish(self, request: Request, result: Any) -> None:
        if problem := self.desk.finish(request, result):
            print(problem, file=sys.stderr, flush=True)

    def info(self, name: str) -> dict[str, Any] | None:
        """Of a model by its id, or of saved weights by their path."""
        base = self.desk.reader.base_models[0]
        if not name.startswith("tinker://"):
            spec = self.worker.driven.specs.get(name)
            data = {"model_name": base, "tokenizer_id": str(Path(self.config.model.path).resolve())}
            found = {"type": "get_info", "model_id": name, "model_data": data, "model_name": base, "is_lora": True}
            return None if spec is None else {**found, "lora_rank": spec.rank}
        spec = self.worker.saved_spec(name)
        if spec is None:
            return None
        trained = {"train_attn": spec.train_attn, "train_mlp": spec.train_mlp, "train_unembed": False}
        return {"base_model": base, "is_lora": True, "lora_rank": spec.rank, **trained}


def serve(worker: Worker, front: RankZeroPart[Front], done: int) -> None:
    """Every rank: one work after another. Collective."""
    every = worker.config.service.checkpoint_every
    while True:
        work: Work = front.call(lambda front: next_work(front, worker.present))
        if work.kind == "end":
            return
        if work.kind == "sync":
            sync(worker, front, work.version)
            continue
        (request,) = work.requests
        train(worker, front, request)
        if every and request.order >= done and (request.order + 1) % every == 0:
            worker.checkpoint(request.order + 1)


def next_work(front: Front, present: str | None) -> Work:
    """Samples need no other rank: they are sent off here."""
    while (work := front.desk.next_work(present)).kind == "sample":
        front.sampling.start(work.requests)
    return work


def train(worker: Worker, front: RankZeroPart[Front], request: Request) -> None:
    """One training request on all ranks. What is refused is the client's to know; anything else ends the service."""
    from engine.driven import Passed, RefusedError
    from megasync.service.desk import Result, as_json, error
    from megasync.service.wire import BadRequestError, forward_backward_output

    try:
        done = getattr(worker, request.call.kind)(**request.call.arguments)
        if isinstance(done, Passed):
            result = Result("protobuf", forward_backward_output(done.log_probs, {"loss:sum": done.loss}))
        else:
            result = as_json(done)
    except (RefusedError, BadRequestError) as refused:
        result = error(str(refused), "user")
    if front.here is not None:
        front.here.finish(request, result)


def sync(worker: Worker, front: RankZeroPart[Front], version: str) -> None:
    """Bring the replicas to a version; where there is none such, its samples fail."""
    from engine.driven import RefusedError
    from megasync.service.desk import error

    try:
        worker.sync(version)
    except RefusedError as refused:
        if front.here is not None:
            for request in front.here.desk.take_samples(version):
                front.here.finish(request, error(str(refused), "user"))


def _ends_of(engine: Engine) -> tuple[int, ...]:
    """Tokens that end a response of the model."""
    from megasync.data.tokenizer import generation_ends

    own = engine.mbridge.hf_config.eos_token_id
    ends = [own] if isinstance(own, int) else list(own or [])
    return tuple(dict.fromkeys([*ends, *generation_ends(Path(engine.mbridge.hf_config._name_or_path))]))


if __name__ == "__main__":
    run_and_leave(main)
