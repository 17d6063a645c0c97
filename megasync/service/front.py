"""Front: parts of the service on rank 0 alone: desk, server, sampling, and answers to queries.

Leaves out the loop over work (command.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bridge.replicas.pool import ReplicaPool
from megasync.config.schema import Config
from megasync.data.tokenizer import load_tokenizer, named_ends
from megasync.models.folder import model_shape
from megasync.report.log import RunLog
from megasync.run.rank_zero import RankZero, of_rank_zero
from megasync.service.calls import Reader
from megasync.service.catalog import Catalog
from megasync.service.desk import Desk
from megasync.service.http import Server
from megasync.service.journal import LOG_FILE, Journal
from megasync.service.requests import Request, Result
from megasync.service.sampling import Sampling
from megasync.service.usage import Usage
from megasync.service.work_queue import WAIT_SECONDS
from megasync.service.worker import Worker


class Front:
    """Ends with `ends`."""

    def __init__(
        self,
        config: Config,
        worker: Worker,
        replicas: RankZero[ReplicaPool],
        done: int,
        ends: ExitStack,
        port: int,
        key: str,
    ) -> None:
        """`done`: how many training requests the worker's state holds; `key`: the key that clients must send."""
        self.config, self.pool = config, of_rank_zero(replicas.here)
        hf_config = worker.engine.mbridge.hf_config
        names = (config.service.base_model or Path(config.model.path).resolve().name, config.model.path)
        positions = model_shape(config.model.path).max_position_embeddings or hf_config.max_position_embeddings
        most = config.rollout.max_model_len or positions
        reader = Reader(names, hf_config.vocab_size, most, config.service.frozen_unembed, config.service.full_parameters)
        journal = Journal(worker.folder / LOG_FILE)
        ends.callback(journal.close)
        wait_seconds = WAIT_SECONDS if worker.driven.shares else 0.0
        self.desk = Desk(config.service, journal, reader, done, self.pool.config.adapter_slots, wait_seconds)
        ends_of_model = _ends_of(Path(config.model.path), hf_config.vocab_size)
        self.sampling = Sampling(self.pool, ends_of_model, self.desk, self.finish)
        ends.callback(self.sampling.close)
        catalog = Catalog(worker.folder / "models", names[0], config.model.path, worker.adapters.specs)
        log = RunLog(_quiet(config), first_step=done, write=True)
        ends.callback(log.close)
        self.usage = Usage(self.desk, lambda: worker.present, log.step)
        server = Server(config.service, self.desk, catalog, self.usage, key, most)
        port = server.start(config.service.host, port)
        ends.callback(server.close)
        print(f"{names[0]} is served at http://{config.service.host}:{port}", flush=True)

    def finish(self, request: Request, result: Result) -> None:
        self.finish_all([(request, result)])

    def finish_all(self, done: Sequence[tuple[Request, Result]]) -> None:
        for request, result in done:
            self.usage.count(request, result)
        for problem in self.desk.finish_all(done):
            print(problem, file=sys.stderr, flush=True)

    def renew_replicas(self) -> bool:
        """Restart replicas that were lost; whether any came or went since the last call. TooFewReplicasError."""
        self.pool.replace(*self.sampling.take_lost())
        rollout = self.config.rollout
        try:
            return self.pool.rejoin(rollout.min_replicas, rollout.restart_timeout_seconds)
        finally:
            for note in self.pool.drain_notes():
                print(note, file=sys.stderr, flush=True)


def _quiet(config: Config) -> Config:
    """Without a display of progress on the terminal: the number of steps is unknown."""
    return config.model_copy(update={"run": config.run.model_copy(update={"progress": "none"})})


def _ends_of(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Tokens that end a response of the model in the folder where a request names none."""
    ends = [load_tokenizer(folder)[0].eos_token_id, *(each for each, _ in named_ends(folder))]
    return tuple(dict.fromkeys(each for each in ends if each is not None and 0 <= each < vocab_size))
