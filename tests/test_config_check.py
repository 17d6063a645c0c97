"""Whole runs: what the model's folder, the data, the ranks and the run's folder must be like. Real files throughout."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from megasync.config_check import check_config
from megasync.config_load import load_config
from megasync.errors import ConfigError, main_errors
from megasync.model_folder import check_model_folder

ROOT = Path(__file__).resolve().parent.parent
MODEL = {
    "model_type": "qwen3", "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 128,
    "intermediate_size": 256, "hidden_size": 64, "hidden_act": "silu", "attention_bias": False, "use_sliding_window": False,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}  # fmt: skip


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


# -------------------------------------------------------------------------------------------------------- whole runs


def write_model(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL | changes))
    save_file({"w": np.arange(64, dtype=np.float32), "v": np.ones((3, 5), np.float16)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def runnable(tmp_path: Path) -> Path:
    model = write_model(tmp_path / "model")
    data = write(tmp_path / "train.jsonl", '{"question": "1+1=", "answer": "2"}\n{"question": "1+2=", "answer": 3}\n')
    text = f"run: {{dir: {tmp_path}/runs}}\nmodel: {{path: {model}}}\ndata: {{train: {data}, batch_size: 4}}\n"
    return write(tmp_path / "run.yaml", text)


def cannot_run(path: Path, *overrides: str, world_size: int = 2) -> str:
    config = load_config(path, overrides)
    with pytest.raises(ConfigError) as caught:
        check_config(config, world_size)
    message = str(caught.value)
    assert len(message.splitlines()) <= 10
    return message


def test_a_good_config_can_run_and_leaves_no_probe(runnable: Path) -> None:
    config = load_config(
        runnable, ["engine.parallel.tensor=2", "engine.parallel.sequence=true", f"data.eval={runnable}"]
    )
    config = replace(config, data=replace(config.data, eval=config.data.train))
    check_config(config, 2)
    check_config(config, 8)
    assert list(config.run.folder.iterdir()) == []


def test_overrides_are_fields_of_megatron_core(runnable: Path) -> None:
    message = cannot_run(runnable, "engine.overrides.bukcet_size=5")
    assert "engine.overrides.bukcet_size = 5" in message
    assert "remedy:  write engine.overrides.bucket_size" in message
    assert "overlap_grad_reduce" in message
    check_config(load_config(runnable, ["engine.overrides.bucket_size=5"]), 2)


def test_tensor_parallel_must_divide_the_model(runnable: Path) -> None:
    message = cannot_run(runnable, "engine.parallel.tensor=4", world_size=4)
    assert "engine.parallel.tensor = 4" in message
    assert "num_key_value_heads = 2" in message
    assert "choices: 1, 2" in message
    assert "write engine.parallel.tensor=2" in message
    assert "num_attention_heads = 4" in cannot_run(runnable, "engine.parallel.tensor=3", world_size=3)


def test_lora_must_fit_the_model(runnable: Path, tmp_path: Path) -> None:
    check_config(load_config(runnable, ["engine.lora.rank=64"]), 2)
    message = cannot_run(runnable, "engine.lora.rank=65")
    assert "larger than the model's smallest dimension, 64" in message
    assert "there is no adapter that engine.lora.alpha" in cannot_run(runnable, "engine.lora.alpha=8")
    message = cannot_run(runnable, "engine.lora.rank=8", f"engine.lora.adapter_path={tmp_path}")
    assert "holds no adapter_config.json" in message


@pytest.mark.parametrize(("name", "value"), [("vocab_size", 127), ("intermediate_size", 255)])
def test_tensor_parallel_must_divide_sizes(runnable: Path, name: str, value: int) -> None:
    write_model(runnable.parent / "model", **{name: value})
    assert f"{name} = {value}" in cannot_run(runnable, "engine.parallel.tensor=2")


def test_parallel_sizes_must_divide_the_ranks(runnable: Path) -> None:
    message = cannot_run(runnable, "engine.parallel.tensor=2", "engine.parallel.pipeline=2", world_size=6)
    assert "2 x 2 x 1: 4 does not divide 6 ranks" in message
    assert "1, 2, 3, 6" in message
    assert "multiple of 4" in message
    assert "0 ranks" in cannot_run(runnable, world_size=0)


def test_pipeline_must_divide_the_layers(runnable: Path) -> None:
    message = cannot_run(runnable, "engine.parallel.pipeline=3", world_size=3)
    assert "num_hidden_layers = 4" in message


@pytest.mark.parametrize("name", ["context", "expert"])
def test_unsupported_parallelism(runnable: Path, name: str) -> None:
    message = cannot_run(runnable, f"engine.parallel.{name}=2")
    assert f"engine.parallel.{name} = 2: not supported yet" in message
    assert f"write engine.parallel.{name}=1" in message


def test_other_impossible_combinations(runnable: Path) -> None:
    assert "engine.parallel.tensor above 1" in cannot_run(runnable, "engine.parallel.sequence=true")
    assert "rollout.max_staleness = 2: not supported yet" in cannot_run(runnable, "rollout.max_staleness=2")
    assert "rollout.tensor_parallel = 3" in cannot_run(runnable, "rollout.tensor_parallel=3")
    assert "leaves no room" in cannot_run(runnable, "rollout.max_model_len=8", "rollout.max_new_tokens=8")
    message = cannot_run(runnable, "algorithm.num_minibatches=33")
    assert "data.batch_size x rollout.group_size = 32" in message
    assert "num_minibatches = 5" in cannot_run(runnable, "algorithm.name=sft", "algorithm.num_minibatches=5")
    check_config(load_config(runnable, ["algorithm.num_minibatches=32", "rollout.tensor_parallel=4"]), 2)


def test_transports_that_cannot_be(runnable: Path) -> None:
    check_config(load_config(runnable, ["sync.transport=nccl"]), 2)
    with pytest.raises(ConfigError, match=r"sync.transport = 'rdma'[\s\S]*auto, shm, nccl, ipc"):
        load_config(runnable, ["sync.transport=rdma"])
    message = cannot_run(runnable, "sync.transport=ipc")
    assert "sync.transport = ipc: trainer and replicas have GPUs of their own" in message and "sync.transport=auto" in message


def test_placements_that_cannot_be(runnable: Path) -> None:
    colocated = "rollout.placement=colocated"
    check_config(load_config(runnable, [colocated, "sync.transport=ipc", "rollout.replicas=2", "engine.offload=[optimizer]"]), 2)
    for override, words in {
        "sync.transport=nccl": "sync.transport = nccl: trainer and replicas share GPUs",
        "rollout.max_staleness=1": "write rollout.max_staleness=0",
        "rollout.replicas=3": "write rollout.replicas=2 or start 3 ranks",
    }.items():
        assert words in cannot_run(runnable, colocated, override)
    with pytest.raises(ConfigError, match=r"engine.offload[\s\S]*parameters, gradients, optimizer"):
        load_config(runnable, ["engine.offload=[weights]"])


def test_rollout_keys_are_unused_for_sft(runnable: Path) -> None:
    overrides = [
        "algorithm.name=sft",
        "rollout.max_staleness=5",
        "rollout.reward=nonsense",
        "rollout.tensor_parallel=3",
    ]
    check_config(load_config(runnable, overrides), 2)


def test_reward_names(runnable: Path) -> None:
    message = cannot_run(runnable, "rollout.reward=exact_mach")
    assert "rollout.reward = 'exact_mach'" in message
    assert "nearest: exact_match" in message
    assert "no such reward" in cannot_run(runnable, "rollout.reward=my.module:1st")
    check_config(load_config(runnable, ["rollout.reward=my_package.my_module:fun"]), 2)


# -------------------------------------------------------------------------------------------------------- the model


def test_model_path(runnable: Path, tmp_path: Path) -> None:
    assert "model.path is not set" in cannot_run(runnable, "model.path=")
    message = cannot_run(runnable, "model.path=Qwen/Qwen2.5-3B-Instruct")
    assert "there is no such folder" in message
    assert "hf download Qwen/Qwen2.5-3B-Instruct" in message
    assert "is a file" in cannot_run(runnable, f"model.path={runnable}")
    (tmp_path / "void").mkdir()
    assert "holds no config.json" in cannot_run(runnable, f"model.path={tmp_path}/void")


def model_refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check_model_folder(folder)
    return str(caught.value)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_known_families(tmp_path: Path, family: str) -> None:
    shape = check_model_folder(write_model(tmp_path, model_type=family))
    assert (shape.model_type, shape.num_key_value_heads) == (family, 2)


def test_kv_heads_default_to_heads(tmp_path: Path) -> None:
    write_model(tmp_path)
    fields = {name: value for name, value in MODEL.items() if name != "num_key_value_heads"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert check_model_folder(tmp_path).num_key_value_heads == 4


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}


def test_mixtures_of_experts(tmp_path: Path) -> None:
    sizes = {**EXPERTS, "num_experts": None, "mlp_only_layers": [], "decoder_sparse_step": 1, "output_router_logits": False}
    shape = check_model_folder(write_model(tmp_path, **EXPERTS))
    assert (shape.num_experts, shape.num_experts_per_tok, shape.moe_intermediate_size) == (8, 2, 96)
    del sizes["num_experts"]
    assert check_model_folder(write_model(tmp_path, **sizes, num_local_experts=8)) == shape


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_experts": 0}, "num_experts = 0"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size = None"),
        ({"num_experts_per_tok": 9}, "more than num_experts = 8"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ({"shared_expert_intermediate_size": 64}, "shared expert"),
        ({"output_router_logits": True}, "load-balancing loss"),
    ],
)
def test_unsupported_mixtures_of_experts(tmp_path: Path, changes: dict[str, object], word: str) -> None:
    message = model_refused(write_model(tmp_path, **{**EXPERTS, **changes}))
    assert word in message
    assert "remedy:" in message


def test_what_experts_need(runnable: Path, tmp_path: Path) -> None:
    model = f"model.path={write_model(tmp_path / 'experts', **EXPERTS)}"
    split = (model, "engine.parallel.tensor=2")
    message = cannot_run(runnable, *split)
    assert "engine.parallel.sequence = false" in message
    assert "write engine.parallel.sequence=true" in message
    check_config(load_config(runnable, [*split, "engine.parallel.sequence=true"]), 2)
    assert "engine.parallel.expert = 2: not supported yet" in cannot_run(runnable, model, "engine.parallel.expert=2")
    odd = f"model.path={write_model(tmp_path / 'odd', **{**EXPERTS, 'moe_intermediate_size': 97})}"
    message = cannot_run(runnable, odd, "engine.parallel.tensor=2", "engine.parallel.sequence=true")
    assert "moe_intermediate_size = 97" in message
    assert "moe_intermediate_size = 97" in cannot_run(runnable, odd, "rollout.tensor_parallel=2")
    lora = (model, "engine.lora.rank=8")
    message = cannot_run(runnable, *lora)
    assert "linear_fc1 is in the experts of qwen3_moe" in message
    assert "write engine.lora.targets=[linear_qkv,linear_proj]" in message
    lora = (*lora, "engine.lora.targets=[linear_qkv,linear_proj]")
    check_config(load_config(runnable, lora), 2)
    assert "write engine.lora.sync=merged" in cannot_run(runnable, *lora, "engine.lora.sync=adapter")


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt2", None, 3])
def test_unknown_architecture_lists_the_known(tmp_path: Path, family: object) -> None:
    message = model_refused(write_model(tmp_path, model_type=family))
    assert f"model_type = {family!r}" in message
    assert "llama, qwen2, qwen3" in message


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "rope_parameters": None}, "'llama3'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "'yarn'"),
        ({"rope_scaling": {"type": "linear"}, "rope_parameters": None}, "'linear'"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"attention_bias": True}, "attention_bias"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"intermediate_size": [1, 2]}, "intermediate_size"),
    ],
)
def test_unsupported_models(tmp_path: Path, changes: dict[str, object], word: str) -> None:
    message = model_refused(write_model(tmp_path, **changes))
    assert word in message
    assert "config.json" in message
    assert "remedy:" in message


def test_what_may_be_there_and_is_harmless(tmp_path: Path) -> None:
    check_model_folder(
        write_model(tmp_path, rope_scaling=None, sliding_window=None, layer_types=["full_attention"] * 4)
    )
    check_model_folder(write_model(tmp_path, rope_scaling={"rope_type": "default"}, rope_parameters=None))


@pytest.mark.parametrize("text", ["{", "[]", "", "\x00"])
def test_broken_model_config(tmp_path: Path, text: str) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").write_text(text)
    assert str(tmp_path / "config.json") in model_refused(tmp_path)


def test_safetensors_cut_off_anywhere(tmp_path: Path) -> None:
    weights = write_model(tmp_path) / "model.safetensors"
    whole = weights.read_bytes()
    for length in range(0, len(whole), 7):
        weights.write_bytes(whole[:length])
        message = model_refused(tmp_path)
        assert f"{weights}: the file is cut off" in message
        assert f"{length} bytes" in message
    weights.write_bytes(whole[:-1])
    message = model_refused(tmp_path)
    assert f"expected: {len(whole)} bytes" in message
    assert f"actual:   {len(whole) - 1} bytes" in message
    weights.write_bytes(whole + b"x")
    assert "goes on after its end" in model_refused(tmp_path)


def test_safetensors_that_are_none(tmp_path: Path) -> None:
    weights = write_model(tmp_path) / "model.safetensors"
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    assert "git lfs pull" in model_refused(tmp_path)
    for content in (
        b"\xff" * 64,
        b"\x02" + b"\0" * 7 + b"[]",
        b"\x02" + b"\0" * 7 + b"{(",
        (8).to_bytes(8, "little") + b'{"a": 1}',
    ):
        weights.write_bytes(content)
        assert "not a safetensors file" in model_refused(tmp_path)
    weights.unlink()
    assert "holds no *.safetensors" in model_refused(tmp_path)


def test_index_with_missing_shards(tmp_path: Path) -> None:
    write_model(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model.safetensors", "x": "model-00002.safetensors"}}))
    message = model_refused(tmp_path)
    assert "missing: model-00002.safetensors" in message
    for text in ("{", "{}", '{"weight_map": []}', "[]"):
        index.write_text(text)
        assert "not an index" in model_refused(tmp_path)
    index.write_text(json.dumps({"weight_map": {"w": "model.safetensors"}}))
    check_model_folder(tmp_path)


# -------------------------------------------------------------------------------------------------------- data, folder


def test_data_errors_name_key_file_and_line(runnable: Path, tmp_path: Path) -> None:
    broken = write(tmp_path / "broken.jsonl", '{"question": "a", "answer": "b"}\n{"question": \n')
    assert "data.train is not set" in cannot_run(runnable, "data.train=")
    for key in ("train", "eval"):
        assert f"data.{key}: {broken}:2: not JSON" in cannot_run(runnable, f"data.{key}={broken}")
        assert f"data.{key}: {tmp_path}/no.jsonl: there is no" in cannot_run(
            runnable, f"data.{key}={tmp_path}/no.jsonl"
        )
    message = cannot_run(runnable, "data.prompt_key=quesion")
    assert "train.jsonl:1: has no key 'quesion'" in message
    assert "keys:    question, answer" in message
    assert "data.prompt_key=question" in message
    assert "data.answer_key=answer" in cannot_run(runnable, "data.answer_key=answers")


def test_run_folder_that_cannot_be_written(runnable: Path) -> None:
    message = cannot_run(runnable, f"run.dir={runnable}")  # a file
    assert "cannot be written" in message
    assert "run.dir" in message
    assert "cannot be written" in cannot_run(runnable, "run.dir=/proc/none")
    for name in ("''", "..", "a/b"):
        assert "run.name = " in cannot_run(runnable, f"run.name={name}")


# -------------------------------------------------------------------------------------------------------- commands


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_check_command(runnable: Path) -> None:
    good = command("-m", "megasync.config_check", str(runnable), "--num-ranks", "2", "engine.parallel.tensor=2")
    assert (good.returncode, good.stderr) == (0, "")
    bad = command("-m", "megasync.config_check", str(runnable), "engine.wrap=fsdp2")
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


def test_no_torch_is_imported() -> None:
    names = ["config_check", "log", "model_folder", "report", "reward", "train"]
    code = f"import sys, {', '.join('megasync.' + name for name in names)}; assert 'torch' not in sys.modules"
    done = command("-c", code)
    assert done.returncode == 0, done.stderr
