"""Whoever ends a process of many episodes fails alone, and what that costs. Real processes, but for the property of the sets.

python -m pytest tests/megasync/episodes/test_suspects.py
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.episodes.pool import EpisodePool
from megasync.episodes.record import History
from megasync.episodes.segments import Turn
from megasync.episodes.task import Task
from megasync.episodes.exchange import Ask, EpisodeEnd
from megasync.workers.suspects import divide, sort_out
from tests.megasync.episodes.test_episode_pool import Replica, pool_of

EPISODES = "tests.support.episodes"
LIMIT_SECONDS = 400.0


@settings(deadline=None)
@given(st.integers(1, 200), st.data())
def test_the_guilty_are_found_in_few_deaths(num: int, data: st.DataObject) -> None:
    """Whatever is thought to be likely."""
    guilty = data.draw(st.sets(st.integers(0, num - 1), min_size=1, max_size=5))
    sets, found, num_deaths = [list(range(num))], set[int](), 0
    while sets:
        tried = sets.pop()
        if not guilty & set(tried):
            continue
        num_deaths += 1
        if len(tried) == 1:
            found |= set(tried)
            continue
        parts = divide(tried, data.draw(st.sets(st.sampled_from(tried), max_size=6)))
        assert sorted(one for part in parts for one in part) == sorted(tried)
        assert all(0 < len(part) <= math.ceil(len(tried) / 2) for part in parts)
        sets += parts
    assert found == guilty
    assert num_deaths <= len(guilty) * (math.ceil(math.log2(num)) + 1)


@given(st.integers(0, 20), st.booleans(), st.booleans(), st.booleans(), st.data())
def test_each_job_of_a_dead_worker_is_tried_again(num: int, serial: bool, solved: bool, were: bool, data: st.DataObject) -> None:
    """An innocent one is in no set of suspects, and without a guilty one there is a suspect."""
    jobs = list(range(num))
    likely = data.draw(st.sets(st.sampled_from(jobs), max_size=2)) if jobs else set()
    suspects, innocent = sort_out(jobs, is_serial=serial, is_solved=solved, were_suspects=were, likely=likely)
    assert sorted([*innocent, *(one for each in suspects for one in each)]) == jobs
    assert all(suspects) and bool(suspects) == bool(jobs and (not solved or (were and not serial)))
    ran = [[one] for one in jobs if one in likely] or [jobs[:1]]
    assert not serial or suspects in ([], ran)


class Once(Replica):
    """Samples no turn again that it has sampled to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.done: set[tuple[int, int]] = set()

    async def __call__(self, asked: Ask) -> Turn:
        assert (asked.number, asked.turn) not in self.done
        turn = await super().__call__(asked)
        self.done.add((asked.number, asked.turn))
        return turn


def watched(pool: EpisodePool) -> list[str]:
    """How its processes end, as they do while something is in them."""
    ends, on_end = list[str](), pool.workers.on_end

    def note(worker: Any, how: str, stack: str) -> None:
        if pool.workers.states[worker].jobs:
            ends.append(how)
        on_end(worker, how, stack)

    pool.workers.on_end = note  # type: ignore[method-assign]
    return ends


Steps = list[dict[str, EpisodeEnd]]


def play(pool: EpisodePool, *steps: list[str], history: dict[str, History] | None = None) -> Steps:
    """How the episodes of each step end, the steps one after another."""
    replica = Once()

    async def all_steps() -> Steps:
        found = []
        for prompts in steps:
            tasks = [pool.run(Task(prompt, (7, 8, 9), "12", seed=3), replica, (history or {}).get(prompt)) for prompt in prompts]
            found.append({prompt: ended for prompt, (ended, _) in zip(prompts, await asyncio.gather(*tasks), strict=True)})
        return found

    try:
        return asyncio.run(asyncio.wait_for(all_steps(), LIMIT_SECONDS))
    finally:
        pool.close()


def among(num: int, *kinds: str) -> list[str]:
    """Prompts of so many episodes, those of these kinds spread over them."""
    prompts = [f"good:{number}" for number in range(num - len(kinds))]
    for place, kind in enumerate(kinds):
        prompts.insert((2 * place + 1) * num // (2 * len(kinds)), f"{kind}:{place}")
    return prompts


def failures(seen: dict[str, EpisodeEnd]) -> dict[str, str]:
    return {prompt.partition(":")[0]: ended.failure.what for prompt, ended in seen.items() if ended.failure is not None}


@pytest.mark.parametrize(("name", "kinds"), [
    ("with_a_tool", ["is killed"]),
    pytest.param("WithADeed", ["crashes", "is killed", "leaves"], marks=pytest.mark.long),
])  # fmt: skip
def test_only_the_guilty_of_many_in_a_process_fail(folder: str, name: str, kinds: list[str]) -> None:
    """A plain tool, and steps of an environment, both in threads; nothing is sampled twice."""
    pool = pool_of(folder, episode=f"{EPISODES}:{name}", episode_timeout_seconds=60.0)
    ends = watched(pool)
    (seen,) = play(pool, among(128, *kinds))
    assert sorted(failures(seen)) == sorted(kinds)
    assert all(what.startswith(("had its process killed by SIG", "ended its process with")) for what in failures(seen).values())
    assert {ended.reward for ended in seen.values() if ended.failure is None} == {1.0 if name == "with_a_tool" else 1.5}
    assert len(kinds) < len(ends) <= len(kinds) * 8


@pytest.mark.long
def test_processes_that_die_are_replaced_by_forks_of_one_that_has_imported_everything(folder: str) -> None:
    """Many are guilty, and each death costs milliseconds. A fork has its own random numbers and its own user's modules."""
    pool = pool_of(folder, episode=f"{EPISODES}:WithADeed", episode_timeout_seconds=60.0)
    ends, guilty = watched(pool), ["is killed"] * 8
    (seen,) = play(pool, among(128, *guilty))
    assert sorted(name for name, ended in seen.items() if ended.failure) == [f"is killed:{place}" for place in range(8)]
    assert len(ends) > 16 and len(pool.workers.hosts.servers) == 1
    pool = pool_of(folder, episode=f"{EPISODES}:draws", episode_concurrency=1)
    steps = play(pool, *([f"good:{step}", f"is killed:{step}"] for step in range(3)))
    good = [ended for step in steps for ended in step.values() if ended.failure is None]
    assert len({ended.reward for ended in good}) == len({ended.metrics["numpy"] for ended in good}) == 3
    assert {ended.metrics["num"] for ended in good} == {1.0} and len(pool.workers.hosts.servers) == 1


def test_they_are_found_at_every_step_and_soon_where_a_step_of_theirs_was_noted(folder: str) -> None:
    pool = pool_of(folder, episode_timeout_seconds=60.0)
    ends = watched(pool)
    seen = play(pool, ["dies", *among(20)], ["exits", *among(20)])
    assert [list(failures(each)) for each in seen] == [["dies"], ["exits"]]
    assert len(ends) == 4


def test_only_the_episode_that_holds_the_interpreters_lock_is_late(folder: str) -> None:
    """Nothing else in its process runs meanwhile."""
    pool = pool_of(folder, episode=f"{EPISODES}:with_a_tool", episode_timeout_seconds=3.0)
    (seen,) = play(pool, among(6, "holds the lock"))
    assert list(failures(seen)) == ["holds the lock"]
    assert failures(seen)["holds the lock"].startswith("took longer than rollout.episode_timeout_seconds = 3")


def test_the_time_of_a_blocking_step_does_not_count_for_others(folder: str) -> None:
    """Whose limit they would pass by it, though it ends before."""
    pool = pool_of(folder, episode_timeout_seconds=4.0)
    (seen,) = play(pool, ["naps 3", *(f"good {2 + number / 10}" for number in range(5))])
    assert failures(seen) == {}


def test_an_episode_that_ended_a_process_is_tried_again_alone(folder: str) -> None:
    pool = pool_of(folder, episode=f"{EPISODES}:with_a_tool")
    ends, history = watched(pool), {"is killed:0": History(is_deadly=True)}
    (seen,) = play(pool, among(8, "is killed"), history=history)
    assert (list(failures(seen)), len(ends)) == (["is killed"], 1)


def test_memory_that_many_use_up_together_fails_none(folder: str) -> None:
    """Memory of all of them is too much, that of some is not."""
    pool = pool_of(folder, episode=f"{EPISODES}:crowd", episode_timeout_seconds=60.0)
    (seen,) = play(pool, among(12))
    assert failures(seen) == {}


def test_only_the_episode_that_uses_up_the_memory_fails(folder: str) -> None:
    """Those beside it want some, too, and would raise MemoryError in its place."""
    options = {"episode": f"{EPISODES}:with_a_tool", "episode_memory_bytes": 4 << 30, "episode_timeout_seconds": 60.0}
    (seen,) = play(pool_of(folder, **options), among(12, "wants too much", "takes all", *["wants some"] * 6))
    assert failures(seen)["wants too much"].startswith("raised MemoryError") and len(failures(seen)) == 1
