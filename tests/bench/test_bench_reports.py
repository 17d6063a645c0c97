"""What the benches make of their figures, and which configs they refuse. Starts nothing.

python -m pytest tests/bench/test_bench_reports.py
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from bridge.layout.manifest import read_folder_manifest
from bench.cli import main
from bench.config import BenchRoot
from megasync.models.model_shape import SHAPES
from bench.generation.requests import long_tail
from bench.common.model import write_shapes
from bench.common.results import print_table
from bench.training.flops import num_parameters
from bench.generation.report import show_rollout, summarise_rollout
from bench.prepare import prepare
from bench.sync import report as sync_report
from megasync.config.load import load_config
from megasync.models.folder import check_model_folder

ROOT = Path(__file__).resolve().parents[2]

CONFIG = str(ROOT / "configs" / "bench_cpu.yaml")


def small(folder: Path) -> list[str]:
    sizes = [f"bench.{size}" for size in ("shapes=tiny", "rounds=1", "lora_rank=4", "num_prompts=6")]
    return [CONFIG, f"run.dir={json.dumps(str(folder))}", "sync.bucket_bytes=20000", *sizes]


@given(st.integers(1, 400), st.integers(1, 50), st.integers(0, 400))
def test_lengths_have_their_median_and_a_long_tail(number: int, median: int, more: int) -> None:
    longest = median + more
    lengths = long_tail(number, median, longest, 0)
    assert len(lengths) == number and min(lengths) >= 1 and max(lengths) == (longest if number > 1 else median)
    assert abs(statistics.median(lengths) - median) <= 1 or number % 2 == 0
    assert sorted(lengths) == sorted(long_tail(number, median, longest, 1))


def test_a_replica_beside_vllm_is_compared_round_by_round(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {"replica": (2.0, 8.0, 5.0), "vllm": (2.2, 8.0, 4.0)}
    rounds = [
        {"round": number, "method": name, "seconds": taken[number], "tokens": 100, "samples": 10}
        for number in range(3)
        for name, taken in seconds.items()
    ]
    results = {"rounds": rounds, "same_tokens": 1.0, "config": BenchRoot().model_dump()}
    results |= summarise_rollout(results)
    assert results["replica_times_vllm"] == 1.0
    assert results["summary"]["replica"]["samples_per_second_median"] == 2.0
    show_rollout(results)
    assert "at 1.000 times vLLM's speed" in capsys.readouterr().out


def test_summary_takes_medians_and_the_highest_peaks() -> None:
    """Without LoRA, and as under Megatron-FSDP, whose weights mbridge does not export."""

    def measured(method: str, seconds: float, peak: int) -> dict:
        extra = {"seconds": seconds, "messages": 1, "bytes": 10, "extra_bytes": {"rank 0": peak, "worker": 1}}
        return {"method": method, **extra, "stages": {"pack": seconds / 2}}

    rounds = [measured("stream", seconds, peak) for seconds, peak in ((1.0, 5), (2.0, 7), (9.0, 6))]
    rounds += [measured("disk", seconds, 1) for seconds in (4.0, 8.0, 40.0)]
    model = {"parameters": 1, "tensors": 1, "bytes": 4, "largest_tensor": {"name": "w", "bytes": 4}}
    results = {"rounds": rounds, "model": model, "bucket_bytes": 3}
    summary = sync_report.summarise(results)
    assert summary["summary"]["disk"]["times_ours"] == 4
    assert summary["summary"]["stream"]["extra_bytes_most"] == {"rank 0": 7, "worker": 1}
    assert summary["stage_seconds_median"] == {"stream": {"pack": 1.0}}
    config = {"bench": {"num_ranks": 2, "rounds": 3}, "engine": {"wrap": "megatron_fsdp", "parallel": {"tensor": 1}}}
    sync_report.show({**results, **summary, "config": config})


def test_rollout_summary_takes_medians() -> None:
    seconds = {"merged": (1.0, 2.0, 9.0), "adapter": (4.0, 4.0, 1.0)}
    rounds = [{"method": name, "seconds": s, "tokens": 8, "samples": 2} for name, values in seconds.items() for s in values]
    summary = summarise_rollout({"rounds": rounds})
    assert summary["summary"]["merged"]["tokens_per_second_median"] == 4
    assert summary["adapter_times_merged"] == 0.5
    sizes = {"num_prompts": 1, "prompt_tokens": 1, "lora_rank": 1, "rounds": 3}
    show_rollout({**summary, "same_tokens": 1.0, "config": {"bench": sizes, "rollout": {"max_new_tokens": 8}}})


@pytest.mark.parametrize("shapes", ["tiny", "tiny-moe"])
def test_written_shapes_are_those_of_a_folder(tmp_path: Path, shapes: str) -> None:
    """Names, shapes and sizes are transformers' own, expert by expert; `num_parameters` counts them."""
    write_shapes(tmp_path / "sparse", shapes, "float32", 64)
    config = AutoConfig.from_pretrained(tmp_path / "sparse")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "whole")
    sparse, whole = (read_folder_manifest(tmp_path / name) for name in ("sparse", "whole"))
    assert sorted(sparse.tensors, key=str) == sorted(whole.tensors, key=str)
    assert sparse.total_bytes == 4 * num_parameters(tmp_path / "sparse")
    shape = check_model_folder(tmp_path / "sparse")
    assert shape.num_experts == SHAPES[shapes].num_experts


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("bench.shapes=tiny-moe", "allowed: 0 to 0"),
        ("bench.rouns=2", "bench.rounds"),
        ("bench.rounds=0", "at least 1"),
        ("bench.lora_rank=129", "0 to 128"),
        ("bench.shapes=tiny-moe bench.methods=[stream] bench.lora_rank=65", "0 to 64"),
        ("engine.lora.rank=4", "write bench.lora_rank=4"),
        ("engine.parallel.tensor=3", "does not divide 2 ranks"),
        ("run.dir=/proc/nowhere", "cannot be written"),
        ("bench.methods=[pakced]", "packed"),
        ("bench.methods=[packed]", "['packed']: needs GPUs"),
        ("bench.update=negate engine.wrap=megatron_fsdp", "write bench.update=step"),
    ],
)
def test_a_wrong_config_starts_nothing(override: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, *overrides = small(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["sync", "--config", config, *overrides, *override.split()])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert words in error
    assert "remedy" in error


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout bench.shapes=tiny-moe", "write bench.lora_rank=0"),
        ("rollout rollout.dtype=fp8 model.dtype=bfloat16 bench.lora_rank=0", "write rollout.dtype=model"),
        ("rollout bench.median_tokens=33 bench.lora_rank=0", "longer than rollout.max_new_tokens = 32"),
        ("rollout bench.prompt_tokens=33", "rollout.max_model_len=65"),
    ],
)
def test_a_rollout_that_cannot_be_starts_nothing(
    override: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, *overrides = small(tmp_path)
    verb, *others = override.split()
    with pytest.raises(SystemExit) as stop:
        main([verb, "--config", config, *overrides, *others])
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_a_model_of_ones_own_keeps_its_weights(tmp_path: Path) -> None:
    """`bench.shapes` is for models without any."""
    write_shapes(tmp_path / "model", "tiny", "float32", 64)
    overrides = [f"run.dir={tmp_path}", f"model.path={tmp_path / 'model'}", "bench.shapes=3b", "bench.lora_rank=0"]
    config = prepare(load_config(CONFIG, overrides, BenchRoot), "rollout")
    assert (config.bench.shapes, config.model.path) == (None, str(tmp_path / "model"))


def test_experts_are_measured_with_adapters_merged(tmp_path: Path) -> None:
    """vLLM would not serve theirs."""
    config, *overrides = small(tmp_path)
    merged = ["bench.shapes=tiny-moe", "bench.methods=[lora merged]"]
    assert prepare(load_config(config, [*overrides, *merged], BenchRoot), "sync").bench.lora_rank == 4


def test_a_model_folder_that_is_not_there_is_refused() -> None:
    config = load_config(ROOT / "configs" / "bench_train.yaml", ["model.path=/not/there"], BenchRoot)
    with pytest.raises(ValueError, match=r"model\.path = /not/there: there is no such folder"):
        prepare(config, "train")


def test_tables_are_not_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    """In a file or a pipe each row is a line, however wide."""
    words = [f"{number}-{'wide' * 30}" for number in range(5)]
    print_table("of wide cells", words, [words])
    lines = capsys.readouterr().out.splitlines()
    assert len({len(line) for line in lines[1:]}) == 1 and "…" not in "".join(lines)
    assert sum(all(word in line for word in words) for line in lines) == 2
