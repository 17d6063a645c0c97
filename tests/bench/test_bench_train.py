"""The training bench on two CPU ranks with tiny shapes, for real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import cli
from bench.config import VARIANTS
from bench.training.flops import attention_flops, num_active_parameters, num_parameters
from bench.training.variants import COMPARED, compare
from bench.common.model import write_config
from megasync.models.model_shape import SHAPES

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "configs" / "bench_train.yaml")
TINY = ["bench_train.shapes=tiny", "bench_train.sequence_length=24", "bench_train.num_sequences=2", "model.dtype=float32"]
SHORT = ["bench_train.num_microbatches=2", "bench_train.steps=1", "bench_train.warm_up_steps=1", "run.progress=none"]


def test_variants_are_measured_and_train_alike(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Plain DDP against the dot product with all fusions, in fp32."""
    variants = ["ddp_no_fusions", "megatron_fsdp_dot_product"]
    overrides = [*TINY, *SHORT, f"run.dir={tmp_path}", "engine.fusions=all", f"bench_train.variants=[{','.join(variants)}]"]
    overrides.append(f"bench_train.offload=[{variants[1]}]")
    out = tmp_path / "out.json"
    code = cli.main(["train", "--config", CONFIG, *overrides, "--json", str(out)])
    assert code == 0, capfd.readouterr().out
    results = json.loads(out.read_text())
    assert list(results["variants"]) == variants
    losses = []
    for measured in results["variants"].values():
        assert measured["tokens_per_second_per_gpu"] > 0 < measured["peak_bytes"]
        assert 0 < measured["share_of_ceiling"] == measured["model_flops_per_gpu"] / measured["ceiling_flops"]
        assert measured["share_with_attention"] > measured["share_of_ceiling"]
        losses.append([step["loss"] for step in measured["steps"]])
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    offload = results["variants"][variants[1]]["offload"]
    parts = [offload[kind]["bytes"] for kind in ("parameters", "gradients", "optimizer")]
    assert sum(parts) == offload["parameters+gradients+optimizer"]["bytes"]
    assert min(parts) > 0
    for measured in results["variants"].values():
        assert measured["gradient_dtypes"] == ["float32"] and min(measured["state_bytes"].values()) > 0
        assert 0 < measured["step_peak_bytes"] <= measured["peak_bytes"]
    shown = capfd.readouterr().out
    assert all(name in shown for name in variants)


def test_both_wraps_are_compared_where_both_were_measured() -> None:
    ddp, fsdp = (dict.fromkeys(COMPARED, value) for value in (2.0, 3.0))
    assert compare({"ddp": ddp, "megatron_fsdp": fsdp}) == dict.fromkeys(COMPARED, 1.5)
    assert compare({"ddp": ddp, "megatron_fsdp": {"error": "exit code 1"}}) == {} == compare({"ddp": ddp})


def test_a_failing_variant_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    overrides = [*TINY, f"run.dir={tmp_path}", "bench_train.variants=[ddp]", "bench_train.variant_seconds=0.5"]
    assert cli.main(["train", "--config", CONFIG, *overrides]) == 1
    assert "ddp: failed, not done after 0.5 s" in capfd.readouterr().out


def test_a_wrong_key_starts_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["train", "--config", CONFIG, "bench_train.variants=[dpp]", f"run.dir={tmp_path}"])
    assert left.value.code == 2
    assert "ddp" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("shapes", "number", "active"),
    [
        ("3b", 3_085_938_688, 3_085_938_688),  # Qwen2.5-3B: its embeddings are the output layer
        ("7b", 7_615_616_512, 7_615_616_512 - 152064 * 3584),  # Qwen2.5-7B
        ("30b-a3b", 30_532_122_624, 3_353_032_704 - 151936 * 2048),  # Qwen3-30B-A3B
    ],
)
def test_parameters_are_counted_as_published(tmp_path: Path, shapes: str, number: int, active: int) -> None:
    write_config(tmp_path, SHAPES[shapes].hf_config(2048), "bfloat16")
    assert num_parameters(tmp_path) == number
    assert num_active_parameters(tmp_path) == active
    size = SHAPES[shapes].num_attention_heads * 128
    assert attention_flops(tmp_path, 999) == 6 * SHAPES[shapes].num_hidden_layers * size * 1000


def test_variants_are_of_both_wraps() -> None:
    assert {variant.wrap for variant in VARIANTS.values()} == {"ddp", "megatron_fsdp"}
