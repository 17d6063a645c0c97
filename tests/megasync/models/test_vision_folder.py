"""Folders of vision-language models, whose language model is trained: what is read of them, refused, and kept in exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.checkpoint.hf_folder import Share, as_in, finish_folder, save_weights
from engine.config import LoraConfig
from model_folder.layout import VISION_LANGUAGE, key_of, own_fields, own_name, own_name_in_any, places, read_folder_layout
from engine.peft.folder import base_shapes
from megasync.data.load import read_files
from megasync.data.tokenizer import load_tokenizer
from megasync.config.errors import ConfigError
from megasync.config.load import load_config
from engine.attention.windows import layer_windows
from megasync.models.folder import check_model_folder, model_fields
from megasync.models.tensors import expected_tensors, num_parameters
from megasync.tools.bisect.choose import check_family
from tests.support.config_files import model_refused, refusal, write, write_runnable
from tests.support.tiny_models import is_of_vision, load_model, publish, rename, write_templates, write_tiny_model

def as_written(folder: Path) -> Path:
    return folder


LAYER = "model.language_model.layers.0."
SIZES: dict[str, Any] = {"vocab_size": 131, "hidden_size": 64, "num_hidden_layers": 2}
LAYOUTS = [*((family, publish) for family in VISION_LANGUAGE), *((family, rename) for family in ("gemma3", "qwen2_5_vl"))]
LAYOUTS += [(family, as_written) for family in ("gemma3", "qwen2_5_vl", "qwen3_vl")]
FUSED = LAYER + "mlp.experts.gate_up_proj"


def written(folder: Path, family: str = "qwen3_5_moe", **sizes: Any) -> Path:
    return publish(write_tiny_model(folder, family, tied=family == "qwen3_5", dtype=torch.bfloat16, **SIZES, **sizes))


def change(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("family", "layout"), LAYOUTS)
def test_names_lead_into_a_folder_and_out_of_it(tmp_path: Path, family: str, layout: Any, tied: bool) -> None:
    """Its tensors are all that the model has, and those of the vision layers and of a predictor nobody's."""
    from bridge.layout.manifest import read_folder_manifest

    layout(write_tiny_model(tmp_path, family, tied, **SIZES))
    shape, folder_layout = check_model_folder(tmp_path), read_folder_layout(tmp_path)
    specs = {spec.name: spec for spec in read_folder_manifest(tmp_path).tensors}
    own = places({name: spec.shape for name, spec in specs.items()}, folder_layout)
    fields = own_fields(json.loads((tmp_path / "config.json").read_text()))
    expected = expected_tensors(shape, fields)
    assert {name: place.shape for name, place in own.items()} == {name: expected[name] for name in own}
    assert set(expected) - set(own) == ({"lm_head.weight"} if tied else set())
    others = {name for name in specs if own_name(name, folder_layout) is None}
    assert others == set(specs) - {place.key for place in own.values()}
    assert others == {name for name in specs if is_of_vision(name) or name.startswith("mtp.")} != set()
    assert all(own_name(key_of(name, folder_layout), folder_layout) == name for name in own)
    assert all(own_name_in_any(name) == own_name(name, folder_layout) for name in specs), "to vLLM, too"
    assert num_parameters(tmp_path) == sum(int(np.prod(expected[name])) for name in own)
    assert base_shapes(tmp_path)["model.layers.1.self_attn.o_proj"] == (1, 64, 64 if family == "qwen2_5_vl" else 128)


@pytest.mark.parametrize("family", VISION_LANGUAGE)
def test_the_config_of_the_language_model_is_that_of_transformers(tmp_path: Path, family: str) -> None:
    """In each field that both its class and the family's know, but those for images."""
    from transformers import AutoConfig

    from engine.model.build import read_config

    written(tmp_path, family)
    config = read_config(str(tmp_path))
    theirs = AutoConfig.from_pretrained(tmp_path).get_text_config().to_dict()
    of_images = ("mrope_section", "mrope_interleaved", "type")
    theirs["rope_parameters"] = {name: each for name, each in theirs["rope_parameters"].items() if name not in of_images}
    config.rope_parameters.pop("type", None)
    of_all = {"model_type", "architectures", "tie_word_embeddings", "dtype"}
    assert {name: value for name, value in config.to_dict().items() if name in theirs and name not in of_all} == {
        name: value for name, value in theirs.items() if name in config.to_dict() and name not in of_all
    }
    assert config.tie_word_embeddings == (family == "qwen3_5")
    assert layer_windows(config.to_dict()) == layer_windows(model_fields(tmp_path))


@pytest.mark.parametrize(("family", "layout"), LAYOUTS)
def test_a_written_folder_keeps_what_is_not_trained_bit_for_bit(tmp_path: Path, family: str, layout: Any) -> None:
    """Also where weights are trained in another dtype; transformers loads all of it."""
    from safetensors.torch import load_file as load_tensors

    base = layout(write_tiny_model(tmp_path / "base", family, dtype=torch.bfloat16, **SIZES))
    write_templates(base)
    held, folder_layout = load_tensors(base / "model.safetensors"), read_folder_layout(base)
    own = places({key: tensor.shape for key, tensor in held.items()}, folder_layout)
    trained = {name: place.of(held[place.key]).float() + 1 for name, place in own.items()}
    (tmp_path / "new").mkdir()
    save_weights(tmp_path / "new", as_in(base, trained.items()), Share(0))
    finish_folder(tmp_path / "new", base)
    check_model_folder(tmp_path / "new")
    assert load_tokenizer(tmp_path / "new")[0].chat_template == {"default": "plain", "tool_use": "tools"}
    found = {name: tensor for file in (tmp_path / "new").glob("*.safetensors") for name, tensor in load_tensors(file).items()}
    others = {name for name in held if own_name(name, folder_layout) is None}
    assert all(torch.equal(found[name], held[name]) and found[name].dtype is held[name].dtype for name in others)
    before, after = load_model(base).state_dict(), load_model(tmp_path / "new").state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor if is_of_vision(name) else tensor + 1), name
    assert any(is_of_vision(name) for name in before)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
def test_no_class_needs_to_be_named(tmp_path: Path, family: str) -> None:
    """vLLM gets the language model's; that of the text_config is of a part."""
    written(tmp_path, family)
    change(tmp_path, architectures=None)
    check_model_folder(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    inner = fields.get("text_config", {}) | {"architectures": ["Qwen3_5TextModel"]}
    change(tmp_path, **{"text_config": inner} if "text_config" in fields else {})
    assert "architectures" not in model_fields(tmp_path)
    check_model_folder(tmp_path)


@pytest.mark.parametrize(("family", "inner"), [("qwen3_5", True), ("qwen3_vl", True), ("gemma3", False)])
def test_embeddings_that_the_text_config_alone_ties(tmp_path: Path, family: str, inner: bool) -> None:
    """transformers and vLLM read the whole config's, or its class's default."""
    path = written(tmp_path, family) / "config.json"
    fields = json.loads(path.read_text())
    fields.pop("tie_word_embeddings", None)
    path.write_text(json.dumps(fields | {"text_config": fields["text_config"] | {"tie_word_embeddings": inner}}))
    error = model_refused(tmp_path)
    assert (error.key, error.value) == ("tie_word_embeddings", f"{not inner} (the default)")


def test_bisect_does_not_follow_their_modules(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_family(written(tmp_path, "qwen3_vl"))
    assert all(part in str(caught.value) for part in ("model_type = 'qwen3_vl'", "choices", "remedy"))


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "qwen3_5", "qwen3_vl"])
def test_a_merged_adapter_keeps_them(tmp_path: Path, family: str) -> None:
    from peft import LoraConfig as PeftConfig, get_peft_model
    from safetensors.torch import load_file as load_tensors

    from engine.peft.folder import check_peft_folder
    from megasync.models.merge import merge_adapter

    base = written(tmp_path / "base", family)
    modules = r"model\.language_model\..*\.down_proj"
    adapted = get_peft_model(load_model(base), PeftConfig(r=4, lora_alpha=8, target_modules=modules, init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    check_peft_folder(tmp_path / "adapter", LoraConfig(rank=4, alpha=8, targets=("linear_fc2",)), base)
    (tmp_path / "merged").mkdir()
    merge_adapter(tmp_path / "adapter", base, "float32", tmp_path / "merged")
    check_model_folder(tmp_path / "merged")
    held, folder_layout = load_tensors(base / "model.safetensors"), read_folder_layout(base)
    found = {name: tensor for path in (tmp_path / "merged").glob("*.safetensors") for name, tensor in load_tensors(path).items()}
    assert found.keys() == held.keys()
    assert all(torch.equal(tensor, held[name]) for name, tensor in found.items() if own_name(name, folder_layout) is None)
    merged, start = load_model(tmp_path / "merged").state_dict(), load_model(base).state_dict()
    for name, tensor in adapted.merge_and_unload().state_dict().items():
        assert torch.allclose(merged[name], tensor, atol=1e-6), name
        assert torch.equal(merged[name], start[name]) == (not name.endswith("mlp.down_proj.weight") or is_of_vision(name))


@pytest.mark.parametrize(
    ("family", "key", "fields"),
    [
        ("qwen3_5_moe", "vision_config", {"vision_config": None}),
        ("qwen3_5_moe", "text_config", {"text_config": "qwen"}),
        ("qwen3_5_moe", "text_config.model_type", {"text_config": {"model_type": "qwen3_text"}}),
        ("qwen3_5_moe", "tie_word_embeddings", {"tie_word_embeddings": True}),
        ("qwen3_5_moe", "architectures", {"architectures": ["Qwen3_5MoeModel"]}),
        ("qwen3_5_moe", "architectures", {"architectures": [7]}),
        ("qwen3_5_moe", "architectures", {"architectures": "Qwen3_5MoeForConditionalGeneration"}),
        ("qwen3_5_moe", "dtype", {"dtype": "bf16"}),
        ("qwen3_5_moe", "quantization_config", {"quantization_config": {"quant_method": "fp8"}}),
        ("gemma3", "text_config", {"text_config": None}),
        ("gemma3", "text_config.model_type", {"text_config": {"model_type": "gemma2"}}),
        ("qwen2_5_vl", "vision_config", {"vision_config": None}),
        ("qwen2_5_vl", "hidden_size", {"hidden_size": None}),
        ("qwen2_5_vl", "architectures", {"architectures": ["Qwen2_5_VLModel"]}),
        ("qwen2_5_vl", "quantization_config", {"quantization_config": {"quant_method": "awq"}}),
        ("qwen2_5_vl", "rope_type", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        ("qwen3_vl", "tie_word_embeddings", {"tie_word_embeddings": True}),
        ("qwen3_vl", "text_config.model_type", {"text_config": {"model_type": "qwen3"}}),
        ("qwen3_vl", "text_config.sliding_window", {"text_config": {"model_type": "qwen3_vl_text", "sliding_window": 8}}),
    ],
)
def test_parts_of_a_config_that_do_not_fit(tmp_path: Path, family: str, key: str, fields: dict[str, object]) -> None:
    change(written(tmp_path, family), **fields)
    error = model_refused(tmp_path)
    assert error.key == key and error.value and error.remedy


def test_tensors_that_are_missing_or_of_a_wrong_shape(tmp_path: Path) -> None:
    weights = written(tmp_path) / "model.safetensors"
    from safetensors.torch import load_file as load_tensors, save_file as save_tensors

    held = load_tensors(weights)
    for gone in (LAYER + "linear_attn.A_log", FUSED):
        save_tensors({name: tensor for name, tensor in held.items() if name != gone}, weights)
        missing = model_refused(tmp_path).lines["missing"]
        assert gone in missing or LAYER + "mlp.experts.0.gate_proj.weight" in missing
    save_tensors({**held, FUSED: held[FUSED].transpose(1, 2).contiguous()}, weights)
    assert FUSED in model_refused(tmp_path).headline and "[4, 64, 128]" in model_refused(tmp_path).headline
    again = {LAYER + "mlp.experts.0.gate_proj.weight": held[FUSED][0, :64].clone()}
    again["model.norm.weight"] = held["model.language_model.norm.weight"] + 1
    for name, tensor in again.items():  # beside those of all experts, or as in a text folder
        save_tensors({**held, name: tensor}, weights)
        assert model_refused(tmp_path).lines["twice"] == name.replace("language_model.", "")
    save_tensors({**held, "model.audio.weight": torch.ones(2)}, weights)
    assert model_refused(tmp_path).lines["tensors"] == "model.audio.weight"
    save_tensors({name: tensor for name, tensor in held.items() if not is_of_vision(name)}, weights)
    assert "model.visual." in model_refused(tmp_path).headline


def test_data_with_images_is_refused(tmp_path: Path) -> None:
    """Where the model would see them; other models' data may have more columns."""
    import pyarrow as pa
    from pyarrow import parquet

    path = write_runnable(tmp_path)
    text, model = load_config(path, []), written(tmp_path / "vision")
    line = {"question": "1+1=", "answer": "2"}
    rows = [write(tmp_path / "rows.jsonl", json.dumps(line | {"image": "a.png"}) + "\n")]
    rows.append(tmp_path / "rows.parquet")
    parquet.write_table(pa.Table.from_pylist([line | {"seen": {"bytes": b"png", "path": "a.png"}}]), rows[1])
    for data, column in zip(rows, ("image", "seen"), strict=True):
        assert read_files(text.model_copy(update={"data": text.data.model_copy(update={"train": str(data)})}))
        with pytest.raises(ConfigError) as caught:
            read_files(load_config(path, [f"model.path={model}", f"data.train={data}"]))
        assert all(part in str(caught.value) for part in (repr(column), str(data), "remedy"))
    parts = [{"type": "text", "text": "1+1="}, {"type": "image", "image": "a.png"}]
    talk = write(tmp_path / "talk.jsonl", json.dumps({"question": [{"role": "user", "content": parts}], "answer": "2"}) + "\n")
    assert "'image'" in refusal(path, f"data.train={talk}").headline
