"""Whole runs: what the model's folder, the ranks and the run's folder must be like. Real files throughout.

The rollouts' keys are in test_rollout_check.py, data and lengths of prompts in test_data_check.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from megasync.checks import check
from megasync.checks.check import check_config
from megasync.config.load import load_config
from megasync.config.errors import ConfigError, main_errors
from megasync.tools.serving.source import find_source
from megasync.launch import machine
from tests.support.file_limit import without_override
from tests.support.config_files import ROOT, cannot_run, command, refusal, refused, write_model


def test_a_good_config_can_run_and_leaves_no_probe(runnable: Path) -> None:
    config = load_config(runnable, ["engine.parallel.tensor=2", "engine.parallel.sequence=true", f"data.eval={runnable}"])
    config = config.model_copy(update={"data": config.data.model_copy(update={"eval": config.data.train})})
    check_config(config, 2)
    check_config(config, 8)
    assert not config.run.folder.exists()
    check_config(config, 8, makes_folder=True)
    assert list(config.run.folder.iterdir()) == []


@pytest.mark.parametrize("folder", ["missing", "config.yaml", "/proc", "."])
def test_temporary_files_have_a_folder(runnable: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes another one without a word: nobody writes into /proc, and the last one is nearly full."""
    path = str(runnable.parent / folder)
    monkeypatch.setenv("TMPDIR", path)
    monkeypatch.setattr(machine, "TEMPORARY_BYTES", 2**62 if folder == "." else 0)
    error = refusal(runnable)
    assert f"TMPDIR = {path}: " in str(error) and "TMPDIR" in error.remedy


def test_transformer_engine_is_there_where_it_is_asked_for(runnable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_config(load_config(runnable, ["engine.kernels=torch"]), 1)
    monkeypatch.setattr(check, "find_spec", lambda name: None if name == "transformer_engine" else object())
    error = refusal(runnable, "engine.kernels=te")
    assert (error.key, error.value) == ("engine.kernels", "te") and "write engine.kernels=auto" in error.remedy


@pytest.mark.parametrize(("lost", "key"), [("mbridge", "engine.wrap"), ("ray", "algorithm.name"), ("vllm", "algorithm.name")])
def test_a_part_of_an_extra_is_missed_by_name(runnable: Path, monkeypatch: pytest.MonkeyPatch, lost: str, key: str) -> None:
    """As after `pip install vllm`, which brings torch and neither Ray nor the engine's packages."""
    monkeypatch.setattr(check, "find_spec", lambda name: None if name == lost else object())
    error = refusal(runnable)
    assert error.key == key and f"needs {lost}, not installed" in error.headline and "pip install" in error.remedy


def test_loggers_are_installed(runnable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "missing_loggers", lambda names: [name for name in names if name == "wandb"])
    check_config(load_config(runnable, ["run.loggers=[tensorboard, trackio]"]), 1)
    error = refusal(runnable, "run.loggers=[tensorboard, wandb]")
    assert error.key == "run.loggers" and error.remedy.startswith("pip install wandb")


SHORT = {"max_position_embeddings": 64}
MOE = {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SELECTIVE = "engine.recompute=selective"
GOOD: list[tuple[dict[str, object], list[str], int]] = [
    ({}, ["engine.overrides.bucket_size=5"], 2),
    ({}, ["engine.gradient_dtype=bfloat16"], 1),
    ({}, [SELECTIVE], 1),
    ({}, [SELECTIVE, "engine.recompute_modules=[layernorm,core_attn,mlp]"], 1),
    ({}, ["engine.recompute=full", "engine.recompute_inputs=host"], 1),
    ({}, ["engine.lora.rank=128"], 2),
    ({"vocab_size": 127}, ["engine.parallel.tensor=2"], 2),  # it is padded
    ({}, ["engine.parallel.pipeline=3"], 3),
    ({}, ["engine.parallel={pipeline: 2, pipeline_layers: [3, 1]}"], 2),
    ({}, ["engine.parallel={pipeline: 2, virtual_pipeline: 2}"], 4),
    ({}, ["engine.parallel.context=2"], 2),
    ({}, ["engine.parallel={context: 2, context_attention: ulysses}"], 2),
    (MOE, ["engine.parallel.expert=2"], 4),
    (MOE, ["engine.parallel={expert: 3, tensor: 2, sequence: true}"], 6),
    (MOE, ["engine.parallel={context: 2, expert: 2}", "algorithm.load_balancing=0.1"], 2),
    (MOE | {"moe_intermediate_size": 12}, ["model.dtype=float32"], 2),
    ({}, ["algorithm.num_minibatches=32", "rollout.tensor_parallel=4"], 2),
]
OLMO3 = {"model_type": "olmo3", "rope_parameters": None}
# the model's fields, overrides, trainer ranks, the key that is refused, a part of the remedy or the choices
BAD: list[tuple[dict[str, object], list[str], int, str, str]] = [
    ({}, ["engine.overrides.bukcet_size=5"], 2, "engine.overrides.bukcet_size", "write engine.overrides.bucket_size"),
    ({}, ["engine.gradient_dtype=bfloat16", "model.dtype=float32"], 2, "engine.gradient_dtype", "model.dtype=bfloat16"),
    ({}, ["engine.parallel.tensor=4"], 4, "engine.parallel.tensor", "write engine.parallel.tensor=2"),
    ({}, ["engine.parallel.tensor=3"], 3, "engine.parallel.tensor", "write engine.parallel.tensor=2"),
    ({"intermediate_size": 255}, ["engine.parallel.tensor=2"], 2, "engine.parallel.tensor", "write engine.parallel.tensor=1"),
    ({}, ["engine.recompute_inputs=host"], 2, "engine.recompute_inputs", "write engine.recompute=full"),
    ({}, ["engine.recompute_modules=[mlp]"], 2, "engine.recompute_modules", "write engine.recompute=selective"),
    ({}, [SELECTIVE, "engine.recompute_modules=[moe]"], 2, "engine.recompute_modules", "write mlp instead of moe"),
    ({}, [SELECTIVE, "engine.recompute_modules=[mlp,mlp_act]"], 2, "engine.recompute_modules", "leave mlp_act or mlp out"),
    (MOE, [SELECTIVE, "engine.recompute_modules=[mlp]"], 2, "engine.recompute_modules", "write moe instead of mlp"),
    (MOE, ["engine.parallel.pipeline=2", SELECTIVE, "engine.recompute_modules=[moe]"], 2, "engine.recompute_modules", "full"),
    ({}, ["engine.lora.rank=129"], 2, "engine.lora.rank", "write engine.lora.rank=32"),
    ({}, ["engine.lora.rank=600", "engine.lora.sync=adapter"], 2, "engine.lora.sync", "write engine.lora.sync=merged"),
    ({}, ["engine.lora.alpha=8"], 2, "engine.lora.alpha", "engine.lora.rank=32"),
    ({}, ["engine.parallel={tensor: 2, pipeline: 2}"], 6, "", "a multiple of 4"),
    (MOE, ["engine.parallel={expert: 2, tensor: 2, sequence: true}"], 6, "", "a multiple of 4"),
    ({}, [], 0, "", "at least 1 rank"),
    ({}, ["engine.parallel.pipeline=5"], 5, "", "at most 4"),
    ({}, ["engine.parallel={pipeline: 2, virtual_pipeline: 3}"], 10, "", "at most 4"),
    ({}, ["engine.parallel.virtual_pipeline=2"], 10, "engine.parallel.virtual_pipeline", "virtual_pipeline=1"),
    *(
        ({}, [f"engine.parallel={{pipeline: 2, pipeline_layers: {layers}}}"], 10, "engine.parallel.pipeline_layers", "write")
        for layers in ("[3, 2]", "[4]", "[0, 4]", "[]", "[1, 1, 2]")
    ),
    (
        {},
        ["engine.parallel={context: 2, context_attention: ulysses, tensor: 2}"],
        4,
        "engine.parallel.context_attention",
        "allgather",
    ),
    ({}, ["engine.parallel.context_attention=ulysses"], 2, "engine.parallel.context_attention", "larger context size"),
    ({}, ["engine.parallel.expert=2"], 2, "engine.parallel.expert", "write engine.parallel.expert=1"),
    (MOE, ["engine.parallel.expert=4"], 4, "engine.parallel.expert", "write engine.parallel.expert=3"),
    (MOE, ["engine.parallel.tensor=2"], 2, "engine.parallel.sequence", "write engine.parallel.sequence=true"),
    (MOE | {"moe_intermediate_size": 12}, [], 2, "moe_intermediate_size", "model.dtype=float32"),
    ({}, ["engine.parallel.sequence=true"], 2, "engine.parallel.sequence", "write engine.parallel.sequence=false"),
    ({}, ["run.trainer_nodes=3"], 4, "run.trainer_nodes", "--num-ranks"),
    ({}, ["rollout.min_replicas=2"], 2, "rollout.min_replicas", "write rollout.min_replicas=1"),
    ({}, ["rollout.tensor_parallel=3"], 2, "rollout.tensor_parallel", "write rollout.tensor_parallel=2"),
    (OLMO3, ["rollout.tensor_parallel=4"], 2, "rollout.tensor_parallel", "write rollout.tensor_parallel=2"),
    ({"intermediate_size": 258}, ["rollout.tensor_parallel=4"], 2, "rollout.tensor_parallel", "write rollout.tensor_parallel=2"),
    ({}, ["rollout.max_model_len=8", "rollout.max_new_tokens=8"], 2, "rollout.max_model_len", "rollout.max_model_len=264"),
    ({}, ["algorithm.num_minibatches=33"], 2, "algorithm.num_minibatches", "algorithm.num_minibatches=32"),
    ({}, ["algorithm.name=sft", "algorithm.num_minibatches=5"], 2, "algorithm.num_minibatches", "algorithm.num_minibatches=4"),
    ({}, ["rollout.group_size=1"], 2, "rollout.group_size", "rollout.group_size=8"),
    ({}, ["engine.tokens_per_microbatch=1024"], 2, "engine.tokens_per_microbatch", "engine.tokens_per_microbatch=1280"),
    ({"max_position_embeddings": 2048}, ["rollout.max_model_len=3000"], 2, "rollout.max_model_len", "=2048 or less"),
    ({"max_position_embeddings": 2048}, ["rollout.max_new_tokens=2048"], 2, "rollout.max_new_tokens", "max_new_tokens=1024"),
    (SHORT | {"seq_length": 48}, ["rollout.max_model_len=64"], 2, "rollout.max_model_len", "=48 or less"),
    (SHORT, ["rollout.max_model_len=48", "rollout.max_new_tokens=48"], 2, "rollout.max_model_len", "max_model_len=64 or more"),
    (SHORT, ["rollout.max_model_len=64", "rollout.max_new_tokens=64"], 2, "rollout.max_model_len", "lower rollout.max_new_"),
    ({"max_position_embeddings": 2048}, ["rollout.kv_cache_bytes=512KiB"], 2, "rollout.kv_cache_bytes", "at least 2097152"),
    ({}, ["engine.optimizer.min_learning_rate=1"], 2, "engine.optimizer.min_learning_rate", "min_learning_rate=1e-06"),
    (
        {},
        ["engine.optimizer.warmup_steps=5", "engine.optimizer.decay_steps=5"],
        2,
        "engine.optimizer.decay_steps",
        "decay_steps=6",
    ),
    ({}, ["run.stop_at_accuracy=0.5"], 2, "run.stop_at_accuracy", "algorithm.name=sft, data.eval"),
]


@pytest.mark.parametrize(("fields", "overrides", "num_ranks"), GOOD)
def test_keys_that_go_together(runnable: Path, fields: dict[str, object], overrides: list[str], num_ranks: int) -> None:
    write_model(runnable.parent / "model", **fields)
    check_config(load_config(runnable, overrides), num_ranks)


@pytest.mark.parametrize(("fields", "overrides", "num_ranks", "key", "text"), BAD)
def test_keys_that_do_not(
    runnable: Path, fields: dict[str, object], overrides: list[str], num_ranks: int, key: str, text: str
) -> None:
    write_model(runnable.parent / "model", **fields)
    error = refusal(runnable, *overrides, world_size=num_ranks)
    texts = [" ".join(part.lines.values()) for part in error.parts if part.key == key and part.remedy]
    assert any(text in each for each in texts)


def test_an_adapter_is_read(runnable: Path, tmp_path: Path) -> None:
    assert "holds no adapter_config.json" in cannot_run(runnable, "engine.lora.rank=8", f"engine.lora.adapter_path={tmp_path}")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ([1], "adapter_config.json holds a list"),
        ({"peft_type": "LORA", "lora_alpha": 32}, "adapter_config.json: r is None"),
        ({"peft_type": "LORA", "r": 8, "lora_alpha": "32"}, "adapter_config.json: lora_alpha is '32'"),
    ],
)
def test_an_adapter_that_does_not_tell_its_scale_is_refused(runnable: Path, tmp_path: Path, fields: Any, words: str) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file({"base_model.model.x.q_proj.lora_A.weight": np.zeros((8, 4), np.float32)}, folder / "adapter_model.safetensors")
    assert words in cannot_run(runnable, "engine.lora.rank=8", f"engine.lora.adapter_path={folder}")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("run.dir=/proc/none", "run.dir"),
        ("run.dir=FILE", "run.dir"),
        ("run.dir=LINK", "run.dir"),
        *((f"run.name={name}", "run.name") for name in ("''", "..", "a/b", "n" * 260, "n" * 250, "é" * 130)),
        *((f'{key}="{text}"', key) for key, text in (("run.name", "a\\0b"), ("run.name", "a\\nb"), ("run.dir", "/tmp/a\\0b"))),
    ],
)
def test_run_folder_that_cannot_be_written(runnable: Path, override: str, key: str) -> None:
    """Of a name of 250 bytes a folder could be made, and no file beside it."""
    (link := runnable.parent / "unmounted").symlink_to("/nowhere/disk")
    assert refusal(runnable, override.replace("FILE", str(runnable)).replace("LINK", str(link))).key == key


def test_the_longest_name_of_a_run(runnable: Path) -> None:
    check_config(load_config(runnable, ["run.name=" + "n" * 241]), 2, makes_folder=True)


@pytest.mark.parametrize("key", ["run.dir", "model.path", "data.train", "data.eval", "teacher.path", "engine.lora.adapter_path"])
@pytest.mark.parametrize("path", ["", "/below.jsonl"])
def test_a_link_to_itself_is_refused_by_its_key(runnable: Path, key: str, path: str) -> None:
    (link := runnable.parent / "link").symlink_to(runnable.parent / "link")
    assert f"{key}" in refusal(runnable, f"{key}={link}{path}", "engine.lora.rank=4").headline
    assert "there is no such config file" in refused(Path(f"{link}{path}"))
    with pytest.raises(ConfigError, match="there is no such folder"):
        find_source(Path(f"{link}{path}"), runnable.parent, None, [])


@pytest.mark.parametrize("key", ["run.dir", "model.path", "data.train", "data.eval", "engine.lora.adapter_path"])
@pytest.mark.parametrize("path", ["n" * 256 + "/x.jsonl", "é" * 128, "/tmp" + "/d" * 2000])
def test_a_path_that_no_file_has_is_refused_by_its_key(runnable: Path, key: str, path: str) -> None:
    message = refused(runnable, f"{key}={path}")
    assert message.startswith(f"{key} = ") and "no file has so long a name" in message and "255 bytes" in message


def test_main_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, main_errors():
        raise ConfigError("run.steps = 0: out of range")
    assert caught.value.code == 2
    assert capsys.readouterr().err == "run.steps = 0: out of range\n"
    with pytest.raises(KeyError), main_errors():
        raise KeyError("a mistake of ours")
    with pytest.raises(SystemExit) as caught, main_errors():
        Path("/proc/x").mkdir()
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("/proc/x: No such file or directory\n  remedy:")
    for error in (ConnectionResetError(104, "reset"), FileNotFoundError(2, "gone", "x")):
        with pytest.raises(type(error)), main_errors(of_files=not isinstance(error, FileNotFoundError)):
            raise error


@pytest.mark.parametrize("name", ["train.jsonl", "model/model.safetensors", "model/config.json"])
def test_a_file_that_this_user_may_not_read_is_named(runnable: Path, name: str) -> None:
    (runnable.parent / name).chmod(0)
    arguments = [sys.executable, "-m", "megasync.train", "--check", str(runnable)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False, preexec_fn=without_override)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{runnable.parent / name}: Permission denied\n  remedy:"), done.stderr


def test_no_torch_is_imported(runnable: Path) -> None:
    names = ["checks.check", "report.log", "models.folder", "rewards.pool", "train"]
    code = f"import sys, {', '.join('megasync.' + name for name in names)}; assert 'torch' not in sys.modules"
    done = command("-c", code)
    assert done.returncode == 0, done.stderr
    check = "from megasync.train import main; assert main(['--check', sys.argv[1]]) == 0"  # reads and tokenises the data too
    done = command("-c", f"import sys; {check}; assert 'torch' not in sys.modules", str(runnable))
    assert done.returncode == 0, done.stderr
