"""Rewards in processes: results, time limits, deaths, and that nothing is left. Real processes throughout."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from megasync.config.errors import ConfigError
from megasync.config.schema import RolloutConfig
from megasync.data import reasoning_gym as tasks
from megasync.rewards.failures import RewardError, shown
from megasync.rewards.functions import RewardInput
from megasync.rewards.pool import RewardPool, Scored, reward_metrics
from tests.support.config_files import ROOT
from tests.support.rewards import CASES, children, given, until

HARD = r"$\binom{100000000}{50000000}$"  # cannot be worked out in any time


def score(reward: str | dict[str, float], *groups: list[RewardInput], **keys: Any) -> list[list[Scored]]:
    """All groups at once, through a pool of its own, of which nothing is left."""

    async def main() -> list[list[Scored]]:
        with RewardPool(RolloutConfig(reward=reward, **keys)) as pool:
            return await asyncio.gather(*map(pool.score_group, groups))

    scored = asyncio.run(main())
    assert children() == []
    return scored


def totals(*arguments: Any, **keys: Any) -> list[float]:
    return [one.total for group in score(*arguments, **keys) for one in group]


def failure(reward: str, *samples: RewardInput, **keys: Any) -> str:
    with pytest.raises(RewardError) as caught:
        score(reward, list(samples), **keys)
    assert children() == []
    return str(caught.value)


# -------------------------------------------------------------------------------------------------------- results


def test_rewards_by_name_and_of_your_own() -> None:
    assert totals("exact_match", given("46", "47"), given("46 ")) == [1, 0, 1]
    assert totals(f"{CASES}:length", given("abc", "a")) == [3, 1]
    assert totals(f"{CASES}:level", given("x", "y", level=5)) == [5.01, 5.02]
    assert totals(f"{CASES}:with_a_loop_of_its_own", given("abc")) == [3]
    assert totals(f"{CASES}:gpus", given("x")) == [0]


def test_a_function_of_a_list_gets_the_samples_of_one_prompt() -> None:
    assert totals(f"{CASES}:rank", given("ccc", "a", "bb"), given("x", "")) == [2, 0, 1, 1, 0]
    assert totals(f"{CASES}:judges", given("ccc", "a", "bb")) == [3, 1, 2]
    assert [RewardPool(RolloutConfig(reward=f"{CASES}:{name}")).takes_groups for name in ("rank", "length")] == [True, False]
    assert "returned 2 values, a list of 3 numbers is expected" in failure(f"{CASES}:too_few", *given("a", "b", "c"))
    assert "returned {1.0, 3.0}, a list of 2 numbers is expected" in failure(f"{CASES}:in_no_order", *given("abc", "a"))


def test_a_function_may_change_its_arguments() -> None:
    """Those of the calls that it was sent with are not changed by that, and a list is as long as it was before."""
    assert totals(f"{CASES}:uses_up", given(*"abcd", marks=[1, 2, 3]), reward_processes=1) == [3] * 4
    assert totals(f"{CASES}:takes_out", given("ccc", "a", "bb")) == [3, 1, 2]


def test_several_rewards_with_weights() -> None:
    reward = {"exact_match": 1.0, f"{CASES}:length": -0.5, f"{CASES}:rank": 0.0, f"{CASES}:judge": 2.0}
    (group,) = score(reward, given("46", "475"))
    assert [one.total for one in group] == [1 - 0.5 * 2 + 2 * 2, -0.5 * 3 + 2 * 3]
    assert group[1].parts == {"exact_match": 0, f"{CASES}:length": 3, f"{CASES}:rank": 1, f"{CASES}:judge": 3}
    metrics = reward_metrics(group)
    assert metrics == {
        "reward/exact_match": 0.5, f"reward/{CASES}:length": 2.5, f"reward/{CASES}:rank": 0.5, f"reward/{CASES}:judge": 2.5,
        "reward/failures": 0,
    }  # fmt: skip
    assert reward_metrics(score("exact_match", given("46"))[0]) == {"reward/failures": 0}


def test_shares_of_1_add_up_to_1() -> None:
    """As sums of floats they may be a bit less, and a right response would not pass at data.eval.NAME.pass_reward = 1."""
    reward = {"exact_match": 0.7, f"{CASES}:length": 0.2, f"{CASES}:judge": 0.1}
    assert totals(reward, given("4", answer="4")) == [1.0]


def test_async_functions_wait_side_by_side() -> None:
    assert totals(f"{CASES}:meets_the_others", given(*["abc"] * 200), reward_processes=1, reward_concurrency=200) == [3] * 200


def test_plain_functions_run_in_several_processes() -> None:
    assert len(set(totals(f"{CASES}:process_of", given(*["x"] * 80)))) == 4
    assert len(set(totals(f"{CASES}:process_of", given(*["x"] * 8), reward_processes=1))) == 1


def test_the_loop_is_not_blocked_by_the_math_reward() -> None:
    """Nor is its own time limit lost, which works in a main thread only."""
    turns = []

    async def main() -> float:
        with RewardPool(RolloutConfig(reward="math_verify")) as pool:
            easy = [one.total for one in await pool.score_group(given(r"\boxed{\frac{92}{2}}", "47"))]
            assert easy == [1, 0]  # and processes are there
            hard = asyncio.ensure_future(pool.score(given(HARD)[0]))
            while not hard.done():
                await asyncio.sleep(0.01)
                turns.append(1)
            return hard.result().total

    assert asyncio.run(main()) == 0
    assert len(turns) > 50


def test_two_thousand_short_rewards() -> None:
    groups = [given(*["46", "47"] * 4) for _ in range(250)]
    assert totals("exact_match", *groups, reward_processes=2) == [1, 0] * 1000


def test_long_responses() -> None:
    assert totals(f"{CASES}:length", given("x" * 3_000_000, "y"), given("z" * 100_000)) == [3_000_000, 1, 100_000]


def test_a_process_is_ready_soon_and_without_torch() -> None:
    """In less than half a second of its own time."""
    heavy = "{'torch', 'ray', 'vllm', 'pydantic', 'numpy'} & set(sys.modules)"
    code = f"import sys; import megasync.rewards.program, megasync.workers.fork_server, megasync.workers.program; print({heavy})"
    begin = os.times()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    end = os.times()
    assert done.stdout.strip() == "set()"
    assert end.children_user + end.children_system - begin.children_user - begin.children_system < 0.5


# -------------------------------------------------------------------------------------------------------- failures

DEAD = "had its process killed by SIG"
FAILURES = {
    "raises": ["raised KeyError: 'broken on purpose'", "reward_cases.py", "in raises", "mend the function"],
    "raises much": ["raised ValueError: much much", "muc ... (5000011 characters)"],
    "exits": ["raised SystemExit: 5"],
    "nan": ["returned nan, a finite number is expected"],
    "none": ["returned None, a finite number is expected"],
    "text": ["returned 'high', a finite number is expected"],
    "hangs": ["took longer than rollout.reward_timeout_seconds = 2", "in hangs", "raise rollout.reward_timeout_seconds"],
    "hangs in C": ["took longer than rollout.reward_timeout_seconds = 2", "in hangs_in_c"],
    "hangs with a child": ["took longer than rollout.reward_timeout_seconds = 2", "in hangs_with_a_child"],
    "is killed": [f"{DEAD}KILL, as the system does when memory runs out"],
    "gets a real-time signal": [f"had its process killed by signal {signal.SIGRTMIN + 6}"],
    "crashes": [f"{DEAD}SEGV", "in crashes"],
    "leaves": ["ended its process with exit code 3"],
}


@pytest.fixture(scope="module")
def failed() -> dict[str, str]:
    """The error of each deed; all of them side by side in one pool."""
    groups = {deed: given("good", deed, level=2) for deed in FAILURES}

    async def main() -> list[list[Scored] | BaseException]:
        with RewardPool(RolloutConfig(reward=f"{CASES}:deed", reward_timeout_seconds=2)) as pool:
            return await asyncio.gather(*map(pool.score_group, groups.values()), return_exceptions=True)

    errors = dict(zip(groups, asyncio.run(main()), strict=True))
    assert children() == [] and all(isinstance(error, RewardError) for error in errors.values())
    return {deed: str(error) for deed, error in errors.items()}


@pytest.mark.parametrize("deed", FAILURES)
def test_a_reward_that_fails_stops_with_its_sample(deed: str, failed: dict[str, str]) -> None:
    text = failed[deed]
    assert text.startswith(f"the reward {CASES}:deed {FAILURES[deed][0]}"), text
    for words in (*FAILURES[deed], "data line: 2", "prompt:    '12+34='", f"response:  {deed!r}", "reward_on_failure=zero"):
        assert words in text, text
    assert "/program.py" not in text and len(text) < 12_000


@pytest.mark.parametrize("name", ["not_annotated", "returns_a_list"])
def test_a_function_of_a_list_that_does_not_say_so_is_reported_to(name: str) -> None:
    assert "remedy:    annotate its first parameter as list[RewardInput], " in failure(f"{CASES}:{name}", *given("good"))


@pytest.mark.parametrize("name", ["deed", "async_deed"])
def test_a_reward_that_fails_is_worth_zero_and_counted(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The others are scored all the same, once more where they were in a process that died."""
    deeds = [deed for deed in FAILURES if deed != "hangs in C"]
    deeds += ["nan"] * 2
    responses = [*deeds, *["good"] * 20] if name == "deed" else ["is killed", "raises", "nan", *["good"] * 20, "waits"]
    with caplog.at_level(logging.WARNING, logger="megasync.rewards"):
        (group,) = score(f"{CASES}:{name}", given(*responses), reward_timeout_seconds=3, reward_on_failure="zero")
    assert [one.total for one in group] == [4 if response == "good" else 0 for response in responses]
    failed = [one.failures == (f"{CASES}:{name}",) for one in group]
    assert failed == [response != "good" for response in responses]
    assert reward_metrics(group) == {"reward/failures": sum(failed)}
    assert caplog.text.count("counts as 0") == sum(failed) - (2 if name == "deed" else 0), "of the five that are no number three"
    assert ("others of this kind are only counted" in caplog.text) == (name == "deed")


@pytest.mark.parametrize(("deed", "words"), {"is killed": f"{DEAD}KILL", "hangs": "took longer than", "waits": "took"}.items())
def test_the_guilty_sample_of_a_shared_process_is_named(deed: str, words: str) -> None:
    """`hangs` keeps the event loop of all of them from running."""
    samples = given(*["good"] * 10, deed, *["fine"] * 10)
    text = failure(f"{CASES}:async_deed", *samples, reward_timeout_seconds=1, reward_processes=1)
    assert text.startswith(f"the reward {CASES}:async_deed {words}"), text
    assert "data line: 11" in text and f"response:  {deed!r}" in text


@pytest.mark.parametrize("deed", ["is killed", "hangs"])
def test_samples_after_one_that_ends_their_process_are_scored_by_another(deed: str) -> None:
    """Short calls are sent ahead; the limit of each begins when it does."""
    samples = given(*["good"] * 300, deed, *["fine"] * 300)
    keys = {"reward_timeout_seconds": 2, "reward_processes": 1}
    assert "data line: 301" in failure(f"{CASES}:deed", *samples, **keys)
    assert totals(f"{CASES}:deed", samples, reward_on_failure="zero", **keys) == [4] * 300 + [0] + [4] * 300


def test_a_sample_is_not_blamed_for_what_one_before_it_has_left_behind() -> None:
    keys = {"reward_processes": 1, "reward_on_failure": "stop"}
    assert totals(f"{CASES}:deed", given("good", "leaves a thread", "takes a second", "good"), **keys) == [4] * 4


@pytest.mark.parametrize("name", ["deed", "async_deed"])
def test_a_child_that_comes_back_answers_for_no_sample(name: str) -> None:
    """It would report the error as its parent's, and read the calls that follow in its place."""
    samples = given("good", "forks in vain", *["fine"] * 40)
    assert totals(f"{CASES}:{name}", samples, reward_processes=1, reward_timeout_seconds=10) == [4] * 42


def test_a_trainer_that_stands_still_makes_no_sample_late() -> None:
    """It reads only after their limit that they have ended."""

    async def main() -> list[float]:
        reward = {f"{CASES}:naps": 1.0, f"{CASES}:async_naps": 1.0}
        with RewardPool(RolloutConfig(reward=reward, reward_timeout_seconds=1.0, reward_processes=1)) as pool:
            await pool.score(given("0")[0])
            scored = asyncio.ensure_future(pool.score_group(given("0.3", "0.2")))
            await asyncio.sleep(0.1)
            time.sleep(2.5)
            return [one.total for one in await scored]

    assert asyncio.run(main()) == [2, 2]


def test_only_the_guilty_of_many_side_by_side_fail(caplog: pytest.LogCaptureFixture) -> None:
    """They are called again in smaller sets, not one after the other."""
    responses = [*["good"] * 50, "is killed", *["good"] * 40, "crashes", *["good"] * 30, "leaves", *["fine"] * 5]
    keys = {"reward_processes": 2, "reward_concurrency": 128, "reward_on_failure": "zero"}
    (group,) = score(f"{CASES}:async_deed", given(*responses), **keys)
    assert [one.total for one in group] == [4 * (response in ("good", "fine")) for response in responses]


def test_a_sample_is_not_blamed_for_the_time_of_the_one_before_it() -> None:
    """The second is late, and answers while its process is being ended, which works on the third by then."""
    keys = {"reward_timeout_seconds": 4, "reward_processes": 1, "reward_on_failure": "zero"}
    (group,) = score(f"{CASES}:naps", given("0", "4.1", "0.5"), **keys)
    assert (group[2].total, group[2].failures) == (1, ())


def test_a_process_that_dies_between_two_samples_fails_neither() -> None:
    """It is dead already when it gets the second."""

    async def main() -> float:
        with RewardPool(RolloutConfig(reward=f"{CASES}:length", reward_processes=1)) as pool:
            assert (await pool.score(given("abc")[0])).total == 3
            (pid,) = children()
            os.kill(pid, signal.SIGKILL)
            until(lambda: not children())
            return (await pool.score(given("abcd")[0])).total

    assert asyncio.run(main()) == 4


def test_what_the_math_reward_cannot_work_out_is_worth_0() -> None:
    """Even where its process has to be killed, and whatever reward_on_failure says."""
    (group,) = score("math_verify", given(HARD, "46"), reward_timeout_seconds=1)
    assert [(one.total, one.failures) for one in group] == [(0, ("math_verify",)), (1, ())]


def test_what_reasoning_gym_cannot_read_is_worth_0() -> None:
    """It raises on it, or has to be killed; but an entry that is not there is the data's fault, and stops the run."""
    try:
        lines = {task: tasks.generate_task(task, {}, 1, 0, 0)[0][0] for task in ("prime_factorization", "simple_integration")}
    except ConfigError as error:
        pytest.skip(f"reasoning-gym cannot be fetched: {error}")
    of_task = {task: {"entry": line["entry"]} for task, line in lines.items()}
    factors, integral = of_task["prime_factorization"], of_task["simple_integration"]
    answer = json.loads(factors["entry"])["answer"]
    thought, cut = f"<think><answer>{answer}</answer></think><answer>two</answer>", f"<think>It is {answer}"
    boxed = f"<think>two</think>Factors: \\boxed{{{answer}}}"
    responses = ("the factors are two", answer, thought, cut, f"<think>two</think>{answer}", boxed)
    assert totals("reasoning_gym", given(*responses, **factors)) == [0, 1, 0, 0, 1, 1]
    (group,) = score("reasoning_gym", given("9**9**9**9", **integral), reward_timeout_seconds=2)
    assert [(one.total, one.failures) for one in group] == [(0, ("reasoning_gym",))]
    assert "KeyError: 'entry'" in failure("reasoning_gym", *given("2"))


def test_a_module_that_processes_cannot_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "only_here.py").write_text(
        f"import os\nif os.getpid() != {os.getpid()}:\n    raise ValueError('not in here')\ndef one(sample):\n    return 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    text = failure("only_here:one", *given("x"), reward_on_failure="zero")
    assert text.startswith("rollout.reward: a process for rewards") and "not in here" in text


def test_where_one_process_starts_it_scores_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "first_only.py").write_text(
        f"import os, time\nif os.getpid() != {os.getpid()}:\n    os.mkdir({str(tmp_path / 'begun')!r})\n"
        "def one(sample):\n    time.sleep(0.05)\n    return 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="megasync.rewards"):
        assert totals("first_only:one", given(*["x"] * 80), reward_processes=3) == [1] * 80
    assert caplog.text.count("FileExistsError") == 2 and "the run continues with 1" in caplog.text


def test_a_process_that_is_killed_while_it_starts_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module = "import os, pathlib\nstarts = pathlib.Path({folder!r}) / 'starts'\nif os.getpid() != {pid}:\n"
    module += "    with starts.open('a') as file:\n        file.write('x')\n"
    module += "    if starts.stat().st_size <= {most}:\n        os.kill(os.getpid(), 9)\ndef one(sample):\n    return 1\n"
    for name, most in (("killed_twice", 2), ("killed_always", 99)):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.py").write_text(module.format(folder=str(tmp_path / name), pid=os.getpid(), most=most))
    monkeypatch.syspath_prepend(str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="megasync.rewards"):
        assert totals("killed_twice:one", given("x"), reward_processes=1) == [1]
    assert caplog.text.count("SIGKILL") == 2
    assert "SIGKILL" in failure("killed_always:one", *given("x"), reward_processes=1)


def test_long_texts_are_cut() -> None:
    text = shown("a" * 5000 + "b" * 5000)
    assert len(text) < 400 and text.startswith("'aaa") and "bbb'" in text and "10000 characters" in text
    assert shown("a\nb") == r"'a\nb'"
