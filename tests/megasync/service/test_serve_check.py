"""Configs that `megasync serve` refuses before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny_models import SERVED, write_tiny_model

from megasync.config.errors import ConfigError
from megasync.config.schema import Config
from megasync.service.command import KEY, check_same, check_service


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("served"), "qwen3", num_hidden_layers=1))


def config(model: str, folder: Path, *, rank: int = 8, **sections: Any) -> Config:
    engine = {"wrap": "ddp", "lora": {"rank": rank}, "tokens_per_microbatch": 256, **sections.pop("engine", {})}
    run = {"dir": str(folder)}
    rollout = {"max_model_len": 128, "max_new_tokens": 32, **sections.pop("rollout", {})}
    given = {"run": run, "model": {"path": model, "dtype": "float32"}, "engine": engine, "rollout": rollout, **sections}
    return Config.model_validate(given, strict=False)


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("engine.wrap", {"engine": {"wrap": "megatron_fsdp"}}),
        ("engine.lora.dropout", {"engine": {"lora": {"rank": 8, "dropout": 0.1}}}),
        ("engine.optimizer.offload", {"engine": {"optimizer": {"offload": True}}}),
        ("service.host", {"service": {"host": "0.0.0.0"}}),
        ("rollout.on_update", {"rollout": {"on_update": "continue"}}),
        ("rollout.placement", {"rollout": {"placement": "colocated"}}),
    ],
)
def test_refused(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, sections: dict[str, Any]) -> None:
    monkeypatch.delenv(KEY, raising=False)
    with pytest.raises(ConfigError, match=rf"^{key} = "):
        check_service(config(model, tmp_path, **sections), 1)
    check_service(config(model, tmp_path), 1)


def test_clients_train_adapters(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^engine\.lora\.rank = 0"):
        check_service(config(model, tmp_path, rank=0), 1)


@pytest.mark.parametrize(("family", "sizes"), [("glm4_moe_lite", SERVED), ("gpt_oss", {}), ("qwen3_moe", {})])
def test_mixtures_of_experts_are_refused(tmp_path: Path, family: str, sizes: dict[str, int]) -> None:
    """Before a rank starts, also with adapters of attention alone."""
    path = str(write_tiny_model(tmp_path / "model", family, num_hidden_layers=2, **sizes))
    given = config(path, tmp_path, engine={"lora": {"rank": 8, "targets": ["linear_proj"]}})
    with pytest.raises(ConfigError, match=rf"^model\.path = .*: {family} is a mixture of experts"):
        check_service(given, 1)


def test_all_parameters_are_trained_on_purpose(model: str, tmp_path: Path) -> None:
    """And without adapters."""
    full = {"service": {"full_parameters": True}}
    check_service(config(model, tmp_path, rank=0, **full), 1)
    with pytest.raises(ConfigError, match=r"^engine\.lora\.rank = 8"):
        check_service(config(model, tmp_path, **full), 1)


def test_a_folder_keeps_its_settings(model: str, tmp_path: Path) -> None:
    """Its log is read and done again by them."""
    check_same(config(model, tmp_path), 1)
    check_same(config(model, tmp_path, service={"max_waiting": 5}), 1)
    with pytest.raises(ConfigError, match=r"^nproc = 2"):
        check_same(config(model, tmp_path), 2)
    with pytest.raises(ConfigError, match=r"^engine\.lora = "):
        check_same(config(model, tmp_path, rank=4), 1)


def test_other_networks_need_a_key(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "tml-mine")
    check_service(config(model, tmp_path, service={"host": "0.0.0.0"}), 1)


def test_gpus_are_refused(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigError, match="2 GPUs are visible"):
        check_service(config(model, tmp_path), 1)
