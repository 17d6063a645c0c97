"""Whole runs whose reward asks a judge. A server of two is killed, then the run: no reply is lost, each prompt trained once."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from megasync.config.files import newest_checkpoint
from megasync.report.log import read_samples
from megasync.report.page import write_report
from megasync.rollouts.records import load_record, paths_of
from megasync.tools.assets.command import write_assets
from tests.runs.train_cases import TORCHRUN, assert_metrics_have_rows, endless_run, launch, metrics, write_config
from tests.support.judge_server import MODEL, expected, judge_server, requests_of

pytestmark = [pytest.mark.long, pytest.mark.vllm_on_cpu]

UNPARSED, BATCH, STALENESS = 0.05, 8, 1
COUNTS = ("calls", "cached", "unparsed", "retries", "failures")


def config_of(folder: Path, urls: list[str], **rollout: Any) -> Path:
    judge = {"endpoint": urls, "model": MODEL, "prompt": "{{ prompt }}|{{ response }}", "scale": [0, 10], "on_unparsed": "zero"}
    return write_config(
        folder,
        run={"log_samples": BATCH},
        engine={"wrap": "ddp"},
        judges={"quality": {**judge, "timeout_seconds": 20}},
        rollout={"reward": {"judge:quality": 1.0, "token_count": 0.5}, "max_staleness": STALENESS, "record": "all", **rollout},
        checkpoint={"every_steps": 1},
    )


def counted(lines: list[dict[str, Any]], name: str) -> float:
    return sum(line.get(f"reward/judge/quality/{name}", 0.0) for line in lines)


@pytest.mark.parametrize("episode", ["", "tests.support.fuzzed:scored"])
def test_a_judge_in_a_run_that_is_killed(tmp_path: Path, episode: str) -> None:
    logs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    keys = {"episode": episode, "episode_max_turns": 2, "max_model_len": 48} if episode else {}
    with (
        judge_server(logs[0], unparsed=UNPARSED, seconds=0.05) as (first, _),
        judge_server(logs[1], unparsed=UNPARSED, seconds=0.05) as (second, process),
    ):
        config = config_of(tmp_path, [first, second], **keys)
        with endless_run(TORCHRUN, config, "--nproc", "1") as run:
            run.wait_for(2)
            process.kill()
            run.wait_for(len(metrics(run.folder)) + 3)
            assert counted(metrics(run.folder), "retries") >= 1, "calls of the server that was killed went to the other"
            asked, end = len([*replies(run.folder)]), time.monotonic() + 60
            while len([*replies(run.folder)]) == asked and time.monotonic() < end:  # one that no checkpoint has
                time.sleep(0.02)
            run.ranks()[0].kill()
            assert run.process.wait(300) != 0
        kept = {json.loads(line)["key"] for line in replies(run.folder)}
        num_asked = len(requests_of(logs[0]))
        checkpoint = newest_checkpoint(run.folder)
        assert checkpoint is not None
        done = int(checkpoint.name.removeprefix("step_"))
        again = launch(config, f"judges.quality.endpoint={first}", f"run.steps={done + 3}", ranks=1)
        assert again.returncode == 0, again.stdout + again.stderr
    lines, keys_now = metrics(run.folder), [json.loads(line)["key"] for line in replies(run.folder)]
    assert len(set(keys_now)) == len(keys_now) > len(kept) and set(keys_now) >= kept
    num_new = len(requests_of(logs[0])) - num_asked
    assert len(keys_now) - len(kept) <= num_new <= len(keys_now) - len(kept) + 1 + 2, "the new ones, and the try at the start"
    assert_each_prompt_once(run.folder, done + 3)
    assert_metrics_have_rows(lines, at_least=20)
    assert {f"reward/judge/quality/{name}" for name in COUNTS} <= lines[-1].keys()
    assert {"reward/judge:quality", "reward/token_count"} <= lines[-1].keys()
    assert counted(lines, "cached") > 0
    assert 0 < counted(lines, "unparsed") == counted(lines, "failures")
    assert "Judges" in write_report(run.folder).read_text()
    if not episode:
        for line in (line for line in read_samples(run.folder) if line["set"] == "train"):
            score = expected(f"{line['prompt']}|{line['response']}", UNPARSED)
            assert line["reward"] == pytest.approx((score or 0) / 10 + 0.5 * line["tokens"] / 8), line


def replies(folder: Path) -> list[str]:
    return (folder / "judges" / "quality.jsonl").read_text().splitlines()


def assert_each_prompt_once(folder: Path, steps: int) -> None:
    records = [load_record(path) for path in paths_of(folder).values()]
    assert [record.step for record in records] == [line["step"] for line in metrics(folder)] == list(range(1, steps + 1))
    keys = [group.key for record in records for group in record.groups]
    assert len(keys) == len(set(keys)) == BATCH * steps


def test_a_judge_on_replicas_of_its_own(tmp_path: Path) -> None:
    """A model that is not trained, whose replies are scores by chance; one epoch after another asks for the same prompts."""
    judge = tmp_path / "judge"
    shutil.copytree(write_assets(tmp_path / "judge_assets", seed=7).model, judge)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (judge / "chat_template.jinja").write_text(template)
    keys = {"path": str(judge), "prompt": "{{ prompt }}{{ response }}", "score": "([0-9])", "scale": [0, 9]}
    config = write_config(
        tmp_path,
        run={"steps": 2, "log_samples": BATCH},
        engine={"wrap": "ddp"},
        judges={"quality": {**keys, "on_unparsed": "zero", "max_new_tokens": 4, "engine_arguments": {"max_model_len": 64}}},
        rollout={"reward": {"judge:quality": 1.0}},
    )
    done = launch(config, ranks=1)
    assert done.returncode == 0, done.stdout + done.stderr
    lines, kept = metrics(tmp_path / "runs" / "run"), replies(tmp_path / "runs" / "run")
    assert counted(lines, "calls") == len(kept) and counted(lines, "calls") + counted(lines, "cached") == 2 * BATCH * 4
    assert any(line["reward/mean"] > 0 for line in lines)
    rewards = {line["reward"] for line in read_samples(tmp_path / "runs" / "run") if line["set"] == "train"}
    assert all(any(abs(reward - score / 9) < 1e-9 for score in range(10)) for reward in rewards)
