"""Sampling requests through the replicas, on rank 0: sent by the main thread, awaited by threads beside it.

Leaves out which weights the replicas have (worker.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from bridge.generation import Completion, GenerationRequest
from bridge.replicas.pool import Generation, ReplicaPool
from megasync.service.desk import Request, Result, error
from megasync.service.wire import SamplingParams, sample_response

SCORE_SECONDS = 600.0
THREADS = 64


class Sampling:
    """`finish` is called with each request's result, in any thread."""

    def __init__(self, pool: ReplicaPool, end_tokens: tuple[int, ...], finish: Callable[[Request, Result], None]) -> None:
        """`end_tokens`: those of the model, which end a response unless a request says what does."""
        self._pool, self._end_tokens, self._finish = pool, end_tokens, finish
        self._threads = ThreadPoolExecutor(THREADS, "sampling")

    def start(self, requests: Sequence[Request]) -> None:
        """Does not wait for responses, but for log-probs of prompts."""
        wanted = [self._generation(request) for request in requests]
        scored = [index for index, request in enumerate(requests) if request.call.arguments["has_prompt_log_probs"]]
        scores: dict[int, npt.NDArray[np.float32]] = {}
        if scored:
            prompts = [requests[index].call.arguments["prompt"] for index in scored]
            found = self._pool.score(self._pool.members[0], prompts, SCORE_SECONDS)
            scores = dict(zip(scored, found, strict=True))
        for index, (request, each) in enumerate(zip(requests, wanted, strict=True)):
            self._threads.submit(self._await, request, self._pool.generate([each]), scores.get(index))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _await(self, request: Request, generation: Generation, scores: npt.NDArray[np.float32] | None) -> None:
        try:
            (completions,) = generation.result()
            sequences = [_sequence(each) for each in completions]
            result = Result("protobuf", sample_response(sequences, scores))
        except Exception as failure:  # noqa: BLE001 # the client gets the error
            is_user = isinstance(failure, ValueError) or "ValueError" in type(failure).__name__
            result = error(str(failure), "user" if is_user else "server")
        self._finish(request, result)

    def _generation(self, request: Request) -> GenerationRequest:
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
        )

    def _stops(self, params: SamplingParams) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Texts and tokens. The model's own end where a request names none; an empty list is none at all."""
        if params.stop is None:
            return (), self._end_tokens
        given = [params.stop] if isinstance(params.stop, str) else params.stop
        texts = tuple(each for each in given if isinstance(each, str))
        return texts, tuple(each for each in given if isinstance(each, int))


def _sequence(completion: Completion) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], str]:
    return completion.token_ids, completion.log_probs, "length" if completion.finish_reason == "length" else "stop"
