"""Whole runs on tables of messages, with sampling keys, several evaluation sets and samples.jsonl, resumed and cut off.

python -m pytest tests/test_train_data.py
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from megasync.assets import split_sums
from megasync.reporting.log import read_evaluations, read_samples, read_summary
from tests.train_cases import TORCHRUN, cut_off_copy, endless_run, exact, metrics, train, write_config

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{% if sign is defined %}{{ sign }}{% endif %}"
STOPS = ["?", "5("]
SAMPLED = {"samples": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "max_new_tokens": 5, "pass_reward": 0.5}


def write_sums(folder: Path) -> Path:
    """A data set as on the hub, with splits, prompts as messages, and answers in a struct."""
    train, held_out = split_sums(seed=0)
    for split, sums in {"train": train[:200], "test": held_out[:12]}.items():
        prompts = [[{"role": "user", "content": one["question"].removesuffix("=")}] for one in sums]
        answers = [{"ground_truth": one["answer"], "style": "rule"} for one in sums]
        rows = [{"messages": prompt, "reward_model": answer} for prompt, answer in zip(prompts, answers, strict=True)]
        (folder / "data").mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder


def config_of(folder: Path) -> Path:
    sums = write_sums(folder / "sums")
    lines = [json.dumps({"q": "1+1=", "a": "2"}), json.dumps({"q": "2+2=", "a": "4"})]
    (folder / "small.jsonl").write_text("\n".join(lines))
    data: dict[str, Any] = {
        "train": str(sums),
        "split": "train",
        "prompt_key": "messages",
        "answer_key": "reward_model.ground_truth",
        "chat_template": True,
        "chat_template_arguments": {"sign": "="},
        "system_prompt": "xyz ",
        "eval": {
            "sums": {"path": str(sums), "split": "test", **SAMPLED},
            "small": {"path": str(folder / "small.jsonl"), "prompt_key": "q", "answer_key": "a"},
        },
    }
    rollout = {"top_k": 20, "min_p": 0.01, "stop": STOPS, "evaluate_every_steps": 3, "evaluate_at_start": False}
    rollout["engine_arguments"] = {"max_num_batched_tokens": 512}
    config = write_config(folder, rollout=rollout, data=data, run={"log_samples": 8})
    tokenizer = folder / "assets" / "model" / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"chat_template": TEMPLATE}))
    return config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    code, said = train(config_of(folder))
    assert code == 0, said
    return folder


def test_sets_are_evaluated_when_due_and_not_at_the_start(run: Path) -> None:
    folder = run / "runs" / "run"
    lines = read_evaluations(folder)
    assert [line["step"] for line in lines] == [3, 6]
    keys = {"step", "eval/sums/truncated", "eval/small/truncated", "eval/small/avg@1", "eval/small/pass@1"}
    assert set(lines[0]) == keys | {f"eval/sums/{name}" for name in ("avg@3", "pass@1", "pass@2", "pass@3")}
    assert all(0 <= value <= 1 for line in lines for key, value in line.items() if key != "step")
    summary = read_summary(folder)
    assert summary["eval/sums/pass@3"] == lines[-1]["eval/sums/pass@3"] and summary["accuracy_after"] is None


def test_samples_show_what_the_model_got_and_gave(run: Path) -> None:
    lines = read_samples(run / "runs" / "run")
    by_set: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_set.setdefault(line["set"], []).append(line)
    assert {name: len(found) for name, found in by_set.items()} == {"train": 6 * 8, "sums": 2 * 8, "small": 2 * 2}
    assert [line["step"] for line in by_set["train"]] == [step for step in range(6) for _ in range(8)]
    for line in by_set["train"]:
        assert line["prompt"].startswith("xyz ") and line["prompt"].endswith("=") and "+" in line["prompt"]
        assert line["versions"] == [line["step"]] * 2 and line["reward"] == line["tokens"] / 8
        left, right = line["prompt"].removeprefix("xyz ").removesuffix("=").split("+")
        assert int(left) + int(right) == int(line["answer"])
        ends = [line["response"].index(stop) + len(stop) for stop in STOPS if stop in line["response"]]
        if ends:
            assert min(ends) == len(line["response"]) and line["finish_reason"] == "stop"
        else:
            assert line["tokens"] == 8 or line["finish_reason"] == "stop"
    assert any(stop in line["response"] for stop in STOPS for line in by_set["train"])
    assert all(line["tokens"] <= 5 for line in by_set["sums"])


def test_log_probs_of_vllm_are_above_the_trainers(run: Path) -> None:
    """By the share of probability that top_k and min_p left out, which the gap shows."""
    lines = metrics(run / "runs" / "run")
    assert all(line["logprob_gap/max"] > 1e-3 for line in lines)


def test_a_resumed_run_is_the_same_bit_for_bit_and_has_each_sample_once_until_ctrl_c(run: Path, tmp_path: Path) -> None:
    """It goes on for ever, so that it is cut off in the midst of its work."""
    first, second = run / "runs" / "run", cut_off_copy(run / "runs" / "run", tmp_path)
    with endless_run(TORCHRUN, config_of(tmp_path), "--nproc", "2") as endless:
        endless.wait_for(7)
        os.killpg(endless.process.pid, signal.SIGINT)
    assert endless.process.returncode != 0
    assert exact(second)[:6] == exact(first)
    assert [line["step"] for line in read_evaluations(second)][:2] == [3, 6]

    def places(folder: Path) -> list[tuple[int, str, str]]:
        ends = {"train": 6}  # the steps of the first run
        lines = [line for line in read_samples(folder) if line["step"] < ends.get(line["set"], 7)]
        return sorted((line["step"], line["set"], line["prompt"]) for line in lines)

    assert places(second) == places(first)
