"""Tensors that a folder has to hold, for every family, against what transformers saves; folders with others are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import FAMILIES, LATENT_FAMILIES
from megasync.config.errors import ConfigError
from megasync.models.folder import check_model_folder, model_shape
from megasync.models.merge import merge_adapter
from megasync.models.tensors import expected_tensors, num_parameters
from tests.engine.model.lora_cases import write_peft_adapter
from tests.support.tiny_models import SERVED, write_tiny_model

MORE = {  # other forms of a family
    "glm4_moe": ({"attention_bias": False, "use_qk_norm": True, "n_shared_experts": 2}, {"first_k_dense_replace": 2}),
    **dict.fromkeys(LATENT_FAMILIES, ({"q_lora_rank": None, "n_shared_experts": 2},)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_are_those_that_transformers_saves(family: str, tmp_path: Path) -> None:
    own = SERVED if family in LATENT_FAMILIES else {}
    for number, more in enumerate(({}, *MORE.get(family, ()))):
        folder = write_tiny_model(tmp_path / str(number), family, **own, **more)
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        saved = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
        assert expected_tensors(model_shape(folder), fields) == saved
        check_model_folder(folder)


def _changed(folder: Path, **changes: object) -> ConfigError:
    """The error of the folder with another config.json."""
    path = folder / "config.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(fields | changes), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        check_model_folder(folder)
    path.write_text(json.dumps(fields), encoding="utf-8")
    return caught.value


def test_weights_of_another_config_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama")
    assert "model.layers.4.input_layernorm.weight" in _changed(folder, num_hidden_layers=6).lines["missing"]
    assert "model.layers.3." in _changed(folder, num_hidden_layers=3).lines["tensors"]
    assert "model.layers.0.mlp.gate_proj.weight" in _changed(folder, intermediate_size=192).headline
    assert "q_proj.bias" in _changed(folder, model_type="qwen2", architectures=["Qwen2ForCausalLM"]).lines["missing"]
    check_model_folder(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused_also_where_config_json_is_silent(tmp_path: Path, dtype: torch.dtype) -> None:
    """They would be taken for numbers without their scales."""
    path = write_tiny_model(tmp_path, "llama") / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(dtype)
    save_file(tensors, path, {"format": "pt"})
    text = rf"1 tensors are not of a dtype that can be trained[\s\S]*up_proj.weight \({str(dtype).removeprefix('torch.')}\)"
    with pytest.raises(ConfigError, match=text):
        check_model_folder(tmp_path)


def test_a_dtype_that_nobody_here_knows_is_named(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, "llama") / "model.safetensors"
    save_file(load_file(path) | {"scales": torch.zeros(3, dtype=torch.uint16)}, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"scales \(U16\)[\s\S]*remedy: take a folder whose weights are in bfloat16"):
        check_model_folder(tmp_path)


def test_what_may_be_there_beside_the_model(tmp_path: Path) -> None:
    """A head beside tied embeddings, frequencies of rotary embeddings, layers that predict further tokens; nothing else."""
    folder = write_tiny_model(tmp_path, "llama", tied=True)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    assert "lm_head.weight" not in tensors
    check_model_folder(folder)
    tensors |= {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    tensors |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    save_file(tensors, path, {"format": "pt"})
    check_model_folder(folder)
    save_file(tensors | {"model.layers.4.mlp.up_proj.weight": torch.ones(256, 128)}, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"hold 1 tensors[\s\S]*tensors: model.layers.4.mlp.up_proj.weight"):
        check_model_folder(folder)
    save_file(tensors | {"model.layers.0.self_attn.q_proj.bias": torch.ones(128)}, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"tensors: model.layers.0.self_attn.q_proj.bias"):
        check_model_folder(folder)


def test_files_beside_the_model_are_not_read(tmp_path: Path) -> None:
    """Such as the publisher's own format next to the shards."""
    folder = write_tiny_model(tmp_path, "mistral")
    save_file({"layers.0.attention.wq.weight": torch.ones(2, 2)}, folder / "consolidated.safetensors")
    check_model_folder(folder)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    with pytest.raises(ConfigError, match=r"lacks .*model\.safetensors[\s\S]*remedy: name the file model.safetensors"):
        check_model_folder(folder)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "glm4_moe", num_nextn_predict_layers=1)
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"model.layers.3.shared_head.norm.weight": torch.ones(128)}, path, {"format": "pt"})
    check_model_folder(folder)


@pytest.mark.parametrize(
    ("family", "fields", "beside"),
    [
        ("glm4_moe_lite", {"num_nextn_predict_layers": 1}, "model.layers.3.shared_head.norm.weight"),
        ("deepseek_v3", {"num_nextn_predict_layers": 1}, "model.layers.3.eh_proj.weight"),
        ("llama", {"tied": True}, "lm_head.weight"),
        ("llama", {}, "model.layers.0.self_attn.rotary_emb.inv_freq"),
    ],
)
def test_a_merged_adapter_has_the_model_alone(tmp_path: Path, family: str, fields: dict[str, Any], beside: str) -> None:
    """Like an export: config.json then has no layers that predict further tokens, which vLLM takes for others of the model's."""
    base = write_tiny_model(tmp_path / "base", family, **fields)
    held = load_file(base / "model.safetensors")
    extra = held["model.embed_tokens.weight"].clone() if beside == "lm_head.weight" else torch.ones(128)
    save_file(held | {beside: extra}, base / "model.safetensors", {"format": "pt"})
    check_model_folder(base)
    adapter = write_peft_adapter(tmp_path / "adapter", str(base), modules=("o_proj",), shared=False)
    (merged := tmp_path / "merged").mkdir()
    merge_adapter(adapter, base, "float32", merged)
    check_model_folder(merged)
    found = {name: tensor for path in merged.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert found.keys() == held.keys()
    changed = {name for name, tensor in held.items() if not torch.equal(found[name], tensor)}
    assert changed == {name for name in held if name.endswith("o_proj.weight")}


def test_parameters_are_counted_by_the_headers_of_the_weights(tmp_path: Path) -> None:
    """Mistral's folders hold all of them once more, under other names."""
    weight_map = {}
    for number, shape in enumerate([(3, 5), (7,), (2, 2, 2)]):
        file = f"model-{number}.safetensors"
        save_file({f"a{number}": torch.zeros(shape), f"b{number}": torch.zeros(shape)}, tmp_path / file)
        weight_map |= {f"a{number}": file, f"b{number}": file}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    save_file({"a": torch.zeros(100)}, tmp_path / "consolidated.safetensors")
    assert num_parameters(tmp_path) == 2 * (15 + 7 + 8)
