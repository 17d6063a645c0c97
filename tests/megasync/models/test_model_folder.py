"""The model's folder: which there are, and which are refused. Real files throughout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file as load_tensors, save_file as save_tensors

from engine.config import FAMILIES

from megasync.config.errors import ConfigError
from megasync.models.features import Model, has_other_class
from megasync.models.folder import CHOICES, check_model_config, check_model_folder
from megasync.models.model_shape import ModelShape
from tests.support.config_files import MODEL, model_refused, refusal, write, write_model
from tests.support.tiny_models import write_tiny_model


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("Qwen/Qwen2.5-3B-Instruct", "hf download Qwen/Qwen2.5-3B-Instruct"),
        ("models/none/deeper", "write model.path=FOLDER"),
        ("models/Qwen2.5-3B-Instruct", "write model.path=FOLDER"),
        ("smollm2/model", "write model.path=FOLDER"),
        ("", "set model.path"),
    ],
)
def test_model_path(runnable: Path, path: str, remedy: str) -> None:
    error = refusal(runnable, f"model.path={path}")
    assert (error.key, error.value) == ("model.path", path) and remedy in error.remedy


def test_a_path_that_is_no_model(runnable: Path, tmp_path: Path) -> None:
    assert "hf download" not in refusal(runnable, f"model.path={tmp_path}/models/none").remedy
    (tmp_path / "void").mkdir()
    for path in (runnable, tmp_path / "void"):
        assert refusal(runnable, f"model.path={path}").key == "model.path"


@pytest.mark.parametrize("within", ["hf", "checkpoints/step_00000020/hf", "snapshots/0123abcd"])
def test_a_folder_that_holds_a_model_is_refused_with_its_path(runnable: Path, tmp_path: Path, within: str) -> None:
    """Of a run or a checkpoint the final or newest weights, of the hub's cache a snapshot."""
    if within != "snapshots/0123abcd":
        write_model(tmp_path / "outer" / "checkpoints" / "step_00000010" / "hf")
    model = write_model(tmp_path / "outer" / within)
    assert refusal(runnable, f"model.path={tmp_path}/outer").remedy == f"write model.path={model}"


def test_an_adapter_is_no_model(runnable: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "lora" / "adapter_config.json", "{}").parent
    assert f"write engine.lora.adapter_path={folder}, and model.path=" in refusal(runnable, f"model.path={folder}").remedy


def test_kv_heads_default_to_heads(tmp_path: Path) -> None:
    assert check_model_folder(write_model(tmp_path)).num_key_value_heads == 2
    write_model(tmp_path, num_key_value_heads=4, model_type="llama")
    fields = {name: value for name, value in MODEL.items() if name != "num_key_value_heads"} | {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert check_model_folder(tmp_path).num_key_value_heads == 4


@pytest.mark.parametrize("family", ["glm4v", "qwen3_vl_moe", "mimo", "qwen4_moe", "gpt2", None, 3, ["llama"]])
def test_unknown_architecture_lists_the_known(tmp_path: Path, family: object) -> None:
    """Also those that mbridge knows and the engine does not."""
    error = model_refused(write_model(tmp_path, model_type=family))
    assert (error.key, error.value, error.lines["choices"]) == ("model_type", repr(family), ", ".join(CHOICES))


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 2.0}
TWICE = {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("low_freq_factor", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "rope_parameters": None}),
        ("factor", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}),
        ("rope_type", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None}),
        ("attention_factor", {"rope_parameters": {"rope_type": "yarn", "factor": 4, "attention_factor": 1.0}}),
        ("rope_type", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e6}}),
        ("rope_scaling", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("rope_scaling", TWICE),
        ("rope_scaling", {"rope_scaling": {"type": "linear", "rope_type": "default"}, "rope_parameters": None}),
        ("factor", {"rope_parameters": {"rope_type": "linear", "factor": 0}}),
        ("low_freq_factor", {"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}}),
        ("rope_parameters", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}),
        ("rope_theta", {"rope_parameters": {"rope_theta": "1e4"}}),
        ("rope_theta", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_theta": 1e6}),
        ("rope_theta", {"rope_parameters": None, "rope_scaling": LINEAR | {"rope_theta": 1e4}, "rope_theta": 1e6}),
        ("rope_theta", {"rope_parameters": LINEAR | {"rope_theta": 1e6}, "rope_scaling": LINEAR}),
        ("rope_type", {"rope_parameters": {"rope_type": ["linear"]}}),
    ],
)
def test_unsupported_rotary_embeddings(tmp_path: Path, key: str, changes: dict[str, object]) -> None:
    error = model_refused(write_model(tmp_path, **changes))
    assert error.key == key and str(tmp_path / "config.json") in error.headline


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": None},
        {"attention_dropout": None},
        {"id2label": "x"},
        {"dtype": []},
        {"dtype": "torch.float32"},
        {"partial_rotary_factor": 0.5},
        {"attention_bias": True},
        {"model_type": "llama", "mlp_bias": True},
        {"model_type": "qwen2", "head_dim": 64},
        {"hidden_act": "gelu"},
        {"quantization_config": {"bits": 4}},
        {"compression_config": {"quant_method": "compressed-tensors"}},
        {"num_hidden_layers": None},
        {"vocab_size": 0},
        {"tie_word_embeddings": "false"},
        {"use_sliding_window": None},
        {"rms_norm_eps": "1e-6"},
        {"rms_norm_eps": -1e-6},
        {"rope_theta": 0},
        {"max_position_embeddings": None},
        {"seq_length": "64"},
        {"max_position_embeddings": 64, "model_max_length": 65},
        {"eos_token_id": "x"},
        {"pad_token_id": 128},
        {"rope_parameters": [1]},
        {"num_key_value_heads": 4, "num_attention_heads": 6},
        {"head_dim": 33},
        {"intermediate_size": [1, 2]},
        {"architectures": None},
        {"architectures": ["Qwen3ForSequenceClassification"]},
        {"architectures": ["LlamaForCausalLM"]},
        {"architectures": ["LlamaForCausalLM", "Qwen3ForCausalLM"]},
        {"vision_config": {"depth": 1}},
        {"is_causal": False},
        {"model_type": "qwen2", "qk_norm": True},
        {"model_type": "llama", "logit_scale": 0.5},
        {"model_type": "llama", "bias": True},
        {"head_dtype": "float32"},
        *({"model_type": each, "dual_chunk_attention_config": {"chunk_size": 64}} for each in ("qwen2", "qwen3")),
    ],
)
def test_unsupported_fields(tmp_path: Path, changes: dict[str, object]) -> None:
    """The last of the changes is refused."""
    error = model_refused(write_model(tmp_path, **changes))
    assert (error.key, error.value) == (list(changes)[-1], repr(list(changes.values())[-1]))


def test_a_head_beside_tied_embeddings_is_equal_to_them(tmp_path: Path) -> None:
    """transformers 5 takes one that is not, whatever config.json says; one of another dtype is refused without a look at it."""
    folder = write_tiny_model(tmp_path, "qwen3", tied=True, dtype=torch.bfloat16)
    weights = folder / "model.safetensors"
    tensors = load_tensors(weights)
    head = tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_tensors(tensors, weights)
    check_model_folder(folder)
    other = head.clone()
    other[-1, -1] += 1
    for changed in (other, head.float(), other.float()):
        save_tensors(tensors | {"lm_head.weight": changed}, weights)
        error = model_refused(folder)
        assert (error.key, error.value) == ("tie_word_embeddings", "true") and "lm_head.weight" in error.headline


@pytest.mark.parametrize("changes", [{"model_type": "llama"}, {"model_type": "qwen2", "head_dim": None}])
def test_hidden_size_in_whole_heads(tmp_path: Path, changes: dict[str, object]) -> None:
    assert model_refused(write_model(tmp_path, **changes, num_attention_heads=6)).key == "hidden_size"


def test_a_file_by_which_vllm_takes_weights_for_quantised(tmp_path: Path) -> None:
    file = write(write_model(tmp_path) / "hf_quant_config.json", '{"quantization": {"quant_algo": "FP8"}}')
    assert model_refused(tmp_path).headline.startswith(str(file))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_one_class(tmp_path: Path, family: str) -> None:
    """By the name that transformers writes; vLLM would take the class of another name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    own = CLASSES["deepseek_v3" if family == "kimi_k2" else family]
    model = Model(ModelShape(family, *[1] * 6), {"model_type": family, "architectures": [own]})
    assert not has_other_class(model)
    assert has_other_class(replace(model, fields={"architectures": ["OtherForCausalLM"]}))
    assert not has_other_class(replace(model, fields={}))


def test_what_may_be_there_and_is_harmless(tmp_path: Path) -> None:
    check_model_folder(write_model(tmp_path, rope_scaling=None, sliding_window=None, layer_types=["full_attention"] * 4))
    check_model_folder(write_model(tmp_path, rope_scaling={"rope_type": "default"}, rope_parameters=None))
    linear = {"type": "linear", "factor": 2}
    check_model_folder(write_model(tmp_path, rope_scaling=linear, rope_parameters=None))
    said_twice = {"rope_type": "linear", "factor": 2, "rope_theta": 1e4}
    check_model_folder(write_model(tmp_path, rope_scaling=linear, rope_parameters=said_twice))
    check_model_folder(write_model(tmp_path, rope_scaling={}, rope_parameters=LLAMA3))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_passes_is_what_transformers_reads(tmp_path: Path, family: str) -> None:
    """Of every field of its config class: else ranks and vLLM refuse it, minutes later. An initializer_range is at most 1."""
    from transformers import AutoConfig

    path = write_tiny_model(tmp_path, family, num_hidden_layers=2) / "config.json"
    written = json.loads(path.read_text())
    fields = {*written, *AutoConfig.for_model(family).to_dict()} - {"model_type", "architectures"}
    check_model_config(tmp_path)
    wrong = []
    for name in sorted(fields):
        for value in (None, "x", 1.5, True, [], 0, 3):
            path.write_text(json.dumps(written | {name: value}))
            try:
                check_model_config(tmp_path)
            except ConfigError:
                continue
            try:
                AutoConfig.from_pretrained(tmp_path)
            except Exception as error:  # noqa: BLE001 # of huggingface_hub's validators, none of which is public
                wrong.append((name, value, type(error).__name__))
    assert [found for found in wrong if found[:2] != ("initializer_range", 1.5)] == []
