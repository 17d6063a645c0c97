"""Episodes that go on from a checkpoint, in real processes: by their state, by the same actions, or from the start.

python -m pytest tests/megasync/episodes/test_going_on.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from engine.config import ModelConfig
from megasync.config.data_section import DataConfig
from megasync.config.schema import Config, RolloutConfig
from megasync.episodes.pool import EpisodePool
from megasync.episodes.record import MAX_ANSWER_CHARACTERS, Answers, EnvironmentAnswer, History, as_json
from megasync.episodes.segments import Turn
from megasync.episodes.task import Task
from megasync.episodes.exchange import Ask, EpisodeEnd
from tests.support.episodes import Walk

NUM_ENDED = 2  # of three turns, when the checkpoint is written


@pytest.fixture(autouse=True)
def _answers_as_ever() -> Iterator[None]:
    yield
    Walk.switch.unlink(missing_ok=True)


def play(folder: str, name: str, history: History, num_ended: int = 9) -> tuple[EpisodeEnd | None, list[Ask]]:
    """On from `history`; None where the replica leaves a turn of that number open, and the run ends meanwhile."""
    own = {"episode": f"tests.support.episodes:{name}", "episode_processes": 1}
    pool = EpisodePool(Config(model=ModelConfig(path=folder), data=DataConfig(), rollout=RolloutConfig(**own)))
    asked, is_open = list[Ask](), asyncio.Event()

    async def ask(one: Ask) -> Turn:
        asked.append(one)
        if one.turn >= num_ended:
            is_open.set()
            await asyncio.sleep(1000)
        return Turn([5, 6], [-0.5] * 2, [4] * 2, "stop")

    async def run() -> EpisodeEnd | None:
        running = asyncio.create_task(pool.run(Task("1+1=", (7, 8, 9), ""), ask, history))
        opened = asyncio.create_task(is_open.wait())
        await asyncio.wait([running, opened], timeout=100, return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        if running.done():
            return running.result()[0]
        running.cancel()
        return None

    try:
        return asyncio.run(run()), asked
    finally:
        pool.close()


@cache
def played_half(folder: str, name: str) -> History:
    history = History()
    assert play(folder, name, history, NUM_ENDED)[0] is None
    assert list(history.turns) == [0, 1]
    return history


def half(folder: str, name: str) -> History:
    history = played_half(folder, name)
    return History(dict(history.turns), dict(history.answers), history.state)


def test_an_environment_with_a_state_goes_on_where_it_was(folder: str) -> None:
    history = half(folder, "StatefulWalk")
    assert history.state == {"place": 2} and [one.what for one in history.answers_in_order] == ["reset", "step", "step"]
    ended, asked = play(folder, "StatefulWalk", history)
    assert ended is not None and ended.failure is None, ended
    assert (ended.reward, ended.metrics["calls"], [one.turn for one in asked]) == (3.0, 1.0, [2])
    assert (history.resumed, history.is_restart, len(history.answers)) == ({0, 1}, False, 4)


def test_one_without_takes_the_same_actions_again(folder: str) -> None:
    history = half(folder, "Walk")
    ended, asked = play(folder, "Walk", history)
    assert ended is not None and (ended.reward, ended.metrics["calls"], [one.turn for one in asked]) == (3.0, 4.0, [2])
    assert (history.resumed, history.is_restart) == ({0, 1}, False)


def test_one_that_answers_differently_starts_again(folder: str) -> None:
    history = half(folder, "Walk")
    Walk.switch.touch()
    ended, asked = play(folder, "Walk", history)
    assert ended is not None and ended.failure is None and [one.turn for one in asked] == [0, 1, 2]
    assert (ended.reward, ended.kept, history.resumed, history.is_restart) == (3.0, (0, 1, 2), set(), True)
    assert ended.metrics["actions"] == 3, "its line is as it was at first"
    assert len(history.answers) == 4 and [one.value[0] for one in history.answers_in_order[1:]] == ["0"] * 3


def test_a_tools_answer_comes_again_where_it_is_kept(folder: str) -> None:
    history = half(folder, "chance")
    former = [one.value for one in history.answers_in_order]
    ended, asked = play(folder, "chance", history)
    assert ended is not None and ended.info["reported"][:NUM_ENDED] == former and [one.turn for one in asked] == [2]
    assert (history.resumed, history.is_restart) == ({0, 1}, False)


def test_a_tool_that_is_called_again_may_say_something_else(folder: str) -> None:
    """Turns before it answer again, those after it are sampled again."""
    history = half(folder, "chance")
    history.answers.clear()
    ended, asked = play(folder, "chance", history)
    assert ended is not None and ended.failure is None and [one.turn for one in asked] == [1, 2]
    assert (history.resumed, history.is_restart) == ({0}, True)


def test_a_tool_whose_arguments_json_does_not_have_is_called_again() -> None:
    """Objects that look the same, and long texts that begin alike, may be others."""
    long = "x" * MAX_ANSWER_CHARACTERS
    for asked, now in (({1, 2}, {1, 2}), (f"{long}a", f"{long}b")):
        kept = dict[int, EnvironmentAnswer]()
        first = Answers(send=lambda place, answer, state, is_other, kept=kept: kept.update({place: answer}))  # type: ignore[misc]
        for what, given in (("call look", "text"), ("call look", asked)):
            first.keep(first.next(what, given)[0], what, given, 7)
        again = Answers(kept)
        assert again.next("call look", "text")[1] == kept[0] and again.next("call look", now)[1] is None


def test_an_answer_whose_keys_json_would_change_is_not_given_again() -> None:
    kept = dict[int, EnvironmentAnswer]()
    first = Answers(send=lambda place, answer, state, is_other: kept.update({place: answer}))
    for value in ({"1": (2, 3)}, [{1: 2}]):
        first.keep(first.next("call look", "text")[0], "call look", "text", value)
    again = Answers(kept)
    assert [again.next("call look", "text")[1] for _ in kept] == [kept[0], None] and kept[0].value == {"1": [2, 3]}


def test_a_state_may_have_other_keys() -> None:
    """They are texts after a resume."""
    deep: Any = []
    for _ in range(800):
        deep = [deep]
    assert as_json({0: "x"}, keeps_keys=False) == ({"0": "x"}, True)
    assert as_json(deep) == (deep, True)


def test_a_state_that_json_has_not_is_a_failure(folder: str) -> None:
    ended, _ = play(folder, "BadState", History())
    assert ended is not None and ended.failure is not None
    assert ended.failure.what.startswith("raised TypeError: state() gave {0}, a value that JSON has is expected")


def test_an_episode_function_gets_the_same_ids_of_calls() -> None:
    """Templates write them into prompts."""
    from tests.support.samplers import Lines, model_of

    async def calls(*lines: str) -> list[Any]:
        model, messages, found = model_of(Lines(*lines)), [{"role": "user", "content": "2 * 3?"}], []
        for _ in lines:
            reply = await model.chat(messages, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
            found += [call.id for call in reply.tool_calls]
            messages += [reply, {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "6"}]
        return found

    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    once, again = (asyncio.run(calls(f"{call}\n{call}", call)) for _ in range(2))
    assert once == again and len(set(once)) == 3 and all(len(each) == 9 for each in once)
