"""The model's folder: which there are, which are refused, files that are cut off. Real files throughout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_tensors, save_file as save_tensors

from engine.config import FAMILIES
from engine.attention.windows import layer_windows

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


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}


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
    ],
)
def test_unsupported_fields(tmp_path: Path, changes: dict[str, object]) -> None:
    """The last of the changes is refused."""
    error = model_refused(write_model(tmp_path, **changes))
    assert (error.key, error.value) == (list(changes)[-1], repr(list(changes.values())[-1]))


def test_a_head_beside_tied_embeddings_is_equal_to_them(tmp_path: Path) -> None:
    """transformers 5 takes one that is not, whatever config.json says."""
    folder = write_tiny_model(tmp_path, "qwen3", tied=True, dtype=torch.bfloat16)
    weights = folder / "model.safetensors"
    tensors = load_tensors(weights)
    head = tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_tensors(tensors, weights)
    check_model_folder(folder)
    head[-1, -1] += 1
    save_tensors(tensors, weights)
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


SLIDES = {"use_sliding_window": True, "sliding_window": 64}
TYPES = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (0, 0, 0, 0)),
        ({"use_sliding_window": True, "max_window_layers": 0}, (4096,) * 4),
        ({"model_type": "qwen2", **SLIDES, "max_window_layers": 0}, (64,) * 4),
        ({"model_type": "mistral"}, (4096,) * 4),
        ({"model_type": "mistral", "sliding_window": None}, (0,) * 4),
        ({"model_type": "mistral", "sliding_window": 64}, (64,) * 4),
        ({**EXPERTS, **SLIDES, "layer_types": TYPES[:1] * 4}, (64,) * 4),
        ({"model_type": "llama", "sliding_window": None}, (0,) * 4),
        ({"model_type": "gemma3_text", "rope_parameters": None}, (4096,) * 4),
        ({"model_type": "olmo3", "rope_parameters": None}, (4096, 4096, 4096, 0)),
        ({"model_type": "olmo3", "rope_parameters": None, "sliding_window": 8, "layer_types": TYPES * 2}, (8, 0, 8, 0)),
        ({"model_type": "gemma3_text", "rope_parameters": None, "sliding_window": 8, "layer_types": TYPES * 2}, (8, 0, 8, 0)),
        ({"model_type": "gemma3_text", "rope_parameters": None, "sliding_window": 8, "sliding_window_pattern": 3}, (8, 8, 0, 8)),
    ],
)
def test_windows_are_those_of_transformers(tmp_path: Path, changes: dict[str, object], windows: tuple[int, ...]) -> None:
    """Of a folder's fields, and of transformers' config of them."""
    from transformers import AutoConfig

    check_model_folder(write_model(tmp_path, **changes))
    fields = json.loads((tmp_path / "config.json").read_text())
    assert layer_windows(fields) == layer_windows(AutoConfig.from_pretrained(tmp_path).to_dict()) == windows


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("sliding_window", {"sliding_window": "64"}),
        ("sliding_window", {"sliding_window": -1}),
        ("max_window_layers", {"max_window_layers": None}),
        ("layer_types", {"layer_types": TYPES}),
        ("layer_types", {"layer_types": ["linear_attention"] * 4}),
        ("layer_types", {"layer_types": TYPES[:1] * 4}),
        ("use_sliding_window", {"use_sliding_window": True, "sliding_window": None}),
        ("layer_types", {**SLIDES, "max_window_layers": 2}),
        ("sliding_window", {**SLIDES, "max_window_layers": 4}),
        ("layer_types", {**SLIDES, "model_type": "qwen2", "layer_types": TYPES * 2}),
        ("layer_types", {"model_type": "mistral", "layer_types": TYPES * 2}),
        ("layer_types", {"model_type": "llama", "layer_types": TYPES * 2}),
        ("sliding_window", {"model_type": "llama", "sliding_window": 64}),
    ],
)
def test_unsupported_windows(tmp_path: Path, key: str, changes: dict[str, object]) -> None:
    assert model_refused(write_model(tmp_path, **changes)).key == key


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("hidden_activation", {"hidden_activation": "gelu"}),
        ("final_logit_softcapping", {"final_logit_softcapping": 30.0}),
        ("attn_logit_softcapping", {"attn_logit_softcapping": 50.0}),
        ("use_bidirectional_attention", {"use_bidirectional_attention": True}),
        ("layer_types", {"sliding_window": None}),
        ("attention_bias", {"attention_bias": True}),
        ("rope_parameters", {"rope_parameters": {"rope_theta": 1e6}}),
        ("rope_type", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        ("factor", {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}),
        ("rope_parameters", {"rope_parameters": {"sliding_attention": "default"}}),
        ("rope_parameters", {"rope_parameters": {"full_attention": [1]}}),
        ("query_pre_attn_scalar", {"query_pre_attn_scalar": 0}),
    ],
)
def test_unsupported_gemma(tmp_path: Path, key: str, changes: dict[str, object]) -> None:
    gemma = {"model_type": "gemma3_text", "rope_parameters": None, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    check_model_folder(write_model(tmp_path, **gemma, rope_scaling={"rope_type": "linear", "factor": 8.0}))
    assert model_refused(write_model(tmp_path, **gemma | changes)).key == key


PUBLISHED = {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2079441541679836, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("attention_bias", {"attention_bias": True}),
        ("head_dim", {"head_dim": 64}),
        ("head_dim", {"head_dim": None}),
        ("hidden_act", {"hidden_act": "gelu"}),
        ("layer_types", {"sliding_window": None}),
        ("layer_types", {"layer_types": ["chunked_attention"] * 4}),
        ("sliding_window", {"layer_types": TYPES[1:] * 4}),
        ("rope_theta", {"rope_theta": 1e4}),
        ("rope_theta", {"rope_theta": None}),
        ("rope_theta", {"rope_theta": 1e4, "rope_scaling": None, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}}),
        ("rope_theta", {"rope_scaling": None, "rope_parameters": {"sliding_attention": {"rope_theta": "1e4"}}}),
        ("rope_scaling", {"rope_scaling": {"type": "yarn", "factor": 8.0}}),
        ("rope_parameters", {"rope_scaling": None, "rope_parameters": PUBLISHED}),
        ("attention_factor", {"rope_scaling": PUBLISHED | {"attention_factor": 1.0}}),
        ("rope_type", {"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}),
        ("rope_type", {"rope_scaling": None, "rope_parameters": {"sliding_attention": PUBLISHED | {"rope_theta": 5e5}}}),
        ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    ],
)
def test_unsupported_olmo(tmp_path: Path, key: str, changes: dict[str, object]) -> None:
    olmo = {"model_type": "olmo3", "rope_parameters": None, "rope_theta": 500000, "rope_scaling": PUBLISHED}
    check_model_folder(write_model(tmp_path, **olmo))
    assert model_refused(write_model(tmp_path, **olmo | changes)).key == key


@pytest.mark.parametrize("text", ["{", "[]", "", "\x00", '{"a": ' + "[" * 10**5 + "]" * 10**5 + "}"], ids=len)
def test_broken_model_config(tmp_path: Path, text: str) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").write_text(text)
    assert str(tmp_path / "config.json") in model_refused(tmp_path).headline


def test_safetensors_cut_off_anywhere(tmp_path: Path) -> None:
    weights = write_model(tmp_path) / "model.safetensors"
    whole = weights.read_bytes()
    for length in (*range(0, 2000, 7), *range(2000, len(whole), 9973)):
        weights.write_bytes(whole[:length])
        error = model_refused(tmp_path)
        assert error.headline.startswith(f"{weights}: ") and error.lines["actual"] == f"{length} bytes"
    for content in (whole[:-1], whole + b"x"):
        weights.write_bytes(content)
        error = model_refused(tmp_path)
        assert error.headline.startswith(f"{weights}: ") and error.lines["actual"] == f"{len(content)} bytes"


def test_safetensors_that_are_none(tmp_path: Path) -> None:
    weights = write_model(tmp_path) / "model.safetensors"
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    assert "git lfs pull" in model_refused(tmp_path).remedy
    for content in (
        b"\xff" * 64,
        b"\x02" + b"\0" * 7 + b"[]",
        b"\x02" + b"\0" * 7 + b"{(",
        (8).to_bytes(8, "little") + b'{"a": 1}',
    ):
        weights.write_bytes(content)
        assert model_refused(tmp_path).headline.startswith(f"{weights}: ")
    weights.unlink()
    assert model_refused(tmp_path).remedy == "convert the weights to safetensors"


def write_shards(folder: Path, **other: object) -> dict[str, str]:
    """A model in two files, with their index; `other`: what the index says of some tensors instead, None: nothing."""
    whole = write_model(folder) / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    places = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in places if places[name] == file}, folder / file)
    index = {name: file for name, file in (places | other).items() if file is not None}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    return places


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
TENSOR = "model.layers.1.mlp.up_proj.weight"


def test_an_index_says_where_each_tensor_is(tmp_path: Path) -> None:
    places = write_shards(tmp_path)
    check_model_folder(tmp_path)
    other = FIRST if places[TENSOR] == SECOND else SECOND
    write_shards(tmp_path, **{TENSOR: other})
    assert model_refused(tmp_path).lines["wrong"] == TENSOR
    write_shards(tmp_path, no_such_tensor=FIRST)
    assert model_refused(tmp_path).lines["wrong"] == "no_such_tensor"
    write_shards(tmp_path, **{TENSOR: None})
    assert model_refused(tmp_path).lines["left_out"] == TENSOR
    write_shards(tmp_path, **{TENSOR: 3})
    assert INDEX in model_refused(tmp_path).headline


def test_no_tensor_is_in_two_files_that_are_read(tmp_path: Path) -> None:
    """Which of them counts would be another one for the engine, vLLM and transformers."""
    write_shards(tmp_path)
    first, second = load_file(tmp_path / FIRST), load_file(tmp_path / SECOND)
    save_file(second | {name: first[name] for name in list(first)[:1]}, tmp_path / SECOND)
    assert model_refused(tmp_path).lines["twice"] == next(iter(first))
    save_file(second, tmp_path / SECOND)
    save_file(first | second, tmp_path / "model.safetensors")
    assert model_refused(tmp_path).headline.startswith(f"{tmp_path}: holds model.safetensors and the index")
    (tmp_path / INDEX).unlink()
    check_model_folder(tmp_path)


@pytest.mark.parametrize("target", ["../../blobs/0123abcd", "itself"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json", "tokenizer.json", INDEX])
def test_a_link_of_the_hubs_cache_whose_blob_is_gone(runnable: Path, name: str, target: str) -> None:
    """A generation_config.json would be taken for none, an index too; the others for files that a user may not read."""
    path = runnable.parent / "model" / name
    path.unlink(missing_ok=True)
    path.symlink_to(path if target == "itself" else target)
    error = refusal(runnable)
    assert error.headline.startswith(f"{path}: ") and "cp -rL" in error.remedy
    path.unlink()
    (runnable.parent / "model" / "README.md").symlink_to("../../blobs/none")
    if name in ("generation_config.json", INDEX):
        check_model_folder(runnable.parent / "model")


def test_links_of_a_whole_cache_are_followed(tmp_path: Path) -> None:
    model = write_model(tmp_path / "blobs")
    snapshot = tmp_path / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for path in model.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    check_model_folder(snapshot)


def test_index_with_missing_shards(tmp_path: Path) -> None:
    write_model(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model.safetensors", "x": "model-00002.safetensors"}}))
    assert model_refused(tmp_path).lines["missing"] == "model-00002.safetensors"
    for text in ("{", "{}", '{"weight_map": []}', "[]"):
        index.write_text(text)
        assert model_refused(tmp_path).headline.startswith(f"{index}: ")
    names = load_file(tmp_path / "model.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    check_model_folder(tmp_path)
