"""Configs: what loads, what is refused and with which words. test_config_check.py goes on from there."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import get_args

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from engine.config import EngineConfig, OptimizerConfig
from bench.config import BenchRoot, ShapeName
from megasync.config.keys import all_keys, kind_of, takes_names
from megasync.config.load import NAMED, load_config, save_config
from megasync.config.schema import Config, RolloutConfig, RunConfig
from megasync.models.model_shape import SHAPES
from tests.support.config_files import KEYS, RANGES, ROOT, refused, write

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    return write(tmp_path / "empty.yaml", "")


# -------------------------------------------------------------------------------------------------------- what loads


def test_all_shipped_configs_are_there() -> None:
    names = {path.stem for path in CONFIGS}
    assert {"quickstart", "quickstart_sft", "grpo_ddp", "grpo_fsdp", "one_step_off"} <= names


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_config_loads_and_saves(path: Path, tmp_path: Path) -> None:
    root = BenchRoot if path.stem.startswith("bench") else Config
    config = load_config(path, root=root)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml", root=root) == config


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


def test_an_override_names_a_number_of_a_free_mapping(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("rollout: {engine_arguments: {a: {1: x, b: {2: y}}}}")
    found = load_config(tmp_path / "a.yaml", ["rollout.engine_arguments.a.1=z", "rollout.engine_arguments.a.b.2=w"])
    assert found.rollout.engine_arguments == {"a": {1: "z", "b": {2: "w"}}}


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


@pytest.mark.parametrize("name", ["config", "bench"])
def test_editors_get_the_schema_of_what_loads(name: str) -> None:
    path = ROOT / "docs" / f"{name}.schema.json"
    check = jsonschema.Draft202012Validator(json.loads(path.read_text(encoding="utf-8")))
    for config in CONFIGS:
        header = f"# yaml-language-server: $schema=../docs/{name}.schema.json\n"
        if config.stem.startswith("bench") == (name == "bench"):
            assert config.read_text(encoding="utf-8").startswith(header)
            check.validate(OmegaConf.to_container(OmegaConf.load(config)))
    for wrong in ({"run": {"stepps": 1}}, {"run": {"steps": 0}}, {"engine": {"wrap": "fsdp2"}}, {"sync": {"bucket_bytes": 1.5}}):
        assert not check.is_valid(wrong)
    assert check.is_valid({"base": "other.yaml", "sync": {"bucket_bytes": "1MiB"}})


@settings(deadline=None, max_examples=20)
@example(name="0E0", steps=1, rate=0.0)
@given(
    name=st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=8).filter(lambda t: "$" not in t),
    steps=st.integers(1, 10**6),
    rate=st.floats(0, 1, allow_nan=False),
)
def test_a_saved_config_loads_equal(tmp_path_factory: pytest.TempPathFactory, name: str, steps: int, rate: float) -> None:
    engine = EngineConfig(optimizer=OptimizerConfig(learning_rate=rate), overrides={"a": 1, "b": [True, None]})
    config = Config(run=RunConfig(name=name, steps=steps), engine=engine)
    path = tmp_path_factory.mktemp("saved") / "config.yaml"
    save_config(config, path)
    assert load_config(path) == config


def test_a_config_dumps_as_plain_values(empty: Path) -> None:
    assert json.loads(json.dumps(load_config(empty).model_dump()))["engine"]["parallel"]["tensor"] == 1


def test_every_number_has_its_range_and_every_key_says_what_it_is() -> None:
    for key, field in KEYS.items():  # sections too
        assert (kind_of(field) in (int, float)) == (key in RANGES), f"{key} is a number without a range"
    assert set(get_args(ShapeName)) == set(SHAPES)


def test_nothing_changes_after_loading(empty: Path) -> None:
    config = load_config(empty)
    with pytest.raises(ValueError, match="frozen"):
        config.run.steps = 5  # type: ignore[misc]


def test_replicas_are_started_with_what_the_config_says() -> None:
    """All that the YAML's keys and a replica's fields know by one name."""
    from bridge.config import ReplicaConfig, SpeculationConfig
    from megasync.run.replica_start import replica_config

    chosen = RolloutConfig(
        tensor_parallel=2, max_model_len=77, max_num_seqs=5, kv_cache_bytes=99, gpu_memory_utilization=0.3, enforce_eager=True,
        engine_arguments={"max_num_batched_tokens": 64}, on_update="restart", start_timeout_seconds=7, answer_timeout_seconds=8,
        speculation=SpeculationConfig(method="ngram"),
    )  # fmt: skip
    started = replica_config(Config(rollout=chosen, run=RunConfig(seed=3)))
    names = set(RolloutConfig.model_fields) & {field.name for field in fields(ReplicaConfig)} - {"dtype"}
    assert {name: getattr(started, name) for name in names} == {name: getattr(chosen, name) for name in names}
    assert all(getattr(chosen, name) != getattr(RolloutConfig(), name) for name in names)
    assert started.seed == 3 and not started.detokenizes and not started.is_fp8 and started.serves_folder
    quantised = replica_config(Config(rollout=RolloutConfig(dtype="fp8")))
    assert quantised.dtype == "bfloat16" and quantised.is_fp8 and not quantised.serves_folder
    assert replica_config(Config(rollout=RolloutConfig(stop=("x",)))).detokenizes


BASE = "data: {eval: {a: {path: x, samples: 2, temperature: 1.0}, b: {path: y}}, chat_template_arguments: {deep: 1}}\n"
BASE += "teacher: {path: {gsm8k: t1, math: t2}, engine_arguments: {seed: 1}}\nrun: {loggers: [wandb]}\n"
BASE += "judges: {j: {path: x, engine_arguments: {seed: 1}}}\n"
BASE += "rollout: {stop: [x], reward: {exact_match: 1.0, token_count: 0.1}, engine_arguments: {block_size: 16, seed: 1}}\n"


@pytest.mark.parametrize(
    ("text", "overrides", "key", "expected"),
    [
        ("data: {eval: null}", [], "data.eval", ""), ("data: {eval: }", [], "data.eval", ""),
        ("", ["data.eval=null"], "data.eval", ""),
        ("data: {eval: {}}", [], "data.eval", {}), ("data:", [], "data.eval", ["a", "b"]),
        ("data: {eval: {c: {path: z}}}", [], "data.eval", ["c"]), ("data: {eval: {a: {limit: 3}}}", [], "data.eval", ["a"]),
        ("", ["data.eval.a.limit=3"], "data.eval", ["a", "b"]), ("", ["data.eval={c: {path: z}}"], "data.eval", ["c"]),
        ("rollout: {reward: {math_verify: 1.0}}", [], "rollout.reward", {"math_verify": 1.0}),
        ("rollout: {reward: {token_count: 0.2}}", [], "rollout.reward", {"token_count": 0.2}),
        ("rollout: {reward: math_verify}", [], "rollout.reward", "math_verify"),
        ("", ["rollout.reward.token_count=0.2"], "rollout.reward", {"exact_match": 1.0, "token_count": 0.2}),
        ("rollout: {engine_arguments: null}", [], "rollout.engine_arguments", {}),
        ("rollout: {engine_arguments: {seed: 2}}", [], "rollout.engine_arguments", {"block_size": 16, "seed": 2}),
        ("data: {chat_template_arguments: null}", [], "data.chat_template_arguments", {}),
        ("teacher: {path: null}", [], "teacher.path", ""), ("teacher: {path: {math: t3}}", [], "teacher.path", {"math": "t3"}),
        ("teacher:", [], "teacher.path", {"gsm8k": "t1", "math": "t2"}), ("teacher: {path: t4}", [], "teacher.path", "t4"),
        ("", ["teacher.path.math=t3"], "teacher.path", {"gsm8k": "t1", "math": "t3"}),
        ("teacher: {engine_arguments: null}", [], "teacher.engine_arguments", {}),
        ("rollout: {stop: null}", [], "rollout.stop", ()), ("", ["rollout.stop=null"], "rollout.stop", ()),
        ("run: {loggers: ~}", [], "run.loggers", ()),
        ("judges: null", [], "judges", {}), ("judges: {j: {path: y}}", [], "judges", ["j"]),
    ],
)  # fmt: skip
def test_mappings_of_the_users_names_replace_and_null_empties(
    tmp_path: Path, text: str, overrides: list[str], key: str, expected: object
) -> None:
    write(tmp_path / "base.yaml", BASE)
    found: object = load_config(write(tmp_path / "a.yaml", f"base: base.yaml\n{text}"), overrides)
    for name in key.split("."):
        found = getattr(found, name)
    assert (list(found) if isinstance(expected, list) else found) == expected  # type: ignore[call-overload]


def test_null_empties_what_a_judge_of_a_base_has(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", BASE)
    path = write(tmp_path / "a.yaml", "base: base.yaml\njudges: {j: {engine_arguments: null}}")
    assert load_config(path).judges["j"].engine_arguments == {} and load_config(path).judges["j"].path == "x"


def test_null_empties_a_list_of_a_new_name(tmp_path: Path) -> None:
    text = "judges: {j: {path: x, endpoint: null, engine_arguments: null}}\ndata: {train: {1: {path: /p, rewards: null}}}"
    config = load_config(write(tmp_path / "a.yaml", text))
    assert (config.judges["j"].endpoint, config.judges["j"].engine_arguments) == ((), {})
    assert config.data.train_sources["1"].rewards == ()


@pytest.mark.parametrize(
    ("override", "words"),
    [("run.loggers=", "run.loggers=[]"), ("rollout.stop=", "rollout.stop=[]"), ("engine.lora.targets=null", "targets = None")],
)
def test_a_list_of_nothing_is_refused_as_it_is_written(empty: Path, override: str, words: str) -> None:
    assert words in refused(empty, override)


def test_every_mapping_of_names_replaces_or_has_free_values() -> None:
    """Of the latter a file sets one by one what vLLM, a template or a sampler is given."""
    named = {key for key, field in all_keys(Config).items() if takes_names(field) and "NAME" not in key}
    free = {key for key in named if key.endswith(("arguments", ".overrides"))}
    assert named - free == {".".join(path) for path in NAMED}


def test_a_set_of_a_base_is_refined(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", BASE)
    (own,) = load_config(write(tmp_path / "a.yaml", "base: base.yaml\ndata: {eval: {a: {limit: 3}}}")).data.eval_sets.values()
    assert (own.path, own.samples, own.limit) == ("x", 2, 3)
