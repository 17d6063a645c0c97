"""What `rollout.dtype: fp8` refuses, by name and with a remedy, and what it lets through.

python -m pytest tests/megasync/checks/test_fp8_check.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import DELTA_NET_FAMILIES, FAMILIES, GPT_OSS, LATENT_FAMILIES, MOE_FAMILIES
from megasync.checks import fp8
from megasync.checks.check import check_config
from megasync.checks.served_sizes import cache_bytes_per_token
from megasync.checks.settings import check_layout
from megasync.config.errors import ConfigError
from megasync.config.load import load_config
from megasync.models.folder import model_shape
from megasync.tools.plan.replicas import served_item
from megasync.tools.serving.source import find_source
from tests.support.config_files import refusal
from tests.support.tiny_models import SERVED, WITH_VISION, write_tiny_model

RUNS = ("rollout.dtype=fp8", "model.dtype=bfloat16")
MOE_BACKEND = "rollout.engine_arguments.moe_backend"


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["model.dtype=float16"],
        ["engine.lora.rank=4"],
        ["sync.transport=nccl", "sync.log=deltas"],
        ["engine.parallel.tensor=2", "rollout.tensor_parallel=2"],
        ["rollout.max_staleness=2", "rollout.on_update=continue"],
        ["rollout.placement=colocated"],
        ["rollout.engine_arguments={kv_cache_dtype: fp8}"],
    ],
)
def test_a_run_can_start(config: Path, more: list[str]) -> None:
    check_config(load_config(config, [*RUNS, *more]), 2)


@pytest.mark.parametrize(
    ("overrides", "key", "remedy"),
    [
        (["model.dtype=float32"], "model.dtype", "write model.dtype=bfloat16, or rollout.dtype=model"),
        (["engine.lora.rank=4", "engine.lora.sync=adapter"], "engine.lora.sync", "write engine.lora.sync=merged"),
        (["sync.transport=delta"], "sync.transport", "write sync.transport=auto"),
        (["rollout.engine_arguments={moe_backend: cutlass}"], MOE_BACKEND, f"leave {MOE_BACKEND} out"),
        (["run.deterministic=true"], "rollout.dtype", "write rollout.dtype=model, or run.deterministic=false"),
        (["model.exact=true", "model.dtype=float32"], "rollout.dtype", "write rollout.dtype=model, or model.exact=false"),
    ],
)
def test_keys_that_it_excludes(config: Path, overrides: list[str], key: str, remedy: str) -> None:
    found = {part.key: part.remedy for part in refusal(config, *RUNS, *overrides).parts}
    assert found[key] == remedy


@pytest.mark.parametrize("family", [*FAMILIES, *WITH_VISION])
def test_families(tmp_path: Path, config: Path, family: str) -> None:
    folder = write_tiny_model(tmp_path, family, **(SERVED if family in LATENT_FAMILIES else {}))
    given = load_config(config, [*RUNS, f"model.path={folder}"])
    is_out = family in (*LATENT_FAMILIES, *DELTA_NET_FAMILIES, GPT_OSS, *WITH_VISION)
    shape = model_shape(folder)
    assert bool(list(fp8.fp8_errors(given, shape, on_gpus=True))) == is_out
    assert bool(list(fp8.fp8_errors(given, shape, on_gpus=False))) == (is_out or family in MOE_FAMILIES)


@pytest.mark.parametrize(
    ("sizes", "workers", "is_out"),
    [
        ({"hidden_size": 72}, 1, True),
        ({"intermediate_size": 40}, 1, True),
        ({"intermediate_size": 48}, 2, True),
        ({"head_dim": 24, "num_key_value_heads": 1}, 1, True),
        ({"head_dim": 24, "num_key_value_heads": 2}, 1, False),
        ({"hidden_size": 48, "intermediate_size": 80}, 1, False),
    ],
)
def test_sizes_are_multiples(tmp_path: Path, config: Path, sizes: dict[str, int], workers: int, is_out: bool) -> None:
    folder = write_tiny_model(tmp_path, "qwen3", **sizes)
    given = load_config(config, [*RUNS, f"model.path={folder}", f"rollout.tensor_parallel={workers}"])
    assert bool(list(fp8.fp8_errors(given, model_shape(folder), on_gpus=True))) == is_out


def test_gpus_that_have_no_fp8(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = load_config(config, [*RUNS])
    for found in ([9.0, 8.9], []):
        monkeypatch.setattr(fp8, "compute_capabilities", lambda found=found: found)
        fp8.check_capability(given)
    monkeypatch.setattr(fp8, "compute_capabilities", lambda: [9.0, 8.0])
    with pytest.raises(ConfigError, match=r"^rollout\.dtype = fp8"):
        fp8.check_capability(given)
    fp8.check_capability(load_config(config, []))
    check_layout(given, model_shape(given.model.path), 2, on_gpus=True)  # as a plan for other GPUs does


def test_a_plan_counts_a_byte_for_most_numbers(tmp_path: Path, config: Path) -> None:
    folder = write_tiny_model(tmp_path, "qwen3_moe", vocab_size=128, dtype=torch.bfloat16)
    given = load_config(config, [*RUNS, f"model.path={folder}"])
    shape, size = model_shape(folder), (folder / "model.safetensors").stat().st_size
    num_parameters = size // 2
    outside = 2 * 128 * 128 + 2 * 4 * 128  # embeddings, head and routers
    assert served_item(load_config(config, []), shape, num_parameters) == 2
    served = served_item(given, shape, num_parameters)
    assert 1 + outside / num_parameters < served < 1.1 * (1 + outside / num_parameters)
    cached = load_config(config, [*RUNS, "rollout.engine_arguments={kv_cache_dtype: fp8}"])
    assert 2 * cache_bytes_per_token(cached, shape) == cache_bytes_per_token(given, shape)


def test_commands_serve_the_weights_themselves(tmp_path: Path, config: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "qwen3")
    assert find_source(folder, tmp_path, None, ["rollout.dtype=fp8"]).config.rollout.dtype == "model"
