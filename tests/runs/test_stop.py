"""A run that is asked to stop writes a checkpoint, and goes on from it as if nothing had been."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import yaml

from megasync.config.files import STOP_FILE, is_asked_to_stop, newest_checkpoint
from tests.runs.train_cases import metrics, train, write_config

STEPS = 40


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    config = write_config(
        tmp_path, run={"steps": STEPS}, algorithm={"name": "sft", "num_minibatches": 1}, checkpoint={"every_steps": 0}
    )
    values = yaml.safe_load(config.read_text())
    del values["rollout"]
    config.write_text(yaml.safe_dump(values))
    folder = tmp_path / "runs" / "stopped"
    over = threading.Event()

    def ask_to_stop() -> None:
        while not over.is_set() and not (folder.exists() and (folder / "metrics.jsonl").exists() and metrics(folder)):
            time.sleep(0.02)
        (folder / STOP_FILE).touch()

    thread = threading.Thread(target=ask_to_stop)
    thread.start()
    try:
        code, said = train(config, "run.name=stopped")
    finally:
        over.set()
        thread.join()
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
