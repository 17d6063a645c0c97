"""Sampling requests through the replicas, on rank 0: sent by the main thread, awaited by threads beside it.

A request goes to one replica, in turns. Where that dies, or its vLLM gives no sign of life, the desk gets the request back, and
the next sync has another replica.
Leaves out which weights the replicas have (worker.py).
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from bridge.generation import GenerationRequest
from bridge.replicas.launched import ReplicaDiedError, wait_while_alive
from bridge.replicas.pool import ReplicaPool
from megasync.service.bodies import SamplingParams
from megasync.service.desk import Desk
from megasync.service.requests import Request, Result, error
from megasync.service.wire import sample_response

THREADS = 64
PROBE_SECONDS = 10.0
MAX_FAILURES = 3  # of a request, through as many replicas


class Sampling:
    """`finish` is called with each request's result, in any thread. `lost`: replicas that failed since they were replaced."""

    def __init__(
        self, pool: ReplicaPool, end_tokens: tuple[int, ...], desk: Desk, finish: Callable[[Request, Result], None]
    ) -> None:
        """`end_tokens`: those of the model, which end a response unless a request says what does."""
        self._pool, self._end_tokens, self._desk, self._finish = pool, end_tokens, desk, finish
        self._threads = ThreadPoolExecutor(THREADS, "sampling")
        self._turns = itertools.count()
        self.lost: set[int] = set()
        self._lock = threading.Lock()  # for `lost` and `num_syncs`
        self.num_syncs = 0  # a request that runs through one was on a replica that died

    def start(self, requests: Sequence[Request], slots: Mapping[str, int]) -> None:
        """Does not wait. `slots`: of the versions that the replicas have."""
        for request in requests:
            members = self._pool.members
            replica = members[next(self._turns) % len(members)]
            if replica in self.lost:  # by a request before this one
                self._desk.queue.give_back(request)
                continue
            arguments = request.call.arguments
            is_scored = arguments["has_prompt_log_probs"] or arguments["num_top"]
            slot = slots[request.call.version]
            try:
                refs = [self._pool.ask(replica, "generate", [self._generation(request, slot)])]
                if is_scored:
                    refs.append(self._pool.ask(replica, "score", [tuple(arguments["prompt"])], arguments["num_top"], slot))
            except RuntimeError:  # it is known to be dead
                self._retry(request, replica, self.num_syncs)
            else:
                self._threads.submit(self._await, request, replica, self.num_syncs, refs).add_done_callback(self._check)

    def take_lost(self) -> set[int]:
        """Replicas that failed since the last call; they are replaced now."""
        with self._lock:
            lost, self.lost = self.lost, set()
            self.num_syncs += 1
            return lost

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check(self, done: Future[None]) -> None:
        """An error of ours, such as a full disk under the log, ends the service: the request would wait without end."""
        if not done.cancelled() and (failure := done.exception()) is not None:
            self._desk.queue.fail(failure)

    def _await(self, request: Request, replica: int, num_syncs: int, refs: Sequence[object]) -> None:
        try:
            for ref in refs:
                wait_while_alive({replica: ref}, self._pool.ask_silence, self._pool.config.answer_timeout_seconds, "sampling")
            generated, *scored = self._pool.gather(list(refs))
        except Exception as failure:  # noqa: BLE001 # whatever Ray or vLLM raise
            if num_syncs == self.num_syncs and not isinstance(failure, ReplicaDiedError) and self._is_serving(replica):
                self._finish(request, error(str(failure), "user"))
            else:
                self._retry(request, replica, num_syncs)
            return
        arguments = request.call.arguments
        sequences, scores = generated[0], scored[0][0] if scored else None
        if not all(np.isfinite(each.log_probs).all() for each in sequences):
            self._finish(request, error("log-probs are not finite: the weights are broken, such as by a learning rate", "user"))
            return
        self._finish(request, Result("protobuf", sample_response(sequences, scores, arguments["last"], arguments["num_top"])))

    def _is_serving(self, replica: int) -> bool:
        try:
            self._pool.gather([self._pool.collect(replica, 0.0)], PROBE_SECONDS, [replica], "a probe")
        except RuntimeError:
            return False
        return True

    def _retry(self, request: Request, replica: int, num_syncs: int) -> None:
        with self._lock:
            if num_syncs == self.num_syncs:
                self.lost.add(replica)
        request.num_failures += 1
        if request.num_failures >= MAX_FAILURES:
            self._finish(request, error(f"{MAX_FAILURES} replicas failed at it", "server"))
        else:
            self._desk.queue.give_back(request)

    def _generation(self, request: Request, slot: int) -> GenerationRequest:
        arguments, params = request.call.arguments, request.call.arguments["params"]
        texts, tokens = self._stops(params)
        seed = params.seed if params.seed is not None else int(hashlib.sha256(request.name.encode()).hexdigest()[:15], 16)
        return GenerationRequest(
            prompt_ids=tuple(arguments["prompt"]),
            num_samples=arguments["num_samples"],
            max_new_tokens=params.max_tokens or arguments["most"],
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(0, params.top_k),
            seed=seed,
            stop=texts,
            stop_token_ids=tokens,
            slot=slot,
            num_top=arguments["num_top_sampled"],
        )

    def _stops(self, params: SamplingParams) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Texts and tokens. The model's own end where a request names none; an empty list is none at all."""
        if params.stop is None:
            return (), self._end_tokens
        given = [params.stop] if isinstance(params.stop, str) else params.stop
        texts = tuple(each for each in given if isinstance(each, str))
        return texts, tuple(each for each in given if isinstance(each, int))
