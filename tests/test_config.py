"""Configs: what loads, what is refused and with which words. test_config_check.py goes on from there."""

from __future__ import annotations

import contextlib
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.config import CHOICES, RANGES, Config, RolloutConfig, RunConfig
from megasync.config_load import _all_keys, config_to_dict, load_config, save_config
from megasync.errors import ConfigError, nearest_name

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert len(message.splitlines()) <= 12
    return message


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    return write(tmp_path / "empty.yaml", "")


# -------------------------------------------------------------------------------------------------------- what loads


def test_all_shipped_configs_are_there() -> None:
    names = {path.stem for path in CONFIGS}
    assert {"quickstart", "quickstart_sft", "grpo_ddp", "grpo_fsdp", "one_step_off"} <= names


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_config_loads_and_saves(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


def test_empty_file_is_the_defaults(empty: Path) -> None:
    assert load_config(empty) == Config()


def test_overrides_win_in_their_order(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "engine: {wrap: ddp, optimizer: {learning_rate: 1}}\nrun:\n  name: a\n")
    config = load_config(path, ["engine.wrap=megatron_fsdp", "run.steps=3", "run.steps=4", "rollout={replicas: 2}"])
    assert (config.engine.wrap, config.run.name, config.run.steps) == ("megatron_fsdp", "a", 4)
    assert config.engine.optimizer.learning_rate == 1.0
    assert isinstance(config.engine.optimizer.learning_rate, float)
    assert config.rollout.replicas == 2


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.name=12", "12"), ("run.name=1e3", "1e3"), ("run.name=on", "on"), ("run.name='a b'", "a b"),
        ("run.name=", ""),
        ("run.name=a=b", "a=b"),
    ],
)  # fmt: skip
def test_override_of_a_text_is_taken_as_typed(empty: Path, override: str, expected: str) -> None:
    assert load_config(empty, [override]).run.name == expected


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("64MiB", 2**26), ("1GiB", 2**30), ("1.5KiB", 1536), ("8 KiB", 8192), ("4096", 4096), ("5000B", 5000)],
)
def test_byte_sizes(empty: Path, text: str, num_bytes: int) -> None:
    config = load_config(empty, [f"rollout.kv_cache_bytes={text}"])
    assert config.rollout.kv_cache_bytes == num_bytes


def test_optional_keys_take_null(empty: Path) -> None:
    config = load_config(empty, ["rollout.kv_cache_bytes=1MiB", "rollout.kv_cache_bytes=null"])
    assert config.rollout.kv_cache_bytes is None


def test_engine_overrides_are_free_and_merge(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "engine: {overrides: {bucket_size: 5, overlap_grad_reduce: true}}")
    overrides = load_config(path, ["engine.overrides.bucket_size=1000", "engine.overrides.x=1e-6"]).engine.overrides
    assert overrides == {"bucket_size": 1000, "overlap_grad_reduce": True, "x": 1e-6}


def test_base_is_refined_from_the_files_own_folder(tmp_path: Path) -> None:
    write(tmp_path / "deep" / "base.yaml", "run: {name: base, steps: 7}\nengine: {wrap: ddp}")
    write(tmp_path / "deep" / "middle.yaml", "base: base.yaml\nrun: {seed: 3}")
    path = write(tmp_path / "top.yaml", "base: deep/middle.yaml\nrun: {name: top}")
    config = load_config(path)
    assert (config.run.name, config.run.steps, config.run.seed, config.engine.wrap) == ("top", 7, 3, "ddp")


def test_interpolation_of_defaults_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_DIR", "/elsewhere")
    path = write(tmp_path / "a.yaml", "run: {dir: '${oc.env:SOME_DIR}'}\ndata: {train: '${run.dir}/${run.name}.jsonl'}")
    assert load_config(path).data.train == "/elsewhere/run.jsonl"


@settings(deadline=None, max_examples=20)
@given(
    name=st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=8).filter(
        lambda t: "$" not in t
    ),
    steps=st.integers(1, 10**6),
    rate=st.floats(0, 1, allow_nan=False),
)
def test_a_saved_config_loads_equal(
    tmp_path_factory: pytest.TempPathFactory, name: str, steps: int, rate: float
) -> None:
    config = Config()
    optimizer = replace(config.engine.optimizer, learning_rate=rate)
    config = replace(
        config,
        run=replace(config.run, name=name, steps=steps),
        engine=replace(config.engine, optimizer=optimizer, overrides={"a": 1, "b": [True, None]}),
    )
    path = tmp_path_factory.mktemp("saved") / "config.yaml"
    save_config(config, path)
    assert load_config(path) == config


def test_config_to_dict_is_plain(empty: Path) -> None:
    assert json.loads(json.dumps(config_to_dict(load_config(empty))))["engine"]["parallel"]["tensor"] == 1


def test_every_rule_has_its_key_and_every_number_its_range() -> None:
    keys = _all_keys(Config, "")
    assert set(CHOICES) | set(RANGES) <= set(keys)
    for key in keys:
        kind: type = Config
        for name in key.split("."):
            kind = get_type_hints(kind)[name]
        if {int, float} & set(get_args(kind) or (kind,)):
            assert key in RANGES, f"{key} is a number without a range"


# -------------------------------------------------------------------------------------------------------- bad keys


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("engine.wrp", "engine.wrap"), ("wrap", "engine.wrap"),
        ("engine.optimizer.lr", "engine.optimizer.learning_rate"),
        ("rolout.replicas", "rollout"), ("sync.bucket_byte", "sync.bucket_bytes"),
        ("run.batch_size", "data.batch_size"),
        ("engine.parallel.tensr", "engine.parallel.tensor"), ("engine..wrap", ""), ("base", ""),
    ],
)  # fmt: skip
def test_unknown_key_in_an_override(empty: Path, key: str, nearest: str) -> None:
    message = refused(empty, f"{key}=1")
    assert "there is no such key" in message.splitlines()[0]
    assert "the command line" in message
    assert "choices" in message
    if nearest:
        assert f"nearest:  {nearest}\n" in message
        assert f"write {nearest} instead" in message


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("runs: {}", "runs"), ("engine: {wrp: ddp}", "engine.wrp"), ("1: 2", "1"),
        ("engine: {parallel: {tp: 2}}", "engine.parallel.tp"), ("sync: {verify: {x: 1}, buckets: 1}", "sync.buckets"),
    ],
)  # fmt: skip
def test_unknown_key_in_yaml(tmp_path: Path, text: str, key: str) -> None:
    path = write(tmp_path / "a.yaml", text)
    message = refused(path)
    assert message.startswith(f"{key}: there is no such key")
    assert str(path) in message


def test_a_bad_key_in_a_base_names_that_file(tmp_path: Path) -> None:
    base = write(tmp_path / "b.yaml", "run: {nme: x}")
    assert str(base) in refused(write(tmp_path / "a.yaml", "base: b.yaml"))


# -------------------------------------------------------------------------------------------------------- bad values


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.steps=abc", "a whole number"), ("run.steps=true", "a whole number"), ("run.steps=1.5", "a whole number"),
        ("run.steps={x: 1}", "a whole number"), ("run.steps.x=1", "a whole number"),
        ("run.steps=[1]", "a whole number"),
        ("run.steps=null", "a whole number"), ("run.steps=", "a whole number"), ("run.name=null", "a text"),
        ("run.name={a: 1}", "a text"), ("engine.wrap=[ddp]", "a text"), ("engine.optimizer.beta1=true", "a number"),
        ("engine.optimizer.beta1=high", "a number"), ("data.shuffle=1", "true or false"),
        ("data.shuffle='true'", "true or"),
        ("engine=5", "a mapping"), ("engine.parallel=2", "a mapping"), ("engine.overrides=2", "a mapping"),
        ("sync.bucket_bytes=1.5", "a whole number"), ("sync.bucket_bytes=true", "a whole number"),
    ],
)  # fmt: skip
def test_wrong_type(empty: Path, override: str, expected: str) -> None:
    message = refused(empty, override)
    assert f"{expected}" in message.splitlines()[0]
    assert "is expected" in message.splitlines()[0]
    assert "remedy:" in message


def test_wrong_type_in_yaml_names_file_and_choices(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "sync: {verify: off}")
    message = refused(path)
    assert message.startswith("sync.verify = False")
    assert "none, digest, readback" in message
    assert str(path) in message


def test_a_whole_float_is_told_how_to_be_written(empty: Path) -> None:
    assert "run.steps=1000" in refused(empty, "run.steps=1e3")


@pytest.mark.parametrize("key", list(CHOICES))
def test_choices(empty: Path, key: str) -> None:
    message = refused(empty, f"{key}=nonsense")
    assert message.startswith(f"{key} = 'nonsense'")
    assert f"choices: {', '.join(CHOICES[key])}" in message.replace("choices:  ", "choices: ")
    for choice in CHOICES[key]:
        load_config(empty, [f"{key}={choice}"])


def test_fsdp2_is_pointed_to_megatron_fsdp(empty: Path) -> None:
    message = refused(empty, "engine.wrap=fsdp2")
    assert "choices:  megatron_fsdp, ddp" in message
    assert "nearest:  megatron_fsdp" in message
    assert "write engine.wrap=megatron_fsdp" in message


@pytest.mark.parametrize("key", list(RANGES))
def test_ranges(empty: Path, key: str) -> None:
    for number in ("-1", "1e30" if RANGES[key].most or RANGES[key].below else "-7"):
        text = refused(empty, f"{key}={number}")
        assert text.startswith(f"{key} = ")
    assert "allowed:" in refused(empty, f"{key}=-1")


@pytest.mark.parametrize(
    "override",
    [
        "sync.bucket_bytes=0", "sync.bucket_bytes=4095", "sync.bucket_bytes=1KiB", "run.steps=0", "rollout.top_p=0",
        "rollout.top_p=1.01", "engine.optimizer.beta1=1", "engine.optimizer.learning_rate=.nan",
        "rollout.temperature=0",
        "engine.optimizer.learning_rate=.inf", "engine.parallel.tensor=0", "data.batch_size=0",
        "sync.timeout_seconds=0",
    ],
)  # fmt: skip
def test_out_of_range(empty: Path, override: str) -> None:
    message = refused(empty, override)
    assert override.partition("=")[0] in message.splitlines()[0]
    assert "out of range" in message


@pytest.mark.parametrize("text", ["64mb", "64MB", "big", "-1MiB", "1.3KiB", "''", "1 2MiB", "MiB"])
def test_bad_byte_size(empty: Path, text: str) -> None:
    message = refused(empty, f"sync.bucket_bytes={text}")
    assert "KiB, MiB, GiB" in message


# -------------------------------------------------------------------------------------------------------- bad syntax


@pytest.mark.parametrize(
    "override", ["engine.wrap", "", "=ddp", "--engine.wrap=ddp", "run.name=[", "run.name=${", "a=b: c: d"]
)
def test_bad_override(empty: Path, override: str) -> None:
    message = refused(empty, override)
    assert repr(override) in message
    assert "remedy:" in message


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("run: {name: a\nengine: 1", 2), ("run:\n  name: a\n  name: b\n", 3), ("run:\n\tname: a", 2),
        ("run: {}\nengine: {}\nrun: {}", 3), ("a: b: c", 1), ("run: !!python/object:os.system 1", 1),
    ],
)  # fmt: skip
def test_yaml_error_names_file_and_line(tmp_path: Path, text: str, line: int) -> None:
    path = write(tmp_path / "a.yaml", text)
    assert refused(path).startswith(f"{path}:{line}: ")


def test_duplicate_key_is_named(tmp_path: Path) -> None:
    assert "duplicate key name" in refused(write(tmp_path / "a.yaml", "run:\n  name: a\n  name: b\n"))


@pytest.mark.parametrize("content", [b"5", b"- 1\n- 2", b"\xff\xfe\x00", b"a: \x01", b"run: {name: '${'}"])
def test_not_a_config(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    assert str(path) in refused(path)


def test_missing_file_names_its_nearest(tmp_path: Path) -> None:
    write(tmp_path / "grpo_fsdp.yaml", "")
    message = refused(tmp_path / "grpo_fdsp.yaml")
    assert "no such config file" in message
    assert str(tmp_path / "grpo_fsdp.yaml") in message
    assert "is a folder" in refused(tmp_path)
    assert "no such config file" in refused(tmp_path / "nowhere" / "a.yaml")


def test_base_errors(tmp_path: Path) -> None:
    assert "nowhere.yaml: there is no such config file" in refused(write(tmp_path / "a.yaml", "base: nowhere.yaml"))
    assert "base = [1]" in refused(write(tmp_path / "a.yaml", "base: [1]"))
    write(tmp_path / "b.yaml", "base: a.yaml")
    assert "in a circle" in refused(write(tmp_path / "a.yaml", "base: b.yaml"))


@pytest.mark.parametrize("value", ["${run.nme}", "???", "${oc.env:NOT_SET_ANYWHERE}", "${run.name}"])
def test_bad_interpolation(empty: Path, value: str) -> None:
    message = refused(empty, f"run.name={value}")
    assert message.startswith("run.name: ")


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=30))
def test_no_override_ends_in_a_traceback(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = write(tmp_path_factory.mktemp("fuzz") / "a.yaml", "")
    for override in (text, f"run.name={text}", f"run.steps={text}", f"sync.bucket_bytes={text}", f"engine.{text}=1"):
        with contextlib.suppress(ConfigError):
            load_config(path, [override])


def test_nearest_name() -> None:
    assert nearest_name("fsdp2", ["ddp", "megatron_fsdp"]) == "megatron_fsdp"
    assert nearest_name("zzz", ["ddp", "megatron_fsdp"]) == ""
    assert nearest_name("x", []) == ""


def test_replicas_are_started_with_what_the_config_says() -> None:
    """All that the YAML's keys and a replica's fields know by one name."""
    from bridge.config import ReplicaConfig
    from megasync.weights import replica_config

    said = RolloutConfig(
        tensor_parallel=2, max_model_len=77, max_num_seqs=5, kv_cache_bytes=99, gpu_memory_utilization=0.3, enforce_eager=True
    )
    started = replica_config(Config(rollout=said, run=RunConfig(seed=3)))
    names = {field.name for field in fields(RolloutConfig)} & {field.name for field in fields(ReplicaConfig)}
    assert {name: getattr(started, name) for name in names} == {name: getattr(said, name) for name in names}
    assert all(getattr(said, name) != getattr(RolloutConfig(), name) for name in names)
    assert started.seed == 3
