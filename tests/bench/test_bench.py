"""The benches: all methods of a sync leave the trainer's weights in vLLM, and its memory figures are those of the kernel.

Nothing here looks at how long anything took.

    python -m pytest tests/bench/test_bench.py
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.common.memory import PeakMeter, give_back_free_memory, mapped_bytes, status_bytes
from bridge.layout.manifest import read_folder_manifest
from bench.config import METHODS, NEED_GPUS
from bench.common.model import write_shapes
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.long, pytest.mark.vllm_on_cpu]

MIB = 2**20
ROOT = Path(__file__).resolve().parents[2]
POSSIBLE = [name for name in METHODS if name not in NEED_GPUS]
CONFIG = str(ROOT / "configs" / "bench_cpu.yaml")


def small(folder: Path) -> list[str]:
    sizes = [f"bench.{size}" for size in ("shapes=tiny", "rounds=1", "lora_rank=4", "num_prompts=6")]
    return [CONFIG, f"run.dir={json.dumps(str(folder))}", "sync.bucket_bytes=20000", *sizes]


def command_of(verb: str, folder: Path) -> list[str]:
    """It writes its results to a file there."""
    config, *overrides = small(folder)
    return [sys.executable, "-m", "bench", verb, "--config", config, *overrides, "--json", str(folder / "results.json")]


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
    results, printed = run("sync", folder, *overrides)
    assert "x ours" in printed
    return results


def test_all_methods_end_with_the_trainer_s_weights(results: dict) -> None:
    assert [m["method"] for m in results["warm_up"]] == POSSIBLE
    assert [m["method"] for m in results["rounds"]] == POSSIBLE
    assert all(m["same_weights"] for m in [*results["warm_up"], *results["rounds"]] if m["method"] != "floor")


def test_results_say_what_was_measured(results: dict) -> None:
    assert {"torch", "mbridge", "ray", "megatron-core", "python"} <= results["versions"].keys()
    assert results["is_complete"]
    assert results["config"]["bench"]["rounds"] == 1
    model, summary = results["model"], results["summary"]
    assert model["largest_tensor"] == {"name": "model.embed_tokens.weight", "bytes": 512 * 128 * 4}
    assert model["bytes"] == 4 * model["parameters"]
    assert list(summary) == POSSIBLE
    assert summary["stream"]["times_ours"] == 1
    assert summary["stream"]["bytes"] == summary["per_tensor"]["bytes"] == model["bytes"]
    assert summary["per_tensor"]["messages"] == model["tensors"]
    assert summary["disk"]["bytes"] > model["bytes"]
    processes = results["rounds"][0]["extra_bytes"]
    assert {"trainer rank 0", "trainer rank 1", "vLLM actor", "vLLM worker 0"} <= processes.keys()
    assert processes.keys() == summary["disk"]["extra_bytes_most"].keys()
    stages = results["stage_seconds_median"]
    assert stages.keys() == {"stream", "unverified", "lora merged", "lora adapter"}
    assert all({"pause", "gather", "pack", "wait", "load", "commit"} <= part.keys() for part in stages.values())


def test_lora_rows_count_what_is_sent(results: dict) -> None:
    """Once what training trains: 2 layers, rank 4, an A and a B beside each of megatron-core's linears."""
    linears = ((128, 256), (128, 128), (128, 2 * 256), (256, 128))  # qkv, proj, fc1, fc2
    trained = 2 * 4 * sum(inputs + outputs for inputs, outputs in linears) * 4
    assert results["summary"]["lora adapter"]["bytes"] == trained
    assert results["summary"]["lora merged"]["bytes"] == results["model"]["bytes"]


def test_rollout_compares_both_methods_to_serve_lora_and_rounds_before_a_kill_are_kept(tmp_path: Path) -> None:
    command = [*command_of("rollout", tmp_path), "bench.num_ranks=1", "bench.rounds=100000"]
    with (tmp_path / "reported").open("w+") as reported:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=reported, text=True)
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
        reported.seek(0)
        errors = reported.read()
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


def test_no_process_and_no_shared_memory_is_left(results: dict) -> None:
    left = subprocess.run(["pgrep", "-f", "bench.worke[r]"], capture_output=True, text=True, check=False)
    assert left.stdout == ""
    assert not list(Path("/dev/shm").glob("megasync-bench-*"))


def test_experts_without_an_optimizer_change_and_are_exported(tmp_path: Path) -> None:
    write_shapes(tmp_path, "tiny-moe", "float32", 64)
    result = run_ranks(1, "tests.engine.engine_cases:negated_export", {"path": str(tmp_path)})[0]
    assert result["negated"] == result["names"] == sorted(read_folder_manifest(tmp_path).by_name)
    assert result["state_bytes"] == 0


def test_ranks_of_an_expert_group_draw_the_same_router(tmp_path: Path) -> None:
    write_shapes(tmp_path, "tiny-moe", "float32", 64)
    assert run_ranks(2, "tests.engine.engine_cases:random_experts_over_two_ranks", {"path": str(tmp_path)}) == [True, True]


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
