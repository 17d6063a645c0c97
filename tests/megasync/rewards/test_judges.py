"""Judges over HTTP: scores beside other rewards, equal prompts, replies without scores, servers that die, and resumes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megasync.config.judge_section import JudgeConfig
from megasync.config.schema import RolloutConfig
from megasync.rewards.failures import RewardError
from megasync.rewards.functions import RewardInput
from megasync.rewards.judges.judge import Judges
from megasync.rewards.pool import RewardPool, Scored
from tests.support.config_files import ROOT
from tests.support.judge_server import MODEL, expected, judge_server, requests_of
from tests.support.rewards import CASES, given, until

QUALITY = {"prompt": "{{ prompt }}{{ response }}", "model": MODEL, "scale": [0, 10]}
RESPONSES = [str(number) for number in range(200)]


def judge(url: str, *others: str, **keys: Any) -> dict[str, JudgeConfig]:
    return {"quality": JudgeConfig(**QUALITY | {"endpoint": (url, *others)} | keys)}


async def score(
    judges: dict[str, JudgeConfig],
    samples: Sequence[RewardInput],
    folder: Path | None = None,
    during: Callable[[], Awaitable[None]] | None = None,
    **keys: Any,
) -> tuple[list[Scored], dict[str, float]]:
    """Of all samples at once, and the counts."""
    rollout = RolloutConfig(**{"reward": "judge:quality"} | keys)
    with RewardPool(rollout, Judges(judges, run_folder=folder)) as pool:
        try:
            work = [pool.score(sample) for sample in samples]
            scored, _ = await asyncio.gather(asyncio.gather(*work), during() if during else asyncio.sleep(0))
            counts = pool.judges.metrics()
            return list(scored), {name.removeprefix("reward/judge/quality/"): value for name, value in counts.items()}
        finally:
            await pool.judges.close()


def scores(unparsed: float = 0.0) -> list[float]:
    found = [expected(f"12+34={response}", unparsed) for response in RESPONSES]
    return [0.0 if score is None else score / 10 for score in found]


def test_a_judge_beside_other_rewards(tmp_path: Path) -> None:
    with judge_server(tmp_path / "log") as (url, _):
        reward = {"exact_match": 1.0, "judge:quality": 0.5, f"{CASES}:rank": 2.0}
        scored, counts = asyncio.run(score(judge(url), given("46", "7"), reward=reward))
    values = [expected("12+34=46"), expected("12+34=7")]
    for one, value, match in zip(scored, values, (1, 0), strict=True):
        assert value is not None
        assert one.parts == {"exact_match": match, "judge:quality": value / 10, f"{CASES}:rank": 0}
        assert list(one.parts) == list(reward)
        assert one.total == match + 0.5 * (value / 10)
    assert counts == {"calls": 2, "cached": 0, "unparsed": 0, "retries": 0, "failures": 0}


def test_equal_prompts_are_asked_once_and_a_resume_asks_nothing_again(tmp_path: Path) -> None:
    with judge_server(tmp_path / "log", seconds=0.2) as (url, _):
        samples = given("1", "2", "1", "1")
        first, counts = asyncio.run(score(judge(url), samples, tmp_path))
        assert counts == {"calls": 2, "cached": 2, "unparsed": 0, "retries": 0, "failures": 0}
        again, counts = asyncio.run(score(judge(url), [*samples, *given("3")], tmp_path))
        assert counts == {"calls": 1, "cached": 4, "unparsed": 0, "retries": 0, "failures": 0}
        assert again[:4] == first
        asked = [one["text"] for one in requests_of(tmp_path / "log")]
        assert sorted(asked) == ["12+34=1", "12+34=2", "12+34=3"]
        other = judge(url, max_new_tokens=9)
        assert asyncio.run(score(other, samples, tmp_path))[1]["calls"] == 2, "another sampling, other replies"
        assert asyncio.run(score(judge(url, cache=False), given("9"), tmp_path))[1]["calls"] == 1
        assert asyncio.run(score(judge(url, cache=False), given("9"), tmp_path))[1]["calls"] == 1


def test_another_score_is_read_from_kept_replies(tmp_path: Path) -> None:
    with judge_server(tmp_path / "log") as (url, _):
        first, _ = asyncio.run(score(judge(url), given("5"), tmp_path))
    again, counts = asyncio.run(score(judge(url, scale=None), given("5"), tmp_path))
    assert counts["calls"] == 0 and again[0].total == pytest.approx(10 * first[0].total)


def test_replies_without_a_score_count_as_0(tmp_path: Path) -> None:
    with judge_server(tmp_path / "log", unparsed=0.05) as (url, _):
        scored, counts = asyncio.run(score(judge(url, on_unparsed="zero"), given(*RESPONSES)))
    assert [one.total for one in scored] == scores(0.05)
    missing = [response for response in RESPONSES if expected(f"12+34={response}", 0.05) is None]
    assert 4 <= len(missing) <= 16
    assert [bool(one.failures) for one in scored] == [response in missing for response in RESPONSES]
    assert counts == {"calls": 200, "cached": 0, "unparsed": len(missing), "retries": 0, "failures": len(missing)}


def test_replies_without_a_score_are_asked_for_again(tmp_path: Path) -> None:
    with judge_server(tmp_path / "log", unparsed=0.3) as (url, _):
        judges = judge(url, on_unparsed="retry", temperature=1.0, retries=2)
        scored, counts = asyncio.run(score(judges, given(*RESPONSES), tmp_path, reward_on_failure="zero"))
        again, kept = asyncio.run(score(judges, given(*RESPONSES), tmp_path, reward_on_failure="zero"))
    tries = [[expected(f"12+34={response}", 0.3, seed) for seed in range(3)] for response in RESPONSES]
    firsts = [next((one for one in found if one is not None), None) for found in tries]
    assert [one.total for one in scored] == [0.0 if first is None else first / 10 for first in firsts]
    num_failed, num_unparsed = firsts.count(None), int(counts["unparsed"])
    assert 0 < num_failed == counts["failures"]
    assert counts["retries"] == num_unparsed - num_failed and counts["calls"] == 200 + counts["retries"]
    assert again == scored and (kept["calls"], kept["cached"]) == (0, counts["calls"])


@pytest.mark.parametrize(("on_unparsed", "on_failure"), [("stop", "zero"), ("retry", "stop")])
def test_a_reply_without_a_score_stops_the_run_where_it_is_to(tmp_path: Path, on_unparsed: str, on_failure: str) -> None:
    with judge_server(tmp_path / "log", unparsed=1.0) as (url, _), pytest.raises(RewardError) as caught:
        asyncio.run(score(judge(url, on_unparsed=on_unparsed, retries=1), given("1"), reward_on_failure=on_failure))
    for words in ("judge:quality", "I cannot say.", "judges.quality.prompt", "response:  '1'"):
        assert words in str(caught.value)


def test_a_killed_server_loses_nothing(tmp_path: Path) -> None:
    """One of two: what it had on its way is asked of the other, and every sample has its score."""
    with (
        judge_server(tmp_path / "a", unparsed=0.05, seconds=0.1) as (first, _),
        judge_server(tmp_path / "b", unparsed=0.05, seconds=0.1) as (second, process),
    ):

        async def kill() -> None:
            while not requests_of(tmp_path / "b"):
                await asyncio.sleep(0.01)
            process.kill()

        judges = judge(first, second, on_unparsed="zero", concurrency=8)
        scored, counts = asyncio.run(score(judges, given(*RESPONSES), tmp_path, kill))
    assert [one.total for one in scored] == scores(0.05)
    assert counts["calls"] == 200 and 1 <= counts["retries"] <= 8 + 8
    kept = (tmp_path / "judges" / "quality.jsonl").read_text().splitlines()
    assert len({json.loads(line)["key"] for line in kept}) == len(kept) == 200


SCORING = """
import asyncio, json, pathlib, sys
from megasync.config.judge_section import JudgeConfig
from tests.megasync.rewards.test_judges import RESPONSES, score
from tests.support.rewards import given
judges = {"quality": JudgeConfig(**json.loads(sys.argv[1]))}
scored, counts = asyncio.run(score(judges, given(*RESPONSES), pathlib.Path(sys.argv[2])))
print(json.dumps([[one.total for one in scored], counts]))
"""


def test_a_process_that_is_killed_asks_nothing_again_that_it_had_a_reply_to(tmp_path: Path) -> None:
    log, kept, concurrency = tmp_path / "log", tmp_path / "judges" / "quality.jsonl", 4
    with judge_server(log, unparsed=0.05, seconds=0.05) as (url, _):
        keys: dict[str, Any] = QUALITY | {"endpoint": [url], "on_unparsed": "zero", "concurrency": concurrency}
        command = [sys.executable, "-c", SCORING, json.dumps(keys), str(tmp_path)]
        with subprocess.Popen(command, cwd=ROOT) as process:
            until(lambda: kept.exists() and kept.read_bytes().count(b"\n") >= 50, 60)
            process.kill()
        num_kept, num_asked = kept.read_bytes().count(b"\n"), len(requests_of(log))
        assert 50 <= num_kept < 200 and num_asked <= num_kept + concurrency
        again = json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)
    assert again[0] == scores(0.05)
    assert (again[1]["calls"], again[1]["cached"]) == (200 - num_kept, num_kept)
    times = Counter(one["text"] for one in requests_of(log))
    assert len(times) == 200 and sum(times.values()) - 200 == num_asked - num_kept <= concurrency


def test_no_server_is_a_failure_of_each_sample(tmp_path: Path) -> None:
    judges = judge("http://127.0.0.1:9/v1", timeout_seconds=0.1, retries=1)
    scored, counts = asyncio.run(score(judges, given("1", "1", "2"), tmp_path, reward_on_failure="zero"))
    assert [one.failures for one in scored] == [("judge:quality",)] * 3
    assert (counts["failures"], counts["cached"], counts["calls"]) == (3, 1, 2)
    with pytest.raises(RewardError) as caught:
        asyncio.run(score(judges, given("1")))
    assert "judges.quality.endpoint" in str(caught.value) and "127.0.0.1:9" in str(caught.value)


def test_no_more_calls_than_allowed_are_on_their_way(tmp_path: Path) -> None:
    with judge_server(tmp_path / "log", seconds=0.1) as (url, _):
        judges, begin = judge(url, concurrency=2), asyncio.new_event_loop().time()
        asyncio.run(score(judges, given(*RESPONSES[:10])))
        assert asyncio.new_event_loop().time() - begin >= 0.5
