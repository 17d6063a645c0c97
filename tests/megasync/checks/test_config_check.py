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
from megasync.checks.unused import NOTED, REFUSED, unused_keys
from megasync.config.keys import choices, kind_of
from megasync.config.load import load_config, save_config
from megasync.config.errors import ConfigError, main_errors
from tests.support.file_limit import without_override
from tests.support.config_files import ROOT, KEYS, cannot_run, command, refused, write_model, write_runnable


@pytest.fixture
def runnable(tmp_path: Path) -> Path:
    return write_runnable(tmp_path)


def test_a_good_config_can_run_and_leaves_no_probe(runnable: Path) -> None:
    config = load_config(runnable, ["engine.parallel.tensor=2", "engine.parallel.sequence=true", f"data.eval={runnable}"])
    config = config.model_copy(update={"data": config.data.model_copy(update={"eval": config.data.train})})
    check_config(config, 2)
    check_config(config, 8)
    assert not config.run.folder.exists()
    check_config(config, 8, makes_folder=True)
    assert list(config.run.folder.iterdir()) == []


def test_overrides_are_fields_of_megatron_core(runnable: Path) -> None:
    message = cannot_run(runnable, "engine.overrides.bukcet_size=5")
    assert "engine.overrides.bukcet_size = 5" in message
    assert "remedy:  write engine.overrides.bucket_size" in message
    assert "overlap_grad_reduce" in message
    check_config(load_config(runnable, ["engine.overrides.bucket_size=5"]), 2)


def test_gradients_in_bfloat16_are_those_of_bfloat16_weights(runnable: Path) -> None:
    check_config(load_config(runnable, ["engine.gradient_dtype=bfloat16"]), 1)
    message = cannot_run(runnable, "engine.gradient_dtype=bfloat16", "model.dtype=float32")
    assert "engine.gradient_dtype = bfloat16: model.dtype = float32 has its gradients in float32" in message
    assert "write engine.gradient_dtype=float32, or model.dtype=bfloat16" in message


def test_transformer_engine_is_there_where_it_is_asked_for(runnable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_config(load_config(runnable, ["engine.kernels=torch"]), 1)
    monkeypatch.setattr(check, "find_spec", lambda name: None if name == "transformer_engine" else object())
    message = cannot_run(runnable, "engine.kernels=te")
    assert "engine.kernels = te: TransformerEngine is not installed" in message
    assert "or write engine.kernels=auto" in message
    assert "choices:  auto, torch, te" in refused(runnable, "engine.kernels=apex")


def test_loggers_are_installed(runnable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "missing_loggers", lambda names: [name for name in names if name == "wandb"])
    check_config(load_config(runnable, ["run.loggers=[tensorboard, trackio]"]), 1)
    message = cannot_run(runnable, "run.loggers=[tensorboard, wandb]")
    assert "run.loggers = tensorboard, wandb: the package wandb is not installed" in message
    assert "pip install wandb, or take wandb out of run.loggers" in message


def test_tensor_parallel_must_divide_the_model(runnable: Path) -> None:
    message = cannot_run(runnable, "engine.parallel.tensor=4", world_size=4)
    assert "engine.parallel.tensor = 4" in message
    assert "num_key_value_heads = 2" in message
    assert "choices: 1, 2" in message
    assert "write engine.parallel.tensor=2" in message
    assert "num_attention_heads = 4" in cannot_run(runnable, "engine.parallel.tensor=3", world_size=3)


def test_recompute_takes_what_the_model_has(runnable: Path) -> None:
    check_config(load_config(runnable, ["engine.recompute=selective"]), 1)
    chosen = ["engine.recompute=selective", "engine.recompute_modules=[layernorm,core_attn,mlp]"]
    check_config(load_config(runnable, chosen), 1)
    check_config(load_config(runnable, ["engine.recompute=full", "engine.recompute_inputs=host"]), 1)
    assert "engine.recompute = none keeps more than" in cannot_run(runnable, "engine.recompute_inputs=host")
    assert "engine.recompute = none knows no modules" in cannot_run(runnable, chosen[1])
    message = cannot_run(runnable, chosen[0], "engine.recompute_modules=[moe]")
    assert "engine.recompute_modules = moe: qwen3 has no moe" in message
    assert "write mlp in the place of moe" in message
    assert "mlp_act is a part of mlp" in cannot_run(runnable, chosen[0], "engine.recompute_modules=[mlp,mlp_act]")


def test_lora_must_fit_the_model(runnable: Path, tmp_path: Path) -> None:
    check_config(load_config(runnable, ["engine.lora.rank=128"]), 2)
    message = cannot_run(runnable, "engine.lora.rank=129")
    assert "larger than the model's smallest dimension, 128" in message
    assert "there is no adapter that engine.lora.alpha" in cannot_run(runnable, "engine.lora.alpha=8")
    message = cannot_run(runnable, "engine.lora.rank=8", f"engine.lora.adapter_path={tmp_path}")
    assert "holds no adapter_config.json" in message


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


def test_tensor_parallel_must_divide_sizes(runnable: Path) -> None:
    """But not the vocabulary, which is padded."""
    write_model(runnable.parent / "model", vocab_size=127)
    check_config(load_config(runnable, ["engine.parallel.tensor=2"]), 2)
    write_model(runnable.parent / "model", intermediate_size=255)
    assert "intermediate_size = 255" in cannot_run(runnable, "engine.parallel.tensor=2")


def test_parallel_sizes_must_divide_the_ranks(runnable: Path) -> None:
    message = cannot_run(runnable, "engine.parallel.tensor=2", "engine.parallel.pipeline=2", world_size=6)
    assert "2 x 2 x 1: 4 does not divide 6 ranks" in message
    assert "1, 2, 3, 6" in message
    assert "multiple of 4" in message
    assert "0 ranks" in cannot_run(runnable, world_size=0)


STAGES = [
    ("{pipeline: 5}", "pipeline x virtual_pipeline = 5 x 1: more stages than layers, the model has num_hidden_layers = 4"),
    ("{pipeline: 2, virtual_pipeline: 3}", "2 x 3: more stages than layers"),
    ("{virtual_pipeline: 2}", "engine.parallel.virtual_pipeline = 2: needs engine.parallel.pipeline above 1"),
    ("{pipeline: 2, pipeline_layers: [3, 2]}", "engine.parallel.pipeline_layers = [3, 2]: 5 layers, the model has"),
    ("{pipeline: 2, pipeline_layers: [4]}", "pipeline_layers = [4]: 1 numbers for pipeline x virtual_pipeline = 2 x 1"),
    ("{pipeline: 2, pipeline_layers: [0, 4]}", "engine.parallel.pipeline_layers = [0, 4]: each has at least 1 layer"),
    ("{pipeline: 2, pipeline_layers: []}", "engine.parallel.pipeline_layers = []: 0 numbers for"),
    ("{pipeline: 2, pipeline_layers: [1, 1, 2], virtual_pipeline: 2}", "[1, 1, 2]: 3 numbers for"),
]


@pytest.mark.parametrize(("parallel", "said"), STAGES)
def test_stages_must_fit_the_layers(runnable: Path, parallel: str, said: str) -> None:
    message = cannot_run(runnable, f"engine.parallel={parallel}", world_size=10)
    assert said in message and "remedy: write" in message


def test_stages_may_differ(runnable: Path) -> None:
    check_config(load_config(runnable, ["engine.parallel.pipeline=3"]), 3)
    check_config(load_config(runnable, ["engine.parallel={pipeline: 2, pipeline_layers: [3, 1]}"]), 2)
    check_config(load_config(runnable, ["engine.parallel={pipeline: 2, virtual_pipeline: 2}"]), 4)


def test_unsupported_parallelism(runnable: Path) -> None:
    check_config(load_config(runnable, ["engine.parallel.context=2"]), 2)
    ulysses = ["engine.parallel.context=2", "engine.parallel.context_attention=ulysses"]
    check_config(load_config(runnable, ulysses), 2)
    message = cannot_run(runnable, *ulysses, "engine.parallel.tensor=2", world_size=4)
    assert "engine.parallel.context = 2 does not divide the 1 KV heads of a tensor-parallel rank" in message
    assert "write engine.parallel.context_attention=allgather" in message
    assert "needs engine.parallel.context above 1" in cannot_run(runnable, ulysses[1])


def test_expert_parallelism_must_divide_experts_and_ranks(runnable: Path) -> None:
    assert "engine.parallel.expert = 2: qwen3 has no experts" in cannot_run(runnable, "engine.parallel.expert=2")
    sizes = {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    write_model(runnable.parent / "model", **sizes)
    check_config(load_config(runnable, ["engine.parallel.expert=2"]), 4)
    check_config(load_config(runnable, ["engine.parallel={expert: 3, tensor: 2, sequence: true}"]), 6)
    message = cannot_run(runnable, "engine.parallel.expert=4", world_size=4)
    assert "engine.parallel.expert = 4: does not divide the model's num_experts = 6" in message
    staged = ["engine.parallel.pipeline=2", "engine.recompute=selective", "engine.recompute_modules=[moe]"]
    assert "in stages the routers no longer know the micro-batch" in cannot_run(runnable, *staged, world_size=2)
    assert "has no mlp" in cannot_run(runnable, "engine.recompute=selective", "engine.recompute_modules=[mlp]")
    check_config(load_config(runnable, ["engine.parallel={context: 2, expert: 2}", "algorithm.load_balancing=0.1"]), 2)
    assert "allowed: 1, 2, 3, 6" in message and "write engine.parallel.expert=3" in message
    message = cannot_run(runnable, "engine.parallel={expert: 2, tensor: 2, sequence: true}", world_size=6)
    assert "engine.parallel.tensor x pipeline x expert = 2 x 1 x 2: 4 does not divide 6 ranks" in message
    assert "multiple of 4" in message
    assert "engine.parallel.sequence = false" in cannot_run(runnable, "engine.parallel.tensor=2")
    write_model(runnable.parent / "model", **{**sizes, "moe_intermediate_size": 12})
    message = cannot_run(runnable)
    assert "moe_intermediate_size = 12: experts' rows have 24 bytes on a rank" in message and "multiples of 16" in message
    check_config(load_config(runnable, ["model.dtype=float32"]), 2)


def test_other_impossible_combinations(runnable: Path) -> None:
    assert "engine.parallel.tensor above 1" in cannot_run(runnable, "engine.parallel.sequence=true")
    assert "rollout.min_replicas = 2: more than there are" in cannot_run(runnable, "rollout.min_replicas=2")
    assert "rollout.tensor_parallel = 3" in cannot_run(runnable, "rollout.tensor_parallel=3")
    assert "leaves no room" in cannot_run(runnable, "rollout.max_model_len=8", "rollout.max_new_tokens=8")
    message = cannot_run(runnable, "algorithm.num_minibatches=33")
    assert "data.batch_size x rollout.group_size = 32" in message
    assert "num_minibatches = 5" in cannot_run(runnable, "algorithm.name=sft", "algorithm.num_minibatches=5")
    check_config(load_config(runnable, ["algorithm.num_minibatches=32", "rollout.tensor_parallel=4"]), 2)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.group_size=1"], "the advantage 0"),
        (["engine.tokens_per_microbatch=4"], "engine.tokens_per_microbatch = 4: leaves no room for a prompt"),
        (["engine.tokens_per_microbatch=1024"], "more than rollout.max_new_tokens = 1024"),
        (["rollout.max_model_len=3000"], "max_position_embeddings = 2048"),
        (["rollout.max_new_tokens=2048"], "rollout.max_new_tokens = 2048: leaves no room for a prompt"),
        (["rollout.kv_cache_bytes=512KiB"], "at least 2097152"),
        (["engine.optimizer.min_learning_rate=1"], "above engine.optimizer.learning_rate = 1e-06"),
        (["engine.optimizer.warmup_steps=5", "engine.optimizer.decay_steps=5"], "engine.optimizer.decay_steps=6"),
        (["run.stop_at_accuracy=0.5"], "algorithm.name=sft, data.eval"),
        (["engine.optimizer.decay_steps=5"], "engine.optimizer.decay = constant lowers no learning rate"),
        (["engine.optimizer.min_learning_rate=1e-7"], "write engine.optimizer.decay=cosine"),
        (["rollout.cache_on_update=recompute"], "rollout.on_update = drain holds no samples"),
        (["sync.transport=delta", "sync.lanes=false"], "sync.transport = delta has no lanes"),
        (["rollout.offload_trainer=[optimizer]"], "write rollout.placement=colocated"),
    ],
)  # fmt: skip
def test_what_could_not_work_is_refused(runnable: Path, overrides: list[str], words: str) -> None:
    write_model(runnable.parent / "model", max_position_embeddings=2048)
    message = cannot_run(runnable, *overrides)
    assert words in message
    assert message.startswith(overrides[-1].partition("=")[0])
    assert "remedy:" in message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.name=sft", "rollout.group_size=4", "sync.verify=none"], "rollout.group_size, sync.verify: supervised steps"),
        (["algorithm.name=sft", "rollout.temperature=0.5"], "rollout.temperature: supervised steps have"),
        (["algorithm.clip_low=0.1", "algorithm.ratio_level=sequence"], "ratio_level: with one optimizer step a batch every"),
        (["rollout.evaluate_every_steps=3"], "rollout.evaluate_every_steps: data.eval is empty"),
        (["rollout.on_update=continue", "rollout.cache_on_update=recompute"], "on_update, rollout.cache_on_update: rollout"),
        (["checkpoint.keep=2"], "checkpoint.keep: checkpoint.every_steps = 0 writes no checkpoint"),
        (["run.steps=4", "engine.optimizer.warmup_steps=5"], "optimizer step 4 of engine.optimizer.warmup_steps = 5"),
    ],
)  # fmt: skip
def test_what_has_no_effect_here_is_told(runnable: Path, overrides: list[str], words: str) -> None:
    config = load_config(runnable, overrides)
    check_config(config, 2)
    (note,) = unused_keys(config)
    assert words in note


def test_rules_are_about_keys_that_there_are() -> None:
    assert not {key for keys, *_ in (*REFUSED, *NOTED) for key in keys} - set(KEYS)
    for _, owner, values, _ in REFUSED:
        assert kind_of(KEYS[owner]) is bool or set(values) < set(choices(KEYS[owner]))


def test_defaults_are_never_without_effect(runnable: Path) -> None:
    """Also those that a config says: a run's own config.yaml has all keys."""
    for name in ("sft", "grpo"):
        config = load_config(runnable, [f"algorithm.name={name}"])
        save_config(config, runnable.parent / "saved.yaml")
        saved = load_config(runnable.parent / "saved.yaml")
        check_config(saved, 2)
        assert not unused_keys(saved)


def test_run_folder_that_cannot_be_written(runnable: Path) -> None:
    message = cannot_run(runnable, f"run.dir={runnable}")  # a file
    assert "cannot be written" in message
    assert "run.dir" in message
    assert "cannot be written" in cannot_run(runnable, "run.dir=/proc/none")
    (link := runnable.parent / "unmounted").symlink_to("/nowhere/disk")
    for given in (f"run.dir={link}", f"run.dir={link.parent} run.name={link.name}"):
        assert f"{link} is a link to /nowhere/disk, which is not there" in cannot_run(runnable, *given.split())
    for name in ("''", "..", "a/b"):
        assert "run.name = " in cannot_run(runnable, f"run.name={name}")
    for name in ("n" * 260, "n" * 250, "é" * 130):  # a folder of the second could be made, and none beside it
        assert "the name of one folder is expected, of up to 241 bytes" in cannot_run(runnable, f"run.name={name}")
    check_config(load_config(runnable, ["run.name=" + "n" * 241]), 2, makes_folder=True)
    for key, text in (("run.name", "a\\0b"), ("run.name", "a\\nb"), ("run.dir", "/tmp/a\\0b")):
        assert "run.dir, run.name = " in cannot_run(runnable, f'{key}="{text}"')


@pytest.mark.parametrize("key", ["run.dir", "model.path", "data.train", "data.eval", "engine.lora.adapter_path"])
@pytest.mark.parametrize("path", ["n" * 256 + "/x.jsonl", "é" * 128, "/tmp" + "/d" * 2000])
def test_a_path_that_no_file_has_is_refused_by_its_key(runnable: Path, key: str, path: str) -> None:
    message = refused(runnable, f"{key}={path}")
    assert message.startswith(f"{key} = ") and "no file has so long a name" in message and "255 bytes" in message


def test_check_command(runnable: Path) -> None:
    good = command("-m", "megasync.checks.check", str(runnable), "--num-ranks", "2", "engine.parallel.tensor=2")
    assert (good.returncode, good.stderr) == (0, "")
    bad = command("-m", "megasync.checks.check", str(runnable), "engine.wrap=fsdp2")
    assert bad.returncode == 2
    assert bad.stderr.startswith("engine.wrap = 'fsdp2'")
    assert "Traceback" not in bad.stderr


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
    arguments = [sys.executable, "-m", "megasync.checks.check", str(runnable)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False, preexec_fn=without_override)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{runnable.parent / name}: Permission denied\n  remedy:"), done.stderr


def test_no_torch_is_imported(runnable: Path) -> None:
    names = ["checks.check", "reporting.log", "hf.folder", "report", "rewards.pool", "train"]
    code = f"import sys, {', '.join('megasync.' + name for name in names)}; assert 'torch' not in sys.modules"
    done = command("-c", code)
    assert done.returncode == 0, done.stderr
    check = "from megasync.train import main; assert main(['--check', sys.argv[1]]) == 0"  # reads and tokenises the data too
    done = command("-c", f"import sys; {check}; assert 'torch' not in sys.modules", str(runnable))
    assert done.returncode == 0, done.stderr
