"""A served pool's wait for an answer: its replica is lost only while neither the answer nor a sign of life is there.

python -m pytest tests/megasync/served/test_pool.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megasync.served import pool as pools
from megasync.served.pool import ServedPool

LIMIT = 0.3


class Reference:
    """Like a reference of Ray's to one result."""

    def __init__(self) -> None:
        self.own: Future[Any] = Future()
        self.on_asked: Callable[[], None] = lambda: None

    def future(self) -> Future[Any]:
        self.on_asked()
        return self.own


def ask(monkeypatch: pytest.MonkeyPatch, answer: Reference, silences: list[Reference]) -> Any:
    monkeypatch.setattr(pools, "SIGN_SECONDS", 0.01)
    signs = iter(silences)
    config = SimpleNamespace(answer_timeout_seconds=LIMIT, model_path="judge")
    pool = SimpleNamespace(config=config, ask_silence=lambda _: next(signs))
    served = ServedPool(cast(Any, pool), "judges.one", lambda _: None)
    return asyncio.run(asyncio.wait_for(served._answer(0, answer), 60))


def test_an_answer_that_comes_while_the_sign_is_awaited_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, sign = Reference(), Reference()
    sign.on_asked = lambda: answer.own.set_result("text")
    assert ask(monkeypatch, answer, [sign]) == "text"


def test_a_replica_with_signs_of_life_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, signs = Reference(), [Reference() for _ in range(4)]
    for sign in signs[:3]:
        sign.own.set_result(0.0)
    with pytest.raises(TimeoutError, match="gave no answer for"):
        ask(monkeypatch, answer, signs)
    late = Reference()
    late.own.set_result(2 * LIMIT)
    with pytest.raises(TimeoutError):
        ask(monkeypatch, Reference(), [late])


def test_a_dead_actor_loses_what_it_has_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = Reference()
    dead.own.set_exception(RuntimeError("the actor died"))
    with pytest.raises(RuntimeError, match="died"):
        ask(monkeypatch, Reference(), [dead])
