"""What a plan says of vLLM's workers on GPUs, beside measured runs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasync.config.load import with_changes
from megasync.config.schema import Config
from megasync.hf.model_shape import SHAPES, ModelShape
from megasync.planning.hardware import GIB, hardware, num_bytes
from megasync.planning.make import make_plan
from megasync.planning.record import outcome
from megasync.planning.replicas import TRAINING_DEVICE, WORKER_DEVICE, worker_memory
from megasync.planning.shapes import Request

from tests.megasync.planning.test_plan_command import config_of

BENCH = Path(__file__).resolve().parents[3] / "docs" / "bench"
MEASURED = sorted((BENCH / "plan_workers").glob("*.json"))
SHAPE = ModelShape("qwen2", 36, 16, 2, 151936, 11008, 2048)
NUM_PARAMETERS = 3_085_938_688


def plan_workers() -> Any:
    spec = importlib.util.spec_from_file_location("plan_workers", BENCH / "plan_workers.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", MEASURED, ids=[path.stem for path in MEASURED])
def test_what_gpus_had_taken_is_planned(path: Path, tmp_path: Path) -> None:
    """Trainer and worker, each within a tenth, of all kinds of runs."""
    rows = plan_workers().rows_of(path, tmp_path / "model")
    sizes = {row["what"]: row["planned"] / row["measured"] for row in rows if "device" in row["what"]}
    assert WORKER_DEVICE in sizes
    stale = json.loads(path.read_text(encoding="utf-8"))["config"]["rollout"]["max_staleness"]
    assert ("rollout/seconds" in {row["what"] for row in rows}) == (not stale), "else a batch's generation has waits in it"
    for what, ratio in sizes.items():
        assert 0.9 < ratio < 1.1, (what, ratio)


def replica(**rollout: Any) -> Config:
    return with_changes(Config(), {"model.dtype": "bfloat16", **{f"rollout.{key}": value for key, value in rollout.items()}})


@given(share=st.floats(0.2, 0.95), workers=st.sampled_from((1, 2)), is_eager=st.booleans())
def test_a_share_of_the_gpu_bounds_what_is_in_it(share: float, workers: int, is_eager: bool) -> None:
    """What vLLM counts is the share; outside of it are what was there before, graphs and the sync."""
    config = replica(gpu_memory_utilization=share, tensor_parallel=workers, enforce_eager=is_eager)
    gpu = hardware("h100")
    found = worker_memory(config, SHAPE, NUM_PARAMETERS, gpu)
    within = sum(found.parts[name] for name in ("weights", "KV cache", "sampling state", "working memory", "kernels"))
    assert within == pytest.approx(share * gpu.memory_bytes, rel=1e-6)
    assert found.total - within < 5 * GIB and ("CUDA graphs" in found.parts) != is_eager
    assert 0 < found.asleep < found.total - found.parts["weights"] - found.parts["KV cache"]


def test_a_given_cache_is_what_it_says_and_more_workers_take_less() -> None:
    gpu = hardware("h200")
    one, two = (worker_memory(replica(kv_cache_bytes=GIB, tensor_parallel=n), SHAPE, NUM_PARAMETERS, gpu) for n in (1, 2))
    assert one.parts["KV cache"] == two.parts["KV cache"] == GIB and two.cache_tokens == 2 * one.cache_tokens
    assert one.parts["weights"] == 2 * two.parts["weights"] and one.parts["sampling state"] == two.parts["sampling state"]
    few = worker_memory(replica(kv_cache_bytes=GIB, max_num_seqs=32), SHAPE, NUM_PARAMETERS, gpu)
    assert few.parts["working memory"] < one.parts["working memory"]
    assert "sync buckets" in one.parts


def test_devices_are_predicted_by_who_shares_them(tmp_path: Path) -> None:
    config = config_of(tmp_path, rollout={"max_new_tokens": 512, "max_model_len": 1024, "kv_cache_bytes": "4GiB"})
    shared = with_changes(config, {"rollout.placement": "colocated"})
    apart, together = (make_plan(each, Request(1, hardware("h200"), 128.0)) for each in (config, shared))
    first, worker = apart.stages[0].memory, apart.worker
    predicted = apart.as_dict()["predicted"]
    assert worker is not None and TRAINING_DEVICE not in predicted
    assert (predicted["memory/device_bytes"], predicted[WORKER_DEVICE]) == (first.device, worker.total)
    predicted, worker = together.as_dict()["predicted"], together.worker
    assert worker is not None
    assert predicted[TRAINING_DEVICE] == together.stages[0].memory.device + worker.asleep
    assert predicted["memory/device_bytes"] == predicted[WORKER_DEVICE] > worker.total
    stays = with_changes(shared, {"rollout.offload_trainer": ["optimizer"]})
    more = make_plan(stays, Request(1, hardware("h200"), 128.0)).as_dict()["predicted"]
    assert more[WORKER_DEVICE] - predicted[WORKER_DEVICE] == sum(
        together.stages[0].memory.parts[name] for name in ("weights", "gradients")
    )


def test_what_workers_took_stands_in_the_summary(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"predicted": {WORKER_DEVICE: 3 * GIB, TRAINING_DEVICE: GIB}}))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, TRAINING_DEVICE: 2.0 * GIB}) + "\n")
    found = outcome(tmp_path, {WORKER_DEVICE: 4 * GIB})
    assert found == {f"predicted/actual {WORKER_DEVICE}": 0.75, f"predicted/actual {TRAINING_DEVICE}": 0.5}


def test_a_checkpoint_is_in_host_memory_file_by_file_or_as_a_whole(tmp_path: Path) -> None:
    """Beside what the process has once its model is loaded; of a large model loading takes more."""
    config = config_of(tmp_path, rollout={"max_new_tokens": 512, "max_model_len": 1024}, engine={"wrap": "ddp"})
    request, hosts = Request(1, hardware("h200"), 128.0), []
    for changes in ({}, {"checkpoint.every_steps": 5}, {"checkpoint.every_steps": 5, "checkpoint.asynchronous": True}):
        memory = make_plan(with_changes(config, changes), request).stages[0].memory
        hosts.append(memory.host)
    assert hosts[0] == memory.loading == num_bytes("host_loading_gpu") + memory.parts["weights"]
    assert hosts[1] == max(hosts[0], num_bytes("host_process_gpu") + 2**29 + 2**32)
    assert hosts[2] == num_bytes("host_process_gpu") + memory.parts["weights"] + memory.parts["optimizer"]


def test_sizes_of_the_cases_are_known() -> None:
    assert {json.loads(path.read_text())["shapes"] for path in MEASURED} <= {*SHAPES, "30b-a3b-3"}
