"""A run that is asked to stop writes a checkpoint, and goes on from it as if nothing had been."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from megasync.config.files import STOP_FILE, is_asked_to_stop, newest_checkpoint
from examples import chat_calculator
from examples.calculator import write_lines
from megasync.tools.assets.small_qwen3 import write_small_qwen3
from megasync.report.log import read_evaluations, read_samples
from tests.runs.train_cases import metrics, train, write_config

pytestmark = pytest.mark.vllm_on_cpu

STEPS = 40


def supervised(folder: Path) -> Path:
    """The config of a run on conversations with a tool, that writes no checkpoint by itself, before its end."""
    model, written = folder / "chat", chat_calculator.lines(0)
    write_small_qwen3(model, chat_calculator.vocabulary_of(), 0, "float32", max_position_embeddings=256)
    chat_calculator.build_tokenizer().save_pretrained(model)
    train, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
    parts = {"train": written["conversations"][:100], "held_out": written["conversations_held_out"][:10]}
    write_lines(folder, parts)
    config = write_config(
        folder,
        run={"steps": STEPS},
        model={"path": str(model)},
        algorithm={"name": "sft", "num_minibatches": 1},
        data={"train": str(train), "eval": str(held_out), "prompt_key": "messages", "chat_template": True},
        checkpoint={"every_steps": 0},
    )
    values = yaml.safe_load(config.read_text())
    del values["rollout"]
    config.write_text(yaml.safe_dump(values))
    return config


@contextmanager
def asked_to_stop(folder: Path, once: Callable[[], object]) -> Iterator[None]:
    """Within the block the run in `folder` is asked to stop `once` that holds."""
    over = threading.Event()

    def ask_to_stop() -> None:
        while not over.is_set() and not once():
            time.sleep(0.02)
        (folder / STOP_FILE).touch()

    thread = threading.Thread(target=ask_to_stop)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_run_that_is_asked_while_it_starts_does_no_step(tmp_path: Path) -> None:
    """Without a launcher of ours; the results of a former run, from which it does not go on, are moved aside meanwhile."""
    config, folder = supervised(tmp_path), tmp_path / "runs" / "early"
    folder.mkdir(parents=True)
    (folder / "evaluations.jsonl").write_text("{}\n")
    with asked_to_stop(folder, folder.with_name(".early.lock").exists):
        code, said = train(config, "run.name=early")
    assert code == 0 and "stopped before the first step, as asked; the same command begins again" in said, said
    assert is_asked_to_stop(folder) and not metrics(folder) and newest_checkpoint(folder) is None
    former = tmp_path / "runs" / "early.1"
    assert (former / "evaluations.jsonl").exists() and not is_asked_to_stop(former)


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    config, folder = supervised(tmp_path), tmp_path / "runs" / "stopped"
    with asked_to_stop(folder, lambda: (folder / "metrics.jsonl").exists() and metrics(folder)):
        code, said = train(config, "run.name=stopped", "checkpoint.resume=never")
    assert "stopped after" in said and "the same command with checkpoint.resume=auto goes on from it" in said, said
    done = len(metrics(folder))
    assert code == 0 and f"stopped after step {done}, as asked" in said, said
    assert 0 < done < STEPS and is_asked_to_stop(folder), "the launcher's exit code is by the file"
    checkpoint = newest_checkpoint(folder)
    assert checkpoint is not None and checkpoint.name.endswith(f"{done}")
    steps = f"run.steps={done + 3}"
    code, said = train(config, "run.name=stopped", steps)
    assert code == 0 and "done: " in said, said
    assert not is_asked_to_stop(folder)
    assert train(config, "run.name=whole", steps)[0] == 0
    whole = metrics(tmp_path / "runs" / "whole")
    assert [line["step"] for line in metrics(folder)] == list(range(1, done + 4))
    for kind in ("loss/sft", "grad_norm"):
        assert [line.get(kind) for line in metrics(folder)] == [line.get(kind) for line in whole]
    resumed, at_once = (read_evaluations(each)[-1] for each in (folder, tmp_path / "runs" / "whole"))
    assert resumed == at_once and at_once["eval/perplexity"] == pytest.approx(math.exp(at_once["eval/loss"]))
    pieces = [[piece["sampled"] for piece in branch] for line in read_samples(folder) for branch in line["branches"]]
    assert pieces and all(each == [False, True, False, True] for each in pieces), "the call and the answer are trained"
