"""Whole runs on GPUs by the commands that users type: Megatron's weights reach vLLM over NCCL, or CUDA IPC where GPUs are shared.

After every sync what the replica holds is read back and compared with what was sent (`sync.verify=readback`). The log-probs tell
that this is what was trained: one step moves them by far more than bfloat16 rounds.

    python -m pytest -m gpu tests/runs/test_gpu_runs.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megasync.report.log import TRAINING_DEVICE, WORKER_DEVICE

from tests.support.tiny_models import write_tiny_model
from tests.runs.train_cases import ROOT, launch, metrics, write_config

ROLLOUT = {"enforce_eager": True, "gpu_memory_utilization": 0.3}
STEPS = 4
# of the log-probs that trainer and vLLM give the same tokens; weights one step old are 0.2 to 0.5 apart at this learning rate
LARGEST_MEAN_GAP = 0.1
LARGEST_FP8_GAP = 0.6  # 0.25 to 0.36 of such models; of weights of another seed 1 to 2


def train(folder: Path, ranks: int, wrap: str, **rollout: object) -> tuple[list[dict[str, float]], set[str]]:
    """A finished run's metrics and the names of the spans in its timeline."""
    config = write_config(
        folder,
        run={"steps": STEPS},
        model={"dtype": "bfloat16"},
        engine={"wrap": wrap, "fusions": "none", "optimizer": {"learning_rate": 3e-3}},
        rollout=ROLLOUT | rollout,
        sync={"verify": "readback", "bucket_bytes": "1MiB"},
        checkpoint={"every_steps": 0},
    )
    done = launch(config, ranks=ranks, timeout_seconds=600)
    assert done.returncode == 0, done.stdout + done.stderr
    run = folder / "runs" / "run"
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["num_syncs"] == STEPS + 1
    assert summary[WORKER_DEVICE] > 0
    assert all(line["memory/device_bytes"] > 0 for line in metrics(run))
    assert rollout["placement"] != "colocated" or all(line[TRAINING_DEVICE] > 0 for line in metrics(run))
    return metrics(run), {event["name"] for event in events if event["ph"] == "X"}


def check(lines: list[dict[str, float]], largest_gap: float = LARGEST_MEAN_GAP) -> None:
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[0]["grad_norm"] > 0
    for line in lines:
        assert line["sync/verified"] == 1 and line["staleness/max"] == 0
        assert line["grad_norm"] > 0 or line["reward/std"] == 0, line  # equal rewards leave nothing to learn from
        assert line["logprob_gap/mean"] < largest_gap, line


@pytest.mark.gpu(2)
@pytest.mark.parametrize("wrap", ["ddp", "megatron_fsdp"])
def test_weights_reach_a_replica_on_another_gpu_over_nccl(tmp_path: Path, wrap: str) -> None:
    lines, spans = train(tmp_path, 1, wrap, placement="separate")
    check(lines)
    assert "readback" in spans and not {"sleep", "offload"} & spans


@pytest.mark.gpu
@pytest.mark.parametrize("wrap", ["ddp", "megatron_fsdp"])
def test_weights_reach_a_replica_on_the_same_gpu_which_sleeps_while_the_trainer_works(tmp_path: Path, wrap: str) -> None:
    lines, spans = train(tmp_path, 1, wrap, placement="colocated")
    check(lines)
    assert {"readback", "sleep", "offload"} <= spans


@pytest.mark.gpu
def test_a_draft_model_keeps_its_weights_while_replicas_sleep(tmp_path: Path) -> None:
    """It is what the model is, which hardly changes: as many drafts are accepted after each sleep as at first."""
    config = write_config(
        tmp_path,
        run={"steps": STEPS},
        model={"dtype": "bfloat16"},
        engine={"wrap": "ddp", "fusions": "none", "optimizer": {"learning_rate": 1e-8}},
        rollout=ROLLOUT | {"placement": "colocated", "temperature": 0.1, "max_new_tokens": 16},
        sync={"verify": "readback", "bucket_bytes": "1MiB"},
        checkpoint={"every_steps": 0},
    )
    draft = f"{{method: draft_model, num_tokens: 3, path: {tmp_path}/assets/model}}"
    done = launch(config, f"rollout.speculation={draft}", ranks=1, timeout_seconds=600)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = metrics(tmp_path / "runs" / "run")
    for line in lines:  # at this temperature rewards are equal, and leave nothing to learn from; gaps are those of logits over it
        assert line["sync/verified"] == 1 and line["logprob_gap/mean"] < 5 * LARGEST_MEAN_GAP, line
    lengths = [line["rollout/accepted_length"] for line in lines]
    assert min(lengths) > 2.5 and min(lengths) > 0.8 * max(lengths), lengths


@pytest.mark.gpu(2)
def test_each_of_two_ranks_shares_its_gpu_with_a_replica(tmp_path: Path) -> None:
    lines, _ = train(tmp_path, 2, "megatron_fsdp", placement="colocated", replicas=2)
    check(lines)


@pytest.mark.gpu(2)
def test_tokens_go_through_the_experts_that_vllm_tells(tmp_path: Path) -> None:
    """Experts over two ranks that share their GPUs with replicas; the gap is at most that of the trainer's own choice."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 3}
    model = write_tiny_model(tmp_path / "model", "qwen3_moe", dtype=torch.bfloat16, **sizes)
    config = write_config(
        tmp_path,
        run={"steps": STEPS},
        model={"path": str(model), "dtype": "bfloat16"},
        engine={"wrap": "ddp", "parallel": {"expert": 2}},
        algorithm={"router_replay": "rollout", "log_router_gap": True},
        rollout=ROLLOUT | {"placement": "colocated", "replicas": 2},
        checkpoint={"every_steps": 0},
    )
    done = launch(config, timeout_seconds=600)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in metrics(tmp_path / "runs" / "run"):
        print({name: value for name, value in line.items() if "gap" in name or "replay" in name})
        assert line["router_replay/moved_fraction"] < 0.1
        assert line["logprob_gap/mean"] < 1.1 * line["logprob_gap/own_experts_mean"]


@pytest.mark.gpu(2)
def test_a_ray_of_our_own_gives_actors_the_gpus_behind_the_trainers() -> None:
    """In a process of its own, whose CUDA_VISIBLE_DEVICES stays what it was."""
    program = """
import os, ray
from megasync.launch.devices import devices_for_ray, visible_devices
from megasync.launch.ray_cluster import start_ray
stop = start_ray("local", devices_for_ray(visible_devices(), 1, is_colocated=False))
see = ray.remote(num_gpus=1)(lambda: os.environ["CUDA_VISIBLE_DEVICES"])
print("sees", ray.get(see.remote()), "stays", os.environ["CUDA_VISIBLE_DEVICES"])
stop()
"""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(visible)}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert f"sees {visible[1]} stays {','.join(visible)}" in done.stdout, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_fp8_replicas_hold_what_a_plain_quantiser_makes_and_sleep_between_steps(tmp_path: Path, family: str) -> None:
    sizes = {"hidden_size": 256, "head_dim": 64, "num_experts": 8, "moe_intermediate_size": 128}
    model = write_tiny_model(tmp_path / "model", family, dtype=torch.bfloat16, **sizes)
    config = write_config(
        tmp_path,
        run={"steps": STEPS},
        model={"path": str(model), "dtype": "bfloat16"},
        engine={"optimizer": {"learning_rate": 1e-3}},
        rollout=ROLLOUT | {"dtype": "fp8", "placement": "colocated", "max_new_tokens": 24},
        sync={"verify": "readback", "bucket_bytes": "1MiB"},
        checkpoint={"every_steps": 0},
    )
    done = launch(config, ranks=1, timeout_seconds=600)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = metrics(tmp_path / "runs" / "run")
    check(lines, LARGEST_FP8_GAP)
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    assert lines[0]["sync/bytes"] < 0.7 * weights
