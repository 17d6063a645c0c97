"""Configs that `megasync serve` refuses before anything starts."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.gpus import pretend_gpus
from tests.support.tiny_models import SERVED, write_tiny_model

from megasync.config.errors import ConfigError
from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.launch.num_ranks import default_num_ranks
from megasync.service.command import KEY, check_port, check_same, check_service, main
from megasync.service.journal import LOG_FILE


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
        ("engine.lora.dropout", {"engine": {"lora": {"rank": 8, "dropout": 0.1}}}),
        ("engine.optimizer.offload", {"engine": {"optimizer": {"offload": True}}}),
        ("service.host", {"service": {"host": "0.0.0.0"}}),
        ("rollout.on_update", {"rollout": {"on_update": "continue"}}),
        ("rollout.offload_trainer", {"rollout": {"placement": "colocated", "offload_trainer": ("optimizer",)}}),
        ("rollout.engine_arguments.foo", {"rollout": {"engine_arguments": {"foo": 1}}}),
        ("engine.kernels", {"engine": {"kernels": "te"}}),
        ("algorithm.name", {"algorithm": {"name": "sft"}}),
        ("algorithm.credit", {"algorithm": {"credit": "turn"}}),
        ("algorithm.credit", {"algorithm": {"credit": "turn"}, "rollout": {"episode": "a:b"}}),
        ("teacher.version", {"teacher": {"version": "start"}}),
        ("teacher.endpoint", {"teacher": {"endpoint": "http://host:8000/v1"}}),
    ],
)
def test_refused(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, sections: dict[str, Any]) -> None:
    monkeypatch.delenv(KEY, raising=False)
    with pytest.raises(ConfigError, match=rf"^{key} = "):
        check_service(config(model, tmp_path, **sections), 1)
    check_service(config(model, tmp_path), 1)


@pytest.mark.parametrize("wrap", ["ddp", "megatron_fsdp"])
def test_either_wrap(model: str, tmp_path: Path, wrap: str) -> None:
    check_service(config(model, tmp_path, engine={"wrap": wrap}), 2)


def test_one_gpu_for_trainer_and_replica(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a file, whose keys have values once it is loaded, whether they are written or not."""
    pretend_gpus(monkeypatch, tmp_path, 1)
    file = tmp_path / "serve.yaml"
    given = config(model, tmp_path, rollout={"placement": "colocated"}).model_dump(mode="json", exclude_defaults=True)
    file.write_text(yaml.safe_dump(given))
    check_service(load_config(str(file)), 1)
    with pytest.raises(ConfigError, match=r"^rollout\.offload_trainer = optimizer"):
        check_service(load_config(str(file), ["rollout.offload_trainer=[optimizer]"]), 1)


def test_clients_train_adapters(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^engine\.lora\.rank = 0"):
        check_service(config(model, tmp_path, rank=0), 1)


@pytest.mark.parametrize("family", ["glm4_moe_lite", "qwen3_moe"])
def test_mixtures_of_experts(tmp_path: Path, family: str) -> None:
    path = str(write_tiny_model(tmp_path / "model", family, num_hidden_layers=2, **(SERVED if family == "glm4_moe_lite" else {})))
    targets = ["linear_proj", "linear_fc1", "linear_fc2"]
    check_service(config(path, tmp_path, engine={"lora": {"rank": 8, "targets": targets}}), 1)
    check_service(config(path, tmp_path, rank=0, service={"full_parameters": True}), 1)


def test_all_parameters_are_trained_on_purpose(model: str, tmp_path: Path) -> None:
    """And without adapters."""
    full = {"service": {"full_parameters": True}}
    check_service(config(model, tmp_path, rank=0, **full), 1)
    with pytest.raises(ConfigError, match=r"^engine\.lora\.rank = 8"):
        check_service(config(model, tmp_path, **full), 1)


def test_a_folder_keeps_its_settings(model: str, tmp_path: Path) -> None:
    """Its log is read and done again by them; while that is empty they may change."""
    check_same(config(model, tmp_path, rank=4), 2)
    check_same(config(model, tmp_path), 1)
    log = config(model, tmp_path).run.folder / "service" / LOG_FILE
    log.write_text("{}\n")
    check_same(config(model, tmp_path, service={"max_waiting": 5}), 1)
    with pytest.raises(ConfigError, match=r"^nproc = 2"):
        check_same(config(model, tmp_path), 2)
    with pytest.raises(ConfigError, match=r"^engine\.lora\.rank = 4"):
        check_same(config(model, tmp_path, rank=4), 1)
    with pytest.raises(ConfigError, match=r"^engine\.wrap = megatron_fsdp"):
        check_same(config(model, tmp_path, engine={"wrap": "megatron_fsdp"}), 1)
    with pytest.raises(ConfigError, match=r"^engine\.overrides = {'bucket_size': 100}"):
        check_same(config(model, tmp_path, engine={"overrides": {"bucket_size": 100}}), 1)
    check_same(config(model, tmp_path, engine={"lora": {"rank": 8, "sync": "adapter"}}), 1)


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_settings_of_a_folder_that_cannot_be_read(model: str, tmp_path: Path, text: str) -> None:
    given = config(model, tmp_path)
    check_same(given, 1)
    file = given.run.folder / "service" / "settings.json"
    file.write_text(text)
    (file.parent / LOG_FILE).write_text("{}\n")
    with pytest.raises(ConfigError) as caught:
        check_same(given, 1)
    assert caught.value.headline.startswith(f"{file}: ") and "run.name" in caught.value.remedy


def test_remedies_for_other_settings_can_be_written(model: str, tmp_path: Path) -> None:
    check_same(config(model, tmp_path), 1)
    (config(model, tmp_path).run.folder / "service" / LOG_FILE).write_text("{}\n")
    found: dict[str, str] = {}
    for given, num_ranks in ((config(model, tmp_path), 2), (config(model, tmp_path, rank=4), 1)):
        with pytest.raises(ConfigError) as caught:
            check_same(given, num_ranks)
        found[caught.value.key] = caught.value.remedy.partition(",")[0]
    assert found == {"nproc": "write --nproc 1", "engine.lora.rank": "write engine.lora.rank=8"}


@pytest.mark.parametrize("option", ["--port=65536", "--port=-1", "--nproc=0", "--max-restarts=-1"])
def test_numbers_out_of_range_are_no_options(tmp_path: Path, option: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main([str(tmp_path / "none.yaml"), option])
    assert caught.value.code == 2


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_port_in_use_is_refused(model: str, tmp_path: Path, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the launcher; a rank that starts again must not be kept from it."""
    monkeypatch.setattr("megasync.service.command.PORT_SECONDS", 0.0)
    given = config(model, tmp_path, service={"host": host})
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((host, 0), family=family) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            check_port(given, port)
        file = tmp_path / "serve.yaml"
        file.write_text(yaml.safe_dump(given.model_dump(mode="json", exclude_defaults=True)))
        with pytest.raises(SystemExit) as ended:
            main([str(file), "--port", str(port), "--nproc", "1"])
    assert (caught.value.key, ended.value.code) == ("port", 2)
    check_port(given, port)
    check_port(given, 0)


def test_a_host_of_another_machine_is_refused(model: str, tmp_path: Path) -> None:
    for host in ("192.0.2.1", "no.such.host.invalid"):
        with pytest.raises(ConfigError):
            check_port(config(model, tmp_path, service={"host": host}), 0)


def test_other_networks_need_a_key(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "tml-mine")
    check_service(config(model, tmp_path, service={"host": "0.0.0.0"}), 1)


def test_one_gpu_wants_replicas_beside_the_trainer(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, tmp_path, 1)
    with pytest.raises(ConfigError, match=r"^rollout\.replicas = "):
        default_num_ranks(config(model, tmp_path), 1)
    colocated = config(model, tmp_path, rollout={"placement": "colocated"})
    assert default_num_ranks(colocated, 1) == 1
    check_service(colocated, 1)


def test_one_replica_beside_the_trainer(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^rollout\.placement = "):
        check_service(config(model, tmp_path, rollout={"placement": "colocated", "replicas": 2}), 2)
