"""Configs that are refused, with the key and value named. Leaves out checks of model folders and data (test_config_check.py)."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.config import BenchRoot
from megasync.config.keys import all_keys, kind_of
from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.config.errors import ConfigError, nearest_name, explain_os_error
from tests.support.config_files import CHOICES, RANGES, refused, root_of, write


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    return write(tmp_path / "empty.yaml", "")


# -------------------------------------------------------------------------------------------------------- bad keys


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("engine.wrp", "engine.wrap"), ("wrap", "engine.wrap"),
        ("engine.optimizer.lr", "engine.optimizer.learning_rate"),
        ("rolout.replicas", "rollout.replicas"), ("rolout", "rollout"), ("sync.bucket_byte", "sync.bucket_bytes"),
        ("run.batch_size", "data.batch_size"),
        ("optimizer.lr", "engine.optimizer.learning_rate"), ("lr", "engine.optimizer.learning_rate"),
        ("optimizer.learning_rat", "engine.optimizer.learning_rate"), ("wait_decay", "engine.optimizer.weight_decay"),
        ("tp", "engine.parallel.tensor"), ("rollout.tp", "rollout.tensor_parallel"), ("parallel.pp", "engine.parallel.pipeline"),
        ("lora.rank", "engine.lora.rank"), ("train.batch_size", "data.batch_size"), ("rollout.n", "rollout.group_size"),
        ("engine.parallel.tensr", "engine.parallel.tensor"), ("engine..wrap", ""), ("base", ""),
        ("engine.lr", "engine.optimizer.learning_rate"), ("algorithm.beta", "algorithm.kl_coefficient"),
        ("trainer.max_steps", "run.steps"), ("rollout.tensor_model_parallel_size", "rollout.tensor_parallel"),
        ("actor.tensor_model_parallel_size", "engine.parallel.tensor"), ("max_completion_length", "rollout.max_new_tokens"),
        ("algorithm.epsilon_high", "algorithm.clip_high"), ("n_samples_per_prompt", "rollout.group_size"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", "rollout.tensor_parallel"), ("epsilon", "algorithm.clip_low"),
        ("actor_rollout_ref.actor.optim.lr", "engine.optimizer.learning_rate"), ("engine.bf16", "model.dtype"),
        ("engine.parallel.tensor_parallel", "engine.parallel.tensor"), ("teacher.model", "teacher.path"),
        ("engine.parallel.pipeline_parallel_size", "engine.parallel.pipeline"), ("data.path", "data.train"),
        ("checkpoint.checkpoint_every_steps", "checkpoint.every_steps"), ("rollout.rollout_n", "rollout.group_size"),
        ("data.data_path", "data.train"),
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


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        ("engine.wrap: ddp", "engine.wrap: a name in a YAML file has no dots", "write engine: {wrap: ...}"),
        (
            "engine: {optimizer.beta1: 0.5}",
            "engine.optimizer.beta1: a name in a YAML file",
            "write engine: {optimizer: {beta1: ...}}",
        ),
        ("data.eval.math.path: x", "data.eval.math.path: a name in a YAML", "write data: {eval: {math: {path: ...}}}"),
        ("optimizer.lr: 1", "optimizer.lr: there is no such key", "write engine.optimizer.learning_rate instead"),
    ],
)
def test_a_name_with_a_dot_in_a_yaml_file(tmp_path: Path, text: str, message: str, remedy: str) -> None:
    text = refused(write(tmp_path / "a.yaml", text))
    assert text.startswith(message) and remedy in text


def test_all_errors_are_reported_at_once(tmp_path: Path) -> None:
    """Unknown keys, types, bounds and overrides that cannot be read, each with its value and the remedy."""
    lines = [f"run: {{{', '.join(f'unknown_{number:02}: {number}' for number in range(34))}, steps: 0, seed: x}}"]
    lines += ["engine: {wrap: fsdp2, lr: 1}", "rollout: {temperature: 9, group_size: 2.5}"]
    path = write(tmp_path / "a.yaml", "\n".join(lines))
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["engine.balance", "sync.verify=maybe"])
    text = str(caught.value)
    print(text)
    expected = [
        "run.steps = 0",
        "run.seed = 'x'",
        "engine.wrap = 'fsdp2'",
        "engine.lr",
        "rollout.temperature = 9",
        "sync.verify = 'maybe'",
    ]
    expected += [f"run.unknown_{number:02}: " for number in range(34)] + ["rollout.group_size = 2.5", "'engine.balance'"]
    heads = [line for line in text.splitlines() if not line.startswith(" ")]
    assert len(caught.value.parts) == len(expected) == 42 and heads[-1].startswith("42 errors")
    assert all(sum(head.startswith(start) for head in heads) == 1 for start in expected)
    assert text.count("remedy:") == 42 and len(text) / 42 < 480
    assert "write engine.wrap=megatron_fsdp" in text and "write engine.optimizer.learning_rate instead" in text


def test_the_benches_keys_are_no_keys_of_a_run(empty: Path) -> None:
    message = refused(empty, "bench.num_ranks=1")
    assert message.startswith("bench.num_ranks: there is no such key")
    assert "python -m bench --config FILE" in message
    assert load_config(empty, ["bench.num_ranks=1"], BenchRoot).bench.num_ranks == 1


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


def test_a_whole_float_is_suggested_as_an_integer(empty: Path) -> None:
    assert "run.steps=1000" in refused(empty, "run.steps=1e3")


@pytest.mark.parametrize("key", list(CHOICES))
def test_choices(empty: Path, key: str) -> None:
    message = refused(empty, f"{key}=nonsense", root=root_of(key))
    assert message.startswith(f"{key} = 'nonsense'")
    assert f"choices: {', '.join(CHOICES[key])}" in message.replace("choices:  ", "choices: ")
    for choice in CHOICES[key]:
        load_config(empty, [f"{key}={choice}"], root_of(key))


@pytest.mark.parametrize(("name", "ours"), [("fp16", "float16"), ("bf16", "bfloat16"), ("FP32", "float32"), ("half", "float16")])
def test_other_names_of_dtypes(empty: Path, name: str, ours: str) -> None:
    message = refused(empty, f"model.dtype={name}")
    assert f"write model.dtype={ours}" in message


def test_no_choice_is_suggested_that_is_not_similar(empty: Path) -> None:
    assert "write one of the choices" in refused(empty, "model.dtype=int4")


@pytest.mark.parametrize("key", list(RANGES))
def test_ranges(empty: Path, key: str) -> None:
    for number in ("-1", "1e30" if "most" in RANGES[key] or "below" in RANGES[key] else "-7"):
        text = refused(empty, f"{key}={number}", root=root_of(key))
        assert text.startswith(f"{key} = ")
    text = refused(empty, f"{key}=-1", root=root_of(key))
    assert f"allowed:  {RANGES[key]}\n" in text
    assert f"write a number {RANGES[key]}" in text


@pytest.mark.parametrize(
    "override",
    [
        "sync.bucket_bytes=0", "sync.bucket_bytes=4095", "sync.bucket_bytes=1KiB", "run.steps=0", "rollout.top_p=0",
        "rollout.top_p=1.01", "engine.optimizer.beta1=1", "engine.optimizer.learning_rate=.nan",
        "rollout.temperature=0", "rollout.temperature=0.009", "rollout.temperature=2.1", "rollout.top_k=-1", "rollout.min_p=1",
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


def test_a_stop_text_is_not_empty(empty: Path) -> None:
    assert load_config(empty, ["rollout.stop=x"]).rollout.stop == ("x",)
    assert load_config(empty, ["rollout.stop=[x,'y z']"]).rollout.stop == ("x", "y z")
    message = refused(empty, "rollout.stop=[x,'']")
    assert message.startswith("rollout.stop = ['x', '']: ")
    assert "rollout.stop = 5: a list of texts is expected" in refused(empty, "rollout.stop=5")
    assert "a list of texts is expected" in refused(empty, "rollout.stop=[5]")
    layers = refused(empty, "engine.parallel.pipeline_layers=[all]")
    assert "a list of whole numbers is expected" in layers and "pipeline_layers=[8]" in layers


# -------------------------------------------------------------------------------------------------------- bad syntax


@pytest.mark.parametrize("override", ["engine.wrap", "", "=ddp", "--engine.wrap=ddp", "run.name=[", "run.name=${", "a=b: c: d"])
def test_bad_override(empty: Path, override: str) -> None:
    message = refused(empty, override)
    assert repr(override) in message
    assert "remedy:" in message


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("run: {name: a\nengine: 1", 2), ("run:\n  name: a\n  name: b\n", 3), ("run:\n\tname: a", 2),
        ("run: {}\nengine: {}\nrun: {}", 3), ("a: b: c", 1), ("run: !!python/object:os.system 1", 1),
        ("run: [", 2),
    ],
)  # fmt: skip
def test_yaml_error_names_file_and_line(tmp_path: Path, text: str, line: int) -> None:
    path = write(tmp_path / "a.yaml", text)
    assert refused(path).startswith(f"{path}:{line}: ")


@pytest.mark.parametrize(("text", "read"), [("12:30", "750"), ("0100", "64"), ("0b11", "3"), ("-017", "-15"), ("1:2.5", "62.5")])
def test_numbers_of_other_bases_are_refused(tmp_path: Path, empty: Path, text: str, read: str) -> None:
    """YAML 1.1 has them, and few people mean them. In quotes they are texts."""
    message = refused(write(tmp_path / "a.yaml", f"run:\n  steps: {text}\n"))
    assert "a.yaml:2: " in message and f"{text} as {read}" in message
    assert f"{text} as {read}" in refused(empty, f"run.steps={text}")
    path = write(tmp_path / "a.yaml", f"run: {{name: '{text}'}}\n")
    assert load_config(path, [f"run.dir={text}"]).run.name == text


@pytest.mark.parametrize("text", ["run:\n\tsteps: 1\n", "run: {\n\tsteps: 1}\n"])
def test_a_tab_is_named(tmp_path: Path, text: str) -> None:
    message = refused(write(tmp_path / "a.yaml", text))
    assert "a.yaml:2: begins with a tab" in message and "remedy:  indent with spaces" in message


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
    os.mkfifo(tmp_path / "pipe.yaml")  # as of `megasync train <(envsubst < a.yaml)`
    assert "is a pipe" in refused(tmp_path / "pipe.yaml")


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
    values = [f"{key}={text}" for key in ("run.name", "run.steps", "sync.bucket_bytes")]
    for override in (text, *values, f"engine.{text}=1", f"a.{text}.{text}_=1"):
        with contextlib.suppress(ConfigError):
            load_config(path, [override])


def test_a_list_that_is_written_as_one_text(empty: Path) -> None:
    key = "engine.lora.targets"
    assert f"write {key}=[linear_qkv,linear_proj]\n" in refused(empty, f"{key}=linear_qkv, linear_proj,") + "\n"
    assert f"write {key}=linear_proj\n" in refused(empty, f"{key}=linear_poj") + "\n"


def test_ranges_in_words() -> None:
    assert RANGES["run.steps"] == "at least 1"
    assert RANGES["rollout.top_p"] == "above 0 and at most 1"
    assert RANGES["run.seed"] == "at least 0 and below 4294967296"
    assert RANGES["rollout.kv_cache_bytes"] == "at least 1"
    assert RANGES["sync.bucket_bytes"] == "at least 4096"


@pytest.mark.parametrize("key", ["rollout.backend", "engine.foo", "data.eval.t.foo", "tokenizer.path", "trainer.device"])
def test_no_key_is_suggested_that_is_not_alike(empty: Path, key: str) -> None:
    message = refused(empty, f"{key}=1")
    assert "nearest:" not in message and "write one of the choices" in message


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("trainer.nnodes", "--nproc N"),
        ("num_train_epochs", "run.steps = epochs x examples / data.batch_size"),
        ("data.max_prompt_length", "rollout.max_model_len - rollout.max_new_tokens"),
        ("gradient_accumulation_steps", "engine.tokens_per_microbatch"),
        ("critic.optim.gamma_lam.lam", "no critic"), ("critic.optim.lr", "no critic"), ("critic.model.path", "no critic"),
        ("reward_model.model.path", "rollout.reward"), ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_coefficient"),
        ("actor_rollout_ref.rollout.pipeline_model_parallel_size", "rollout.replicas"),
        ("entropy_target", "algorithm.entropy_coefficient"), ("trainer.project_name", "WANDB_PROJECT"),
    ],
)  # fmt: skip
def test_names_without_a_key_here_get_advice(empty: Path, key: str, advice: str) -> None:
    message = refused(empty, f"{key}=1")
    assert "nearest:" not in message and advice in message


def test_nearest_name() -> None:
    assert nearest_name("solution", ["question", "answer"]) == ""
    assert nearest_name("fsdp2", ["ddp", "megatron_fsdp"]) == "megatron_fsdp"
    assert nearest_name("zzz", ["ddp", "megatron_fsdp"]) == ""
    assert nearest_name("x", []) == ""
    assert nearest_name("max_num_batched_tokens", ["max_new_tokens", "max_model_len"]) == ""
    assert nearest_name("grad_norm", ["clip_grad_norm"]) == "clip_grad_norm"


def test_an_override_that_is_not_utf_8_is_named(empty: Path) -> None:
    """Python passes bytes of the command line that are not UTF-8 as lone surrogates."""
    for override in ("run.name=a\udcff", "run.\udcff=1"):
        message = refused(empty, override)
        assert message.startswith(f"{override!a}: not in UTF-8") and "remedy:" in message


@pytest.mark.parametrize(
    ("override", "key"), [("teacher.path={math: 5}", "teacher.path.math"), ("teacher.path=[1]", "teacher.path")]
)
def test_a_value_below_a_chosen_name_is_refused_by_its_full_key(empty: Path, override: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(empty, [override])
    assert caught.value.key == key


# ------------------------------------------------------------------------------------------------------------- paths


def test_paths_may_begin_at_a_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "base.yaml", "data: {eval: {a: {path: ~/a.jsonl}}}")
    path = write(tmp_path / "b" / "refined.yaml", "base: ~/base.yaml")
    keys = ("run.dir", "model.path", "engine.lora.adapter_path", "data.train")
    config = load_config(path, [f"{key}=~/of/{key}" for key in keys])
    assert config.run.folder == tmp_path / "of" / "run.dir" / "run"
    inputs = {key: str(tmp_path / "of" / key) for key in keys[1:]}
    assert config.input_paths == {**inputs, "data.eval.a.path": str(tmp_path / "a.jsonl")}
    assert load_config(path, ["data.eval=~/x"]).data.eval == str(tmp_path / "x")
    message = refused(path, "run.dir=~nobody-of-that-name/x")
    assert message.startswith("run.dir = '~nobody-of-that-name/x': there is no such home folder")
    assert "write for example run.dir=./~nobody-of-that-name/x" in message


@pytest.mark.parametrize(("number", "remedy"), [(errno.ENOSPC, "free space"), (errno.EACCES, "that this user can read")])
def test_a_file_that_cannot_be_used_is_named_with_a_remedy(number: int, remedy: str) -> None:
    message = explain_os_error(OSError(number, os.strerror(number), "runs/a/report.html"))
    assert message.startswith(f"runs/a/report.html: {os.strerror(number)}") and remedy in message


NUMBERS = [key for key, field in all_keys(Config).items() if kind_of(field) is int or key.endswith("_seconds")]


@pytest.mark.parametrize("key", NUMBERS)
def test_numbers_that_overflow_later_are_refused(tmp_path: Path, key: str) -> None:
    """Counts of more than 32 bits, bytes of more than 64, seconds that no operating system waits."""
    name = key.replace("NAME", "a")
    config = write(tmp_path / "config.yaml", "data: {eval: {a: {path: a}}, train: {a: {path: a}}}\njudges: {a: {path: a}}\n")
    value = 2**63 if key.endswith("_bytes") else 10**9 + 1 if key.endswith("_seconds") else 2**32
    with pytest.raises(ConfigError) as error:
        load_config(config, [f"{name}={value}"])
    (part,) = error.value.parts
    assert (part.key, float(part.value)) == (name, float(value)) and part.remedy.startswith("write a number")
