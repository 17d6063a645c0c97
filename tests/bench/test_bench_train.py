"""The training bench on two CPU ranks with tiny shapes, for real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import cli
from bench.training.flops import attention_flops, num_active_parameters, num_parameters
from bench.common.model import write_config
from megasync.models.model_shape import SHAPES

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "configs" / "bench_train.yaml")
TINY = ["bench_train.shapes=tiny", "bench_train.sequence_length=24", "bench_train.num_sequences=2", "model.dtype=float32"]
SHORT = ["bench_train.num_microbatches=2", "bench_train.steps=1", "bench_train.warm_up_steps=1", "run.progress=none"]


def test_both_wraps_are_measured_and_train_alike(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Plain DDP against Megatron-FSDP with all fusions, in fp32."""
    losses = []
    for keys in (["engine.fusions=none"], ["engine.fusions=all", "engine.wrap=megatron_fsdp"]):
        out = tmp_path / "out.json"
        code = cli.main(["train", "--config", CONFIG, *TINY, *SHORT, f"run.dir={tmp_path}", *keys, "--json", str(out)])
        assert code == 0, capfd.readouterr().out
        measured = json.loads(out.read_text())
        assert measured["is_complete"] and measured["tokens_per_second_per_gpu"] > 0
        assert 0 < measured["share_of_ceiling"] == measured["model_flops_per_gpu"] / measured["ceiling_flops"]
        assert measured["share_with_attention"] > measured["share_of_ceiling"]
        assert measured["gradient_dtypes"] == ["float32"] and min(measured["state_bytes"].values()) > 0
        assert 0 < measured["step_peak_bytes"] <= measured["peak_bytes"]
        assert "gradients' dtype" in capfd.readouterr().out
        losses.append([step["loss"] for step in measured["steps"]])
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("shapes", "number", "active"),
    [
        ("3b", 3_085_938_688, 3_085_938_688),  # Qwen2.5-3B: its embeddings are the output layer
        ("7b", 7_615_616_512, 7_615_616_512 - 152064 * 3584),  # Qwen2.5-7B
        ("30b-a3b", 30_532_122_624, 3_353_032_704 - 151936 * 2048),  # Qwen3-30B-A3B
    ],
)
def test_parameters_are_counted_as_published(tmp_path: Path, shapes: str, number: int, active: int) -> None:
    write_config(tmp_path, shapes, "bfloat16", 2048)
    assert num_parameters(tmp_path) == number
    assert num_active_parameters(tmp_path) == active
    size = SHAPES[shapes].num_attention_heads * 128
    assert attention_flops(tmp_path, 999) == 6 * SHAPES[shapes].num_hidden_layers * size * 1000
