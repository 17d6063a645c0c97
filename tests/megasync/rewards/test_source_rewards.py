"""Sources of the data, and evaluation sets, that some of the rewards score: totals, metrics, the check, judges."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from megasync.checks.check import check_config
from megasync.checks.own_answers import own_inputs, score_own_answers, try_judges
from megasync.config.errors import ConfigError
from megasync.config.load import load_config
from megasync.config.schema import RolloutConfig
from megasync.rewards.pool import RewardPool, reward_metrics
from megasync.rollouts.requests import reward_digest
from tests.support.config_files import write_runnable
from tests.support.judge_server import MODEL, judge_server, requests_of
from tests.support.rewards import given

REWARDS = {"exact_match": 1.0, "token_count": 0.5}


def sourced(folder: Path, *overrides: str) -> tuple[Path, list[str]]:
    path = write_runnable(folder)
    for name in ("sums", "words"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"question": "1+1=", "answer": "2", "level": 1}) + "\n")
    sums, words = (f"{{path: {folder / name}.jsonl, rewards: {rewards}}}" for name, rewards in CHOSEN.items())
    data = [f"data.train={{sums: {sums}, words: {words}}}", f"data.eval={{held: {sums}}}", "data.batch_size=2"]
    return path, [*data, "rollout.reward={exact_match: 1.0, token_count: 0.5}", *overrides]


CHOSEN = {"sums": "exact_match", "words": "[token_count]"}


def test_a_sample_is_scored_by_the_rewards_of_its_source() -> None:
    right, wrong = (replace(one, num_tokens=4, max_tokens=8) for one in given("46", "47"))
    groups = [[right, wrong], [replace(one, rewards=("token_count",)) for one in (right, wrong)]]

    async def main() -> None:
        with RewardPool(RolloutConfig(reward=REWARDS)) as pool:
            both, one = await asyncio.gather(*map(pool.score_group, groups))
        assert [scored.total for scored in both] == [1.25, 0.25]
        assert [(scored.total, dict(scored.parts)) for scored in one] == [(0.25, {"token_count": 0.5})] * 2
        assert reward_metrics([*one, *both]) == {"reward/token_count": 0.5, "reward/exact_match": 0.5, "reward/failures": 0.0}

    asyncio.run(main())


def test_the_data_name_their_rewards(tmp_path: Path) -> None:
    path, overrides = sourced(tmp_path)
    config = load_config(path, overrides)
    data = check_config(config, 1)
    assert data is not None
    assert [(each.source, each.rewards) for each in data.train] == [("sums", ("exact_match",)), ("words", ("token_count",))]
    assert [each.rewards for each in data.eval_sets["held"]] == [("exact_match",)]
    inputs = own_inputs(config, data, 4)
    assert [inputs[f"data.train.{name}"][0].source for name in CHOSEN] == ["sums", "words"]
    scored = [(one.key, one.reward, one.values) for one in score_own_answers(config, data)]
    assert scored == [("data.train.sums", "exact_match", [1.0]), ("data.eval.held", "exact_match", [1.0])]
    with RewardPool(config.rollout) as pool:
        first = data.train[0]
        assert reward_digest(first, pool, 1) != reward_digest(replace(first, rewards=()), pool, 1)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("rollout.reward={token_count: 1.0}", "data.train.sums.rewards", "exact_match"),
        ("algorithm.advantage=gdpo", "algorithm.advantage", "gdpo"),
    ],
)
def test_what_cannot_be_is_refused_by_key(tmp_path: Path, override: str, key: str, value: str) -> None:
    path, overrides = sourced(tmp_path, override)
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(path, overrides), 1)
    assert (caught.value.key, caught.value.value) == (key, value)


def test_a_judge_is_asked_about_the_sources_that_it_scores(tmp_path: Path) -> None:
    """Its template may read a column that the others do not have."""
    with judge_server(tmp_path / "log") as (url, _):
        judge = f"judges.quality={{endpoint: '{url}', model: {MODEL}, prompt: '{{{{ extra.level }}}}{{{{ response }}}}'}}"
        path, overrides = sourced(tmp_path, judge, "rollout.reward={exact_match: 1.0, token_count: 0.5, judge:quality: 1.0}")
        (tmp_path / "words.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
        chosen = overrides[0].replace("rewards: exact_match", "rewards: ['judge:quality']")
        config = load_config(path, [*overrides, chosen])
        data = check_config(config, 1)
        assert data is not None and len(try_judges(config, data)) == 1
        assert [one["text"] for one in requests_of(tmp_path / "log")] == ["12"]
