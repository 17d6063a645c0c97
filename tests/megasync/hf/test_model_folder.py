"""The model's folder: which there are, which are refused, files that are cut off. Real files throughout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from engine.attention.windows import layer_windows
from engine.config import FAMILIES
from megasync.config.errors import ConfigError
from megasync.hf.features import QUERY_RANK, ROUTER_DEFAULTS
from megasync.hf.folder import DEFAULT_SIZES, check_model_config, check_model_folder
from tests.support.config_files import MODEL, cannot_run, model_refused, write, write_model, write_runnable
from tests.support.tiny_models import write_tiny_model


@pytest.fixture
def runnable(tmp_path: Path) -> Path:
    return write_runnable(tmp_path)


def test_model_path(runnable: Path, tmp_path: Path) -> None:
    assert "model.path is not set" in cannot_run(runnable, "model.path=")
    message = cannot_run(runnable, "model.path=Qwen/Qwen2.5-3B-Instruct")
    assert "there is no such folder" in message
    assert "hf download Qwen/Qwen2.5-3B-Instruct" in message
    for path in (f"{tmp_path}/models/none", "models/none/deeper", f"{tmp_path}/none"):
        message = cannot_run(runnable, f"model.path={path}")
        assert "hf download" not in message and "write model.path=FOLDER" in message
    assert "is a file" in cannot_run(runnable, f"model.path={runnable}")
    (tmp_path / "void").mkdir()
    assert "holds no config.json" in cannot_run(runnable, f"model.path={tmp_path}/void")


@pytest.mark.parametrize("within", ["hf", "checkpoints/step_00000020/hf", "snapshots/0123abcd"])
def test_a_folder_that_holds_a_model_is_told_which_part_is_meant(runnable: Path, tmp_path: Path, within: str) -> None:
    """Of a run or a checkpoint the final or newest weights, of the hub's cache a snapshot."""
    if within != "snapshots/0123abcd":
        write_model(tmp_path / "outer" / "checkpoints" / "step_00000010" / "hf")
    model = write_model(tmp_path / "outer" / within)
    assert f"remedy: write model.path={model}" in cannot_run(runnable, f"model.path={tmp_path}/outer")


def test_an_adapter_is_no_model(runnable: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "lora" / "adapter_config.json", "{}").parent
    assert f"write engine.lora.adapter_path={folder}, and model.path=" in cannot_run(runnable, f"model.path={folder}")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_known_families(tmp_path: Path, family: str) -> None:
    shape = check_model_folder(write_model(tmp_path, model_type=family))
    assert (shape.model_type, shape.num_key_value_heads) == (family, 2)


def test_kv_heads_default_to_heads(tmp_path: Path) -> None:
    write_model(tmp_path, num_key_value_heads=4, model_type="llama")
    fields = {name: value for name, value in MODEL.items() if name != "num_key_value_heads"} | {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert check_model_folder(tmp_path).num_key_value_heads == 4


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}


@pytest.mark.parametrize(
    ("family", "feature"),
    [
        ("gemma3", "vision layers"),
        ("qwen2_5_vl", "vision layers"),
        ("mimo", "multi-token prediction"),
    ],
)
def test_what_mbridge_knows_and_the_engine_does_not_is_refused_by_its_feature(tmp_path: Path, family: str, feature: str) -> None:
    message = model_refused(write_model(tmp_path, model_type=family))
    assert f"model_type = {family!r}: the engine has no {feature}" in message
    assert "choices: llama, mistral, qwen2" in message


@pytest.mark.parametrize("family", ["qwen4_moe", "gpt2", None, 3, ["llama"]])
def test_unknown_architecture_lists_the_known(tmp_path: Path, family: object) -> None:
    message = model_refused(write_model(tmp_path, model_type=family))
    assert f"model_type = {family!r}" in message
    assert "llama, mistral, qwen2, qwen3" in message


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "rope_parameters": None}, "'llama3' without a number low_freq"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "'yarn' without a number factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4, "attention_factor": 1.0}}, "'yarn' with attention_factor"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e6}}, "'longrope'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling beside rope_parameters, which says otherwise"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "beside"),
        ({"rope_scaling": {"type": "linear", "rope_type": "default"}, "rope_parameters": None}, "rope_type beside another type"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "rope scaling with factor = 0 is not supported"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor = 4.0, not below high_freq_factor = 4.0"),
        ({"head_dim": None}, "head_dim = None: a whole number is expected"),
        ({"attention_dropout": None}, "attention_dropout = None: a number is expected"),
        ({"id2label": "x"}, "id2label = 'x': an object is expected"),
        ({"dtype": []}, "dtype = []: is no dtype"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "by layer type"),
        ({"partial_rotary_factor": 0.5}, "partial rotary embedding (partial_rotary_factor = 0.5)"),
        ({"attention_bias": True}, "attention_bias"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias"),
        ({"model_type": "qwen2", "head_dim": 64}, "head_dim = 64 on qwen2, where vLLM takes hidden_size / num_attention_heads"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "a quantised checkpoint (compression_config)"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false': true or false is expected"),
        ({"use_sliding_window": None}, "use_sliding_window = None: true or false is expected"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps = '1e-6': a number with a point"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps = -1e-06: at least 0 is expected"),
        ({"rope_theta": 0}, "rope_theta = 0: at least 1 is expected"),
        ({"max_position_embeddings": None}, "max_position_embeddings = None: a whole number is expected"),
        ({"eos_token_id": "x"}, "eos_token_id = 'x': a token's number, or a list of them, is expected"),
        ({"rope_parameters": [1]}, "rope_parameters = [1]: an object is expected"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta = '1e4': a number is expected"),
        ({"rope_parameters": {"rope_type": ["linear"]}}, "rope_parameters.rope_type = ['linear']: a word is expected"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "num_attention_heads = 6, no multiple of num_key_value_heads"),
        ({"model_type": "llama", "num_attention_heads": 6}, "hidden_size = 128, no multiple of num_attention_heads = 6,"),
        ({"model_type": "qwen2", "num_attention_heads": 6, "head_dim": None}, "hidden_size = 128, no multiple of num_attention"),
        ({"head_dim": 33}, "head_dim = 33, an odd number,"),
        ({"dtype": "torch.float32"}, "dtype = 'torch.float32': is no dtype\n  choices: float64, float32"),
        ({"intermediate_size": [1, 2]}, "intermediate_size"),
        ({"architectures": None}, "architectures = None, of which vLLM knows none that generates"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "architectures = ['Qwen3ForSequenceClassification'], of which"),
    ],
)
def test_unsupported_models(tmp_path: Path, changes: dict[str, object], word: str) -> None:
    message = model_refused(write_model(tmp_path, **changes))
    assert word in message
    assert "config.json" in message
    assert "remedy:" in message


def test_a_file_by_which_vllm_takes_weights_for_quantised(tmp_path: Path) -> None:
    write(write_model(tmp_path) / "hf_quant_config.json", '{"quantization": {"quant_algo": "FP8"}}')
    assert "a quantised checkpoint (hf_quant_config.json)" in model_refused(tmp_path)


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


@pytest.mark.parametrize("family", {**ROUTER_DEFAULTS, **DEFAULT_SIZES})
def test_what_a_config_leaves_out_is_as_in_transformers(family: str) -> None:
    """Its own classes would say it, but importing them imports torch."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family)
    for name, value in {**ROUTER_DEFAULTS.get(family, {}), **DEFAULT_SIZES.get(family, {})}.items():
        assert getattr(config, name) == value, name
    assert family != "deepseek_v3" or config.q_lora_rank == QUERY_RANK


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
    ("changes", "word"),
    [
        ({"sliding_window": "64"}, "sliding_window = '64' (a whole number of at least 0 is)"),
        ({"max_window_layers": None}, "max_window_layers = None (a whole number"),
        ({"layer_types": TYPES}, "layer_types = ['sliding_attention', 'full_attention'] (full_attention or sliding_attention"),
        ({"layer_types": ["linear_attention"] * 4}, "(full_attention or sliding_attention for each layer is)"),
        ({"layer_types": TYPES[:1] * 4}, "sliding_attention in layer_types without a sliding_window"),
        ({"use_sliding_window": True, "sliding_window": None}, "use_sliding_window = true without a sliding_window"),
        ({**SLIDES, "max_window_layers": 2}, "some of the layers (max_window_layers, layer_types), which vLLM leaves out"),
        ({**SLIDES, "max_window_layers": 4}, "none of the layers (max_window_layers, layer_types), which vLLM up to 0.26 gives"),
        ({**SLIDES, "model_type": "qwen2", "layer_types": TYPES * 2}, "some of the layers (max_window_layers, layer_types)"),
        ({"model_type": "mistral", "layer_types": TYPES * 2}, "layer_types on mistral, with which transformers takes it for"),
        ({"model_type": "llama", "layer_types": TYPES * 2}, "layer_types on llama, which only vLLM heeds"),
        ({"model_type": "llama", "sliding_window": 64}, "sliding_window = 64 on llama, which only vLLM heeds"),
    ],
)
def test_unsupported_windows(tmp_path: Path, changes: dict[str, object], word: str) -> None:
    assert word in model_refused(write_model(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation = 'gelu' (gelu_pytorch_tanh is)"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = true"),
        ({"sliding_window": None}, "sliding_attention in layer_types without a sliding_window"),
        ({"attention_bias": True}, "attention_bias = true on gemma3_text"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rotary embeddings that are not by layer type"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling of type 'yarn' in layers of full_attention"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}, "without a number factor in layers of sliding"),
    ],
)
def test_unsupported_gemma(tmp_path: Path, changes: dict[str, object], word: str) -> None:
    gemma = {"model_type": "gemma3_text", "rope_parameters": None, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    check_model_folder(write_model(tmp_path, **gemma, rope_scaling={"rope_type": "linear", "factor": 8.0}))
    assert word in model_refused(write_model(tmp_path, **gemma | changes))


@pytest.mark.parametrize("text", ["{", "[]", "", "\x00"])
def test_broken_model_config(tmp_path: Path, text: str) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").write_text(text)
    assert str(tmp_path / "config.json") in model_refused(tmp_path)


def test_safetensors_cut_off_anywhere(tmp_path: Path) -> None:
    weights = write_model(tmp_path) / "model.safetensors"
    whole = weights.read_bytes()
    for length in (*range(0, 2000, 7), *range(2000, len(whole), 9973)):
        weights.write_bytes(whole[:length])
        message = model_refused(tmp_path)
        assert f"{weights}: cut off, or not a safetensors file: " in message
        assert f"actual: {length} bytes" in message
    for content in (whole[:-1], whole + b"x"):
        weights.write_bytes(content)
        message = model_refused(tmp_path)
        assert "file not fully covered" in message
        assert f"actual: {len(content)} bytes" in message


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
    message = model_refused(tmp_path)
    assert f"{INDEX}: names {other} for {TENSOR}, which is in {places[TENSOR]}" in message and "remedy:" in message
    write_shards(tmp_path, no_such_tensor=FIRST)
    assert f"names {FIRST} for no_such_tensor, which is in no file" in model_refused(tmp_path)
    write_shards(tmp_path, **{TENSOR: None})
    message = model_refused(tmp_path)
    assert f"{INDEX}: leaves out 1 tensors that its files hold" in message and f"left out: {TENSOR}" in message
    write_shards(tmp_path, **{TENSOR: 3})
    assert "weight_map holds something else than names of files" in model_refused(tmp_path)


def test_no_tensor_is_in_two_files_that_are_read(tmp_path: Path) -> None:
    """Which of them counts would be another one for the engine, vLLM and transformers."""
    write_shards(tmp_path)
    first, second = load_file(tmp_path / FIRST), load_file(tmp_path / SECOND)
    save_file(second | {name: first[name] for name in list(first)[:1]}, tmp_path / SECOND)
    assert f"{SECOND} and {FIRST} both hold {next(iter(first))}" in model_refused(tmp_path)
    save_file(second, tmp_path / SECOND)
    save_file(first | second, tmp_path / "model.safetensors")
    assert "holds model.safetensors and the index of other files" in model_refused(tmp_path)
    (tmp_path / INDEX).unlink()
    check_model_folder(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json", "tokenizer.json", INDEX])
def test_a_link_of_the_hubs_cache_whose_blob_is_gone(runnable: Path, name: str) -> None:
    """A generation_config.json would be taken for none, an index too; the others for files that a user may not read."""
    path = runnable.parent / "model" / name
    path.unlink(missing_ok=True)
    path.symlink_to("../../blobs/0123abcd")
    message = cannot_run(runnable)
    assert f"{path}: is a link to ../../blobs/0123abcd, which is not there" in message and "cp -rL" in message
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
    message = model_refused(tmp_path)
    assert "missing: model-00002.safetensors" in message
    for text in ("{", "{}", '{"weight_map": []}', "[]"):
        index.write_text(text)
        assert "not an index" in model_refused(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    check_model_folder(tmp_path)
