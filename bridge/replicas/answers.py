"""Waiting for what actors of replicas answer: with a limit, or for as long as they give signs of life; who is named when it ends.

Leaves out what they are asked (pool.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from bridge.messages import name_replicas

PING_SECONDS = 1.0


def no_answer(replicas: Sequence[int], what: str, seconds: float) -> str:
    """Who is waited for, with what."""
    return f"{name_replicas(replicas)} gave no answer for {seconds:g} s to {what}"


def gather(refs: list[Any], timeout: float | None = None, replicas: Sequence[int] = (), what: str = "a call") -> list[Any]:
    """Wait for all, then ray.get with the actor's own error, without Ray's wrapping.

    `replicas`, as many as `refs`, and `what` they were asked for are named in errors.

    Raises:
        RuntimeError: an actor raised, died, or did not answer in time, or Ray has lost its answer.
    """
    finished, waiting = ray.wait(refs, num_returns=len(refs), timeout=timeout) if refs else ([], [])
    try:
        values = dict(zip(finished, ray.get(finished), strict=True))
    except RayTaskError as error:
        raise RuntimeError(str(error.cause)) from None
    except RayActorError as error:
        raise RuntimeError(f"a replica's actor died: {error}") from None
    except RayError as error:  # of a node that is lost with the answer, of memory, of an actor's environment ...
        raise RuntimeError(f"Ray has no answer of a replica: {type(error).__name__}: {error}") from None
    if waiting:
        late = [replica for replica, ref in zip(replicas, refs, strict=False) if ref in waiting]
        raise RuntimeError(no_answer(late, what, timeout or 0.0))
    return [values[ref] for ref in refs]


def wait_while_alive(calls: Mapping[int, Any], ask: Callable[[int], Any], limit_seconds: float, what: str) -> None:
    """Until all `calls`, references by replica, are done, however long that takes, for as long as vLLM gives signs of life.

    `ask`: a reference to how long the replica's vLLM has owed an answer.

    Raises:
        RuntimeError: one gave none for so long, or failed.
    """
    pings: dict[int, tuple[Any, float]] = {}  # those on their way, each with when it was sent
    waiting = list(calls.values())
    while waiting:
        finished, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=PING_SECONDS)
        gather(finished)
        late = [replica for replica, ref in calls.items() if ref in waiting]
        silent = [replica for replica in late if replica in pings and _is_silent(*pings[replica], limit_seconds)]
        if silent:
            raise RuntimeError(no_answer(silent, what, limit_seconds))
        for replica in late:
            if replica not in pings or ray.wait([pings[replica][0]], timeout=0)[0]:
                pings[replica] = ask(replica), time.monotonic()


def _is_silent(ping: Any, sent_seconds: float, limit_seconds: float) -> bool:
    """For too long: the actor, or its vLLM, which it tells."""
    if ray.wait([ping], timeout=0)[0]:
        return bool(gather([ping])[0] > limit_seconds)
    return time.monotonic() - sent_seconds > limit_seconds
