"""A whole supervised run from a folder in MXFP4: its checkpoints hold other tensors than that folder.

python -m pytest tests/runs/test_packed_runs.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megasync.tools.assets.command import VOCABULARY, build_tokenizer
from tests.engine.model.test_gpt_oss import write_packed
from tests.runs.train_cases import metrics, train, write_supervised_config


@pytest.mark.long
def test_a_run_of_a_model_in_mxfp4_is_resumed(tmp_path: Path) -> None:
    """As if it had not been stopped; beside it one that never was."""
    packed = write_packed(tmp_path, vocab_size=len(VOCABULARY))
    build_tokenizer().save_pretrained(packed)
    config = write_supervised_config(tmp_path)
    model = [f"model.path={packed}", "model.dtype=bfloat16", "checkpoint.every_steps=2"]
    for name, ends in (("whole", [4]), ("stopped", [2, 4])):
        for end in ends:
            code, said = train(config, *model, f"run.name={name}", f"run.steps={end}", ranks=1)
            assert code == 0, said
    whole, stopped = (metrics(tmp_path / "runs" / name) for name in ("whole", "stopped"))
    assert [line["grad_norm"] for line in stopped] == [line["grad_norm"] for line in whole] and len(whole) == 4
