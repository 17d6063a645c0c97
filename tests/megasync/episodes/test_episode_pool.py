"""The processes of episodes, real ones: what an episode may do to them costs that episode alone.

python -m pytest tests/megasync/episodes/test_episode_pool.py
"""

from __future__ import annotations

import asyncio
import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import psutil
import pytest

from bridge.generation import GenerationRequest
from engine.algorithm import AlgorithmConfig
from engine.config import ModelConfig
from megasync.config.data_section import DataConfig
from megasync.config.schema import Config, RolloutConfig
from megasync.episodes.pool import EpisodePool
from megasync.episodes.record import Asked
from megasync.episodes.segments import Turn
from megasync.episodes.task import EpisodeLimitError, Task
from megasync.episodes.exchange import Ask, EpisodeEnd
from megasync.rollouts.attempt import Attempt, result_of
from megasync.rollouts.group import Group
from tests.support.chat_families import FAMILIES

EPISODES = "tests.support.episodes:episode"
TIMEOUT_SECONDS = 4.0


def pool_of(folder: str, credit: Literal["episode", "turn"] = "episode", **options: Any) -> EpisodePool:
    own = {"episode": EPISODES, "episode_timeout_seconds": TIMEOUT_SECONDS, "episode_processes": 1, **options}
    sections = {"algorithm": AlgorithmConfig(credit=credit), "data": DataConfig(), "rollout": RolloutConfig(**own)}
    return EpisodePool(Config(model=ModelConfig(path=folder), **sections))


class Replica:
    """Says as many tokens as it has been asked for, with what the process has no business with."""

    def __init__(self) -> None:
        self.asked: list[Ask] = []

    async def __call__(self, asked: Ask) -> Turn:
        self.asked.append(asked)
        await asyncio.sleep(0.01)
        if max(asked.prompt_ids) > 10**5:
            raise ValueError("no such token")
        if len(asked.prompt_ids) > 60:
            raise EpisodeLimitError("60 tokens")
        number = asked.max_new_tokens or 3
        return Turn([5] * number, [-0.5] * number, [4] * number, "stop")


COLUMNS: dict[str, list[str]] = {"marks": []}  # of all tasks: the same object, as in a group
Reported = dict[str, tuple[EpisodeEnd, list[tuple[Any, Turn]]]]


def play(pool: EpisodePool, prompts: list[str], replica: Replica | None = None) -> Reported:
    """How episodes side by side end."""
    replica = replica or Replica()

    async def all_of_them() -> Reported:
        tasks = [pool.run(Task(prompt, (7, 8, 9), "12", COLUMNS, seed=3), replica) for prompt in prompts]
        return dict(zip(prompts, await asyncio.gather(*tasks), strict=True))

    try:
        return asyncio.run(asyncio.wait_for(all_of_them(), 60))
    finally:
        pool.close()


def failure(reported: Reported, prompt: str) -> str:
    ended, _ = reported[prompt]
    assert ended.failure is not None
    return ended.failure.what


@pytest.fixture(scope="module")
def side_by_side(folder: str) -> Reported:
    """In one process, beside many good ones."""
    good = [f"good {0.2 + 0.01 * number}" for number in range(50)]
    bad = ["raises", "hangs", "floods", "leaves", "none", "greedy", "opens", "endless"]
    return play(pool_of(folder, episode_memory_bytes=4 << 30, episode_open_files=1000), [*good, *bad, "unusual"])


def test_an_episode_gets_tokens_and_gives_a_result(side_by_side: Reported) -> None:
    good = [reported for prompt, reported in side_by_side.items() if prompt.startswith("good")]
    assert len(good) == 50
    for ended, turns in good:
        assert (ended.failure, ended.reward, ended.metrics, ended.info["seed"]) == (None, 1.0, {"length": 8.0}, 3)
        assert ended.info["marks"] == ["good"], "that other episodes left in its line"
        assert [prompt.tolist() for prompt, _ in turns] == [[7, 8, 9], [7, 8, 9, 5, 5, 5, 17, 10]]
        assert [len(turn.token_ids) for _, turn in turns] == [3, 2]


@pytest.mark.parametrize("credit", ["episode", "turn"])
def test_rewards_of_turns_are_one_for_each_and_make_up_the_reward(folder: str, credit: Literal["episode", "turn"]) -> None:
    """Others are a failure, but where they are not needed and there is a reward beside them."""
    right = {"[null, [1.0, 0.5]]": 1.5, "[0.3, [0.1, 0.2]]": 0.3, "[2.0, null]": 2.0}
    wrong = dict.fromkeys(("[null, [1.0]]", "[1.0, [1.0]]"), "1 turn_rewards for 2 turns") | {"[2.0, [1.0, 0.5]]": "1.5 in all"}
    found = play(pool_of(folder, credit=credit), [f"rewards {option}" for option in (*right, *wrong)])
    for option, reward in right.items():
        ended, _ = found[f"rewards {option}"]
        rewards = json.loads(option)[1] or []
        assert (ended.reward, list(ended.turn_rewards), ended.info.get("turn_rewards", [])) == (reward, rewards, rewards)
    for option, words in wrong.items():
        ended, _ = found[f"rewards {option}"]
        if credit == "turn" or option.startswith("[null"):
            assert words in failure(found, f"rewards {option}")
        else:
            assert (ended.failure, ended.reward, ended.turn_rewards) == (None, json.loads(option)[0], ())


def test_time_in_tools_is_what_tools_took(folder: str) -> None:
    """Beside 60 others whose prompts are rendered and sampled, a tool of 0.3 s takes that, and a trivial one nothing."""
    prompts = [f"{kind} {number}" for number in range(20) for kind in ("trivial", "in a thread", "slow")]
    played = play(pool_of(folder, episode="tests.support.tool_episodes:episode"), prompts)
    found = dict[str, list[float]]()
    for prompt, (ended, _) in played.items():
        assert ended.failure is None and ended.tool_seconds is not None, ended
        least = 0.3 if prompt.startswith("slow") else 0.0
        assert least <= ended.tool_seconds <= ended.own_seconds + 1e-6, (prompt, ended)
        found.setdefault(prompt.partition(" ")[0], []).append(ended.tool_seconds - least)
    assert max(map(median, found.values())) < 0.15, found


def test_what_fails_is_reported_by_its_reason(side_by_side: Reported) -> None:
    assert failure(side_by_side, "raises") == "raised ZeroDivisionError: on purpose"
    assert "on purpose" in (side_by_side["raises"][0].failure or "")[1]
    assert failure(side_by_side, "hangs").startswith("took longer than rollout.episode_timeout_seconds = 4")
    assert failure(side_by_side, "greedy").startswith("raised MemoryError")
    assert failure(side_by_side, "opens").startswith("raised OSError: [Errno 24] Too many open files")
    assert side_by_side["none"][0].reward is None and side_by_side["none"][0].failure is None
    assert side_by_side["endless"][0].limit == "60 tokens", side_by_side["endless"][0]


def test_what_json_does_not_have_is_left_out_of_its_info(side_by_side: Reported) -> None:
    """samples.jsonl is JSON proper, in UTF-8."""
    ended, _ = side_by_side["unusual"]
    assert (ended.failure, ended.info) == (None, {"scores": [0.5, None, None], "file": "a?.txt"})
    assert json.loads(json.dumps(ended.info, ensure_ascii=False, allow_nan=False).encode()) == ended.info
    assert ended.metrics == {"7": 2.0, "calls": 1.0}


def test_output_and_children_of_an_episode_do_not_affect_others(side_by_side: Reported) -> None:
    assert side_by_side["floods"][0].failure is None
    pid = int(side_by_side["leaves"][0].metrics["pid"])
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("kind", "what"), [("dies", "SIGKILL"), ("holds", "took longer"), ("swallows", "took longer")])
def test_only_the_episode_that_ends_its_process_fails(folder: str, kind: str, what: str) -> None:
    """Episodes beside it start again in another one, and what they had sampled answers their turns: no token is sampled twice."""
    good, replica = [f"good {1.0 + number / 100}" for number in range(8)], Replica()
    pool = pool_of(folder, episode_timeout_seconds=2.5)
    reported = play(pool, [*good, kind], replica)
    assert what in failure(reported, kind)
    assert all(reported[prompt][0].failure is None for prompt in good)
    by_length = [len(asked.prompt_ids) for asked in replica.asked]
    assert by_length.count(3) == len(good) + 1 and by_length.count(8) == len(good)


def test_the_models_time_is_not_the_episodes(folder: str) -> None:
    """And the episode's own time is the sum of what lies between its turns."""

    class Slow(Replica):
        async def __call__(self, asked: Ask) -> Turn:
            await asyncio.sleep(2.5)
            return await super().__call__(asked)

    reported = play(pool_of(folder, episode_timeout_seconds=2.0), ["good 0.3", "rests 0.05", "rests 1.2"], Slow())
    assert reported["good 0.3"][0].failure is None and reported["rests 0.05"][0].failure is None
    assert failure(reported, "rests 1.2").startswith("took longer than rollout.episode_timeout_seconds = 2")


def test_an_environment_is_played_turn_by_turn(folder: str) -> None:
    replica = Replica()
    reported = play(pool_of(folder, episode="tests.support.episodes:Guess"), ["any"], replica)
    ended, turns = reported["any"]
    assert (ended.failure, ended.reward, ended.metrics) == (None, 0.0, {"left": 0.0}) and len(turns) == 3
    for (first, turn), (second, _) in pairwise(turns):
        assert np.array_equal(second[: len(first) + len(turn.token_ids)], [*first, *turn.token_ids])
    assert finish_reason(ended, turns) == "stop"


def test_an_environment_that_a_limit_ends_is_cut_off(folder: str) -> None:
    """With the rewards that it has given up to then."""
    ended, turns = play(pool_of(folder, episode="tests.support.episodes:Endless"), ["any"])["any"]
    assert (ended.failure, ended.limit, ended.reward) == (None, "", 0.25 * len(turns))
    assert finish_reason(ended, turns) == "length"


def finish_reason(ended: EpisodeEnd, turns: list[tuple[Any, Turn]]) -> str:
    attempt = Attempt(Group(0, GenerationRequest((7,))), 0, 0, asked={n: Asked(n, 0, 8, ()) for n in ended.kept})
    return result_of(attempt, ended, turns).finish_reason


def test_environments_that_hang_cost_their_episodes_alone(folder: str) -> None:
    """More than a process may have: it ends with its last one, and what waited is played in another. Until then others have
    threads, too, though at first as many hang as episodes are played at a time.
    """
    options = {"episode": "tests.support.episodes:Sleeps", "episode_timeout_seconds": 4.0, "episode_concurrency": 5}
    bad, good = [f"hangs {number}" for number in range(9)], [f"good {number}" for number in range(40)]
    reported = play(pool_of(folder, **options), [*bad, *good])
    assert all("took longer" in failure(reported, prompt) for prompt in bad)
    assert all((reported[prompt][0].failure, reported[prompt][0].reward) == (None, 1.0) for prompt in good)


def test_an_unchanged_program_is_an_episode(tmp_path: Path) -> None:
    """With the official client, in a process of its own; its turns are one sequence."""
    family = FAMILIES["qwen3"]
    family.tokenizer().save_pretrained(tmp_path)
    pool = pool_of(str(tmp_path), episode="tests.support.episodes:program", episode_timeout_seconds=60.0)
    ended, turns = play(pool, ["any"])["any"]
    assert (ended.failure, ended.reward, ended.info) == (None, 1.0, {"said": "stop 5"})
    (first, turn), (second, _) = turns
    assert np.array_equal(second[: len(first) + 3], [*first, *turn.token_ids]) and len(second) > len(first) + 3


def test_a_limit_ends_an_episode_however_it_asks(tmp_path: Path) -> None:
    """As tasks of its own, or as a program over HTTP; a task that it leaves behind ends after it."""
    FAMILIES["qwen3"].tokenizer().save_pretrained(tmp_path)
    pool = pool_of(str(tmp_path), episode="tests.support.episodes:on_and_on", episode_timeout_seconds=60.0)
    found = play(pool, ["tasks", "program", "left", "looks", "thread", "caught"])
    for prompt in ("tasks", "program"):
        ended, turns = found[prompt]
        assert (ended.failure, ended.limit, ended.reward) == (None, "60 tokens", None) and turns, ended
        assert finish_reason(ended, turns) == "length"
    assert [found[prompt][0].reward for prompt in ("left", "looks", "caught")] == [1.0, 1.0, 0.5]
    assert "is called in another event loop than the episode's" in failure(found, "thread")


def test_an_episode_that_nobody_waits_for_ends(folder: str) -> None:
    """Also one that its process gets together with the news that nobody does; the process continues."""
    pool = pool_of(folder)

    async def give_up() -> int:
        waiting = asyncio.ensure_future(pool.run(Task("good 1000", (7,), ""), Replica()))
        other = await pool.run(Task("good", (7,), ""), Replica())
        assert other[0].failure is None
        workers, blocks = list(pool.workers.states), asyncio.ensure_future(pool.run(Task("naps 0.5", (7,), ""), Replica()))
        await asyncio.sleep(0.2)
        early = asyncio.ensure_future(pool.run(Task("good 1000", (7,), ""), Replica()))
        await asyncio.sleep(0.05)
        early.cancel()
        waiting.cancel()
        assert (await blocks)[0].failure is None
        begin = time.monotonic()
        while any(state.jobs for state in pool.workers.states.values()) and time.monotonic() < begin + 10:
            await asyncio.sleep(0.05)
        assert list(pool.workers.states) == workers
        return sum(len(state.jobs) for state in pool.workers.states.values())

    try:
        assert asyncio.run(give_up()) == 0
    finally:
        pool.close()
