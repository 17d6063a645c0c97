"""The benches: all methods of a sync leave the trainer's weights in vLLM, and its memory figures are those of the kernel.

Nothing here looks at how long anything took.

    python -m pytest tests/megasync/bench/test_bench.py
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from bridge.layout.manifest import read_folder_manifest
from megasync.bench.cli import main
from megasync.bench.config import METHODS, NEED_GPUS, BenchRoot
from megasync.hf.shapes import SHAPES
from megasync.bench.generation.requests import long_tail
from megasync.bench.common.memory import PeakMeter, give_back_free_memory, mapped_bytes, status_bytes
from megasync.bench.common.model import write_shapes
from megasync.bench.training.flops import num_parameters
from megasync.bench.sync.picture import check_picture, draw_sync
from megasync.bench.generation.staleness import ROWS
from megasync.bench.generation.report import show_rollout, show_staleness, summarise_rollout, summarise_staleness
from megasync.bench.prepare import prepare
from megasync.bench.sync import report as sync_report
from megasync.config.load import load_config
from megasync.hf.folder import check_model_folder
from tests.support.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[3]
POSSIBLE = [name for name in METHODS if name not in NEED_GPUS]
CONFIG = str(ROOT / "configs" / "bench_cpu.yaml")
MIB = 2**20
TINY = ("hidden_size=64", "intermediate_size=128", "num_layers=2", "num_heads=4", "num_kv_heads=2", "head_dim=32")


def small(folder: Path) -> list[str]:
    sizes = [f"bench.{size}" for size in (*TINY, "vocabulary_size=256", "rounds=1", "lora_rank=4", "num_prompts=6")]
    return [CONFIG, f"run.dir={json.dumps(str(folder))}", "sync.bucket_bytes=20000", *sizes]


def command_of(verb: str, folder: Path) -> list[str]:
    """It writes its results to a file there."""
    config, *overrides = small(folder)
    return [sys.executable, "-m", "megasync.bench", verb, "--config", config, *overrides, "--json", str(folder / "results.json")]


def run(verb: str, folder: Path, *more: str) -> tuple[dict, str]:
    """The command's JSON and what it printed."""
    command, own = [*command_of(verb, folder), *more], {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=False, timeout=840)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return dict(json.loads((folder / "results.json").read_text())), done.stdout


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """One run of `bench sync`, weights split over two ranks."""
    overrides = ("engine.parallel.tensor=2", "bench.methods=[all,floor,unverified]")
    folder = tmp_path_factory.mktemp("a bench")
    results, printed = run("sync", folder, *overrides, "--picture", str(folder / "sync.svg"))
    assert "0.00 B parameters" in (folder / "sync.svg").read_text()
    assert "disk_times_ours: " in printed
    assert "lora_adapter_bytes: " in printed
    return results


def test_all_methods_end_with_the_trainer_s_weights(results: dict) -> None:
    assert [m["method"] for m in results["warm_up"]] == POSSIBLE
    assert [m["method"] for m in results["rounds"]] == POSSIBLE
    assert all(m["same_weights"] for m in [*results["warm_up"], *results["rounds"]] if m["method"] != "floor")


def test_results_say_what_was_measured(results: dict) -> None:
    assert {"torch", "mbridge", "ray", "megatron-core", "python"} <= results["versions"].keys()
    assert results["is_complete"]
    assert results["config"]["bench"]["hidden_size"] == 64
    model, summary = results["model"], results["summary"]
    assert model["largest_tensor"] == {"name": "model.embed_tokens.weight", "bytes": 256 * 64 * 4}
    assert model["bytes"] == 4 * model["parameters"]
    assert list(summary) == POSSIBLE
    assert summary["stream"]["times_ours"] == 1
    assert summary["stream"]["bytes"] == summary["per_tensor"]["bytes"] == model["bytes"]
    assert summary["per_tensor"]["messages"] == model["tensors"]
    assert summary["disk"]["bytes"] > model["bytes"]
    stages = results["stage_seconds_median"]
    assert stages.keys() == {"stream", "unverified", "lora merged", "lora adapter"}
    assert all({"pause", "gather", "pack", "wait", "load", "commit"} <= part.keys() for part in stages.values())
    processes = results["rounds"][0]["extra_bytes"]
    assert {"trainer rank 0", "trainer rank 1", "vLLM actor", "vLLM worker 0"} <= processes.keys()
    assert results["targets"]["stream_extra_bytes"]["at_most"] == 2 * 20000 + model["largest_tensor"]["bytes"]


def test_the_same_results_give_the_same_picture(results: dict, tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.svg" for name in "ab"]
    for file in files:
        draw_sync([results, results], file)
    drawn = files[0].read_text()
    assert drawn == files[1].read_text()
    assert all(f"<!-- {name} -->" in drawn for name in POSSIBLE)


@pytest.mark.parametrize(("verb", "name", "words"), [("train", "a.svg", "bench sync"), ("sync", "a.gif", ".png")])
def test_pictures_that_cannot_be(verb: str, name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_picture(verb, Path(name))


def test_a_picture_that_nothing_can_draw_is_refused_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        check_picture("sync", Path("a.svg"))


def test_lora_rows_count_what_is_sent(results: dict) -> None:
    """Once what training trains: 2 layers, rank 4, an A and a B beside each of megatron-core's linears."""
    linears = ((64, 256), (128, 64), (64, 2 * 128), (128, 64))  # qkv, proj, fc1, fc2
    trained = 2 * 4 * sum(inputs + outputs for inputs, outputs in linears) * 4
    assert results["adapter"] == {"bytes": trained, "bytes_sent": trained}
    assert results["summary"]["lora adapter"]["bytes"] == trained
    assert results["summary"]["lora merged"]["bytes"] == results["model"]["bytes"]
    assert results["targets"]["lora_adapter_bytes"] == {"is": trained, "at_most": int(1.01 * trained)}
    assert results["targets"]["lora_merged_times_stream"]["at_most"] == 1.25
    assert results["targets"]["stream_times_lora_adapter"]["at_least"] == 10


def test_rollout_compares_both_methods_to_serve_lora_and_rounds_before_a_kill_are_kept(tmp_path: Path) -> None:
    command = [*command_of("rollout", tmp_path), "bench.num_ranks=1", "bench.rounds=100000"]
    with (tmp_path / "told").open("w+") as told:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=told, text=True)
        assert process.stdout is not None
        try:
            printed = "".join(itertools.takewhile(lambda line: not line.startswith("round 3 of"), process.stdout))
        finally:
            process.terminate()
            try:
                printed += process.communicate(timeout=120)[0]
            except subprocess.TimeoutExpired:
                process.kill()  # what it started ends with it
                raise
        told.seek(0)
        errors = told.read()
    assert process.returncode == 1, errors[-3000:]
    assert "generation, medians" in printed
    assert "cut off" in errors
    results = json.loads((tmp_path / "results.json").read_text())
    assert not results["is_complete"]
    assert results["same_weights"] == {"merged": True, "adapter": True}
    assert results["same_tokens"] >= 0.5  # fp32 sums in another order may part a sequence from its twin
    assert results["summary"].keys() == {"merged", "adapter"}
    assert [measured["tokens"] for measured in results["rounds"]][:4] == [6 * 32] * 4
    speeds = [results["summary"][name]["tokens_per_second_median"] for name in ("adapter", "merged")]
    assert results["adapter_times_merged"] == speeds[0] / speeds[1]


@given(st.integers(1, 400), st.integers(1, 50), st.integers(0, 400))
def test_lengths_have_their_median_and_a_long_tail(number: int, median: int, more: int) -> None:
    longest = median + more
    lengths = long_tail(number, median, longest, 0)
    assert len(lengths) == number and min(lengths) >= 1 and max(lengths) == (longest if number > 1 else median)
    assert abs(statistics.median(lengths) - median) <= 1 or number % 2 == 0
    assert sorted(lengths) == sorted(long_tail(number, median, longest, 1))


def test_a_replica_beside_vllm_is_compared_round_by_round(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {"replica": (2.0, 8.0, 5.0), "vllm": (2.2, 8.0, 4.0)}
    spent = {"asks": 1.0, "computes": 2.0}
    rounds = [
        {"round": number, "method": name, "seconds": taken[number], "tokens": 100, "samples": 10, "cpu_seconds": spent}
        for number in range(3)
        for name, taken in seconds.items()
    ]
    results = {"rounds": rounds, "same_tokens": 1.0, "config": BenchRoot().model_dump()}
    results |= summarise_rollout(results)
    assert results["targets"]["replica_times_vllm"] == {"is": 1.0, "at_least": 0.95}
    assert results["summary"]["replica"]["samples_per_second_median"] == 2.0
    show_rollout(results)
    assert "replica_times_vllm: 1; aimed at: at least 0.95" in capsys.readouterr().out


def test_staleness_is_compared_with_none(capsys: pytest.CaptureFixture[str]) -> None:
    others = {"wait_seconds": 1.0, "pause_seconds": 0.5, "staleness_mean": 0.4, "staleness_max": 4}
    rounds = [
        {"round": 0, "max_staleness": staleness, "on_update": on_update, "seconds": 10.0 - staleness, **others}
        for staleness, on_update in ROWS
    ]
    lengths = {"median": 24.0, "mean": 33.0, "most": 192}
    results = {"rounds": rounds, "cores": {"trainer": [1]}, "lengths": lengths, "config": BenchRoot().model_dump()}
    results |= summarise_staleness(results)
    assert results["targets"]["staleness_4_continue"] == {"is": 0.6, "at_most": 0.75}
    show_staleness(results)
    assert "staleness_4_continue: 0.6; aimed at: at most 0.75" in capsys.readouterr().out


def test_no_process_and_no_shared_memory_is_left(results: dict) -> None:
    left = subprocess.run(["pgrep", "-f", "megasync.bench.worke[r]"], capture_output=True, text=True, check=False)
    assert left.stdout == ""
    assert not list(Path("/dev/shm").glob("megasync-bench-*"))


def test_summary_takes_medians_and_the_highest_peaks() -> None:
    """Without LoRA, and as under Megatron-FSDP, whose weights mbridge does not export."""

    def measured(method: str, seconds: float, peak: int) -> dict:
        extra = {"seconds": seconds, "messages": 1, "bytes": 10, "extra_bytes": {"rank 0": peak, "worker": 1}}
        return {"method": method, **extra, "stages": {"pack": seconds / 2}}

    rounds = [measured("stream", s, p) for s, p in ((1.0, 5), (2.0, 7), (9.0, 6))]
    rounds += [measured("disk", s, 1) for s in (4.0, 8.0, 40.0)]
    model = {"parameters": 1, "tensors": 1, "bytes": 4, "largest_tensor": {"name": "w", "bytes": 4}}
    results = {"rounds": rounds, "model": model, "bucket_bytes": 3}
    summary = sync_report.summarise(results)
    assert summary["summary"]["disk"]["times_ours"] == 4
    assert summary["stage_seconds_median"] == {"stream": {"pack": 1.0}}
    assert summary["targets"]["stream_extra_bytes"] == {"is": 7, "at_most": 10}
    assert summary["targets"].keys() == {"disk_times_ours", "stream_extra_bytes"}
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


def test_peaks_are_those_of_the_kernel(tmp_path: Path) -> None:
    shared = Path("/dev/shm") / f"megasync-test-{os.getpid()}"
    try:
        kept = torch.from_file(str(shared), shared=True, size=8 * MIB, dtype=torch.uint8).fill_(1)
        assert mapped_bytes(os.getpid(), str(shared)) == 8 * MIB
        give_back_free_memory()
        meter = PeakMeter({"self": os.getpid()}, kept=str(shared))
        meter.start()
        assert 8 * MIB <= meter.extra_bytes()["self"] < 32 * MIB  # the interpreter takes some itself
        taken = torch.ones(50 * MIB, dtype=torch.uint8)
        del taken
        assert 58 * MIB <= meter.extra_bytes()["self"] < 82 * MIB
        assert status_bytes(os.getpid())["VmRSS"] > 8 * MIB
        del kept
    finally:
        shared.unlink(missing_ok=True)


@pytest.mark.parametrize("shapes", ["tiny", "tiny-moe"])
def test_written_shapes_are_those_of_a_folder(tmp_path: Path, shapes: str) -> None:
    """Names, shapes and sizes are transformers' own, expert by expert; `num_parameters` counts them."""
    write_shapes(tmp_path / "sparse", shapes, "float32", 64)
    config = AutoConfig.from_pretrained(tmp_path / "sparse")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "whole")
    sparse, whole = (read_folder_manifest(tmp_path / name) for name in ("sparse", "whole"))
    assert sorted(sparse.tensors, key=str) == sorted(whole.tensors, key=str)
    assert sparse.total_bytes == 4 * num_parameters(SHAPES[shapes])
    shape = check_model_folder(tmp_path / "sparse")
    assert shape.num_experts == SHAPES[shapes].num_experts


def test_experts_without_an_optimizer_change_and_are_exported(tmp_path: Path) -> None:
    write_shapes(tmp_path, "tiny-moe", "float32", 64)
    result = run_ranks(1, "tests.engine.engine_cases:negated_export", {"path": str(tmp_path)})[0]
    assert result["negated"] == result["names"] == sorted(read_folder_manifest(tmp_path).by_name)
    assert result["state_bytes"] == 0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("bench.shapes=tiny-moe", "allowed: 0 to 0"),
        ("bench.rouns=2", "bench.rounds"),
        ("bench.rounds=0", "at least 1"),
        ("bench.num_kv_heads=3", "not a multiple"),
        ("bench.lora_rank=65", "0 to 64"),
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
        ("rollout bench.median_tokens=33 bench.lora_rank=0", "longer than rollout.max_new_tokens = 32"),
        ("rollout bench.prompt_tokens=33", "rollout.max_model_len=65"),
        ("staleness bench.lora_rank=0", "bench staleness trains by grpo"),
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
    assert (config.bench.shapes, config.model.path) == ("none", str(tmp_path / "model"))


def test_the_config_is_of_about_100_m_parameters() -> None:
    sizes = load_config(CONFIG, root=BenchRoot).bench
    attention = sizes.hidden_size * sizes.head_dim * (2 * sizes.num_heads + 2 * sizes.num_kv_heads)
    layer = attention + 3 * sizes.hidden_size * sizes.intermediate_size
    assert 95e6 < sizes.num_layers * layer + sizes.vocabulary_size * sizes.hidden_size < 105e6
