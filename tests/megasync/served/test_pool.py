"""A served pool's wait for an answer: its replica is lost only while neither the answer nor a sign of life is there.

python -m pytest tests/megasync/served/test_pool.py
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from bridge.generation import Sampling
from megasync.config.judge_section import JudgeConfig
from megasync.rewards.judges.reply import UnparsedError, read_score
from megasync.served import pool as pools
from megasync.served.pool import ServedPool
from tests.support.chat_families import FAMILIES

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


@pytest.mark.parametrize("opens", [False, True])
def test_thinking_that_is_cut_off_has_no_score(tmp_path: Path, opens: bool) -> None:
    """Also where the template has opened it, so that no tag is among the sampled tokens."""
    tokenizer = copy.deepcopy(FAMILIES["qwen3"].tokenizer())
    tag = "<think>\n"
    if opens:
        written = str(tokenizer.chat_template)
        tokenizer.chat_template = written.replace("assistant\\n' }}\n{%- if enable", f"assistant\\n{tag}' }}}}\n{{%- if enable")
        assert tokenizer.chat_template != written
        tag = ""
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": len(tokenizer)}))
    answers = [f"{tag}Perhaps Score: 3, or", f"{tag}Score: 3?\n</think>\n\nScore: 8"]

    def ask(*_: object) -> Reference:
        answer, ids = Reference(), tokenizer.encode(answers.pop(0), add_special_tokens=False)
        answer.own.set_result([[SimpleNamespace(token_ids=np.array(ids))]])
        return answer

    config = SimpleNamespace(answer_timeout_seconds=LIMIT, model_path=str(tmp_path))
    pool = SimpleNamespace(config=config, ask=ask, hosts=lambda: {0: ""}, wanted=[0])
    served = ServedPool(cast(Any, pool), "judges.one", print)
    cut, whole = (asyncio.run(served.chat([{"role": "user", "content": "?"}], Sampling())) for _ in range(2))
    assert read_score(whole, JudgeConfig()) == 8
    with pytest.raises(UnparsedError, match="its thinking does not end"):
        read_score(cut, JudgeConfig())
