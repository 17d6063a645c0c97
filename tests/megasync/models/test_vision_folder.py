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
from engine.folder import VISION, key_of, own_fields, own_name, places
from engine.peft.folder import base_shapes
from megasync.data.load import read_files
from megasync.config.errors import ConfigError
from megasync.config.load import load_config
from megasync.models.folder import check_model_folder
from megasync.models.tensors import expected_tensors, num_parameters
from tests.support.config_files import model_refused, refusal, write, write_runnable
from tests.support.tiny_models import publish, write_tiny_model

LAYER = "model.language_model.layers.0."
FUSED = LAYER + "mlp.experts.gate_up_proj"


def written(folder: Path, family: str = "qwen3_5_moe", **sizes: Any) -> Path:
    sizes = {"vocab_size": 131, "hidden_size": 64, "num_hidden_layers": 2, **sizes}
    return publish(write_tiny_model(folder, family, tied=family == "qwen3_5", dtype=torch.bfloat16, **sizes))


def change(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_names_lead_into_a_folder_and_out_of_it(tmp_path: Path, family: str) -> None:
    """Its tensors are all that the model has, and those of the vision layers and of the predictor nobody's."""
    from bridge.layout.manifest import read_folder_manifest

    shape = check_model_folder(written(tmp_path, family))
    specs = {spec.name: spec for spec in read_folder_manifest(tmp_path).tensors}
    own = places({name: spec.shape for name, spec in specs.items()}, family)
    fields = own_fields(json.loads((tmp_path / "config.json").read_text()))
    expected = expected_tensors(shape, fields)
    assert {name: place.shape for name, place in own.items()} == {name: expected[name] for name in own}
    assert set(expected) - set(own) == ({"lm_head.weight"} if family == "qwen3_5" else set())
    others = {name for name in specs if own_name(name, family) is None}
    assert others == set(specs) - {place.key for place in own.values()}
    assert any(name.startswith(VISION) for name in others) and "mtp.fc.weight" in others
    assert all(own_name(key_of(name, family), family) == name for name in own)
    assert num_parameters(tmp_path) == sum(int(np.prod(expected[name])) for name in own)
    assert base_shapes(tmp_path)["model.layers.1.self_attn.o_proj"] == (1, 64, 128)


def test_a_written_folder_keeps_what_is_not_trained_bit_for_bit(tmp_path: Path) -> None:
    """Also where weights are trained in another dtype; transformers loads all of it."""
    from safetensors.torch import load_file as load_tensors
    from transformers import AutoModelForImageTextToText

    base = written(tmp_path / "base")
    held = load_tensors(base / "model.safetensors")
    own = places({key: tensor.shape for key, tensor in held.items()}, "qwen3_5_moe")
    trained = {name: place.of(held[place.key]).float() + 1 for name, place in own.items()}
    (tmp_path / "new").mkdir()
    save_weights(tmp_path / "new", as_in(base, trained.items()), Share(0))
    finish_folder(tmp_path / "new", base)
    check_model_folder(tmp_path / "new")
    found = {name: tensor for file in (tmp_path / "new").glob("*.safetensors") for name, tensor in load_tensors(file).items()}
    others = {name for name in held if own_name(name, "qwen3_5_moe") is None}
    assert all(torch.equal(found[name], held[name]) and found[name].dtype is held[name].dtype for name in others)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "new", dtype="auto").state_dict()
    assert torch.equal(loaded[FUSED], held[FUSED].float() + 1)
    vision = [name for name in others if name.startswith(VISION)]
    assert vision and all(torch.equal(loaded[name], held[name].float()) for name in vision)


def test_a_merged_adapter_keeps_them(tmp_path: Path) -> None:
    from peft import LoraConfig as PeftConfig, get_peft_model
    from safetensors.torch import load_file as load_tensors
    from transformers import AutoModelForCausalLM

    from engine.peft.folder import check_peft_folder
    from megasync.models.merge import merge_adapter

    base = written(tmp_path / "base", "qwen3_5")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = get_peft_model(model, PeftConfig(r=4, lora_alpha=8, target_modules=["down_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    check_peft_folder(tmp_path / "adapter", LoraConfig(rank=4, alpha=8, targets=("linear_fc2",)), base)
    (tmp_path / "merged").mkdir()
    merge_adapter(tmp_path / "adapter", base, "float32", tmp_path / "merged")
    check_model_folder(tmp_path / "merged")
    held, expected = load_tensors(base / "model.safetensors"), adapted.merge_and_unload().state_dict()
    found = {name: tensor for path in (tmp_path / "merged").glob("*.safetensors") for name, tensor in load_tensors(path).items()}
    assert set(found) == set(held)
    for name, tensor in found.items():
        own = own_name(name, "qwen3_5")
        assert torch.equal(tensor, held[name]) if own is None else torch.allclose(tensor, expected[own], atol=1e-6), name


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("vision_config", {"vision_config": None}),
        ("text_config", {"text_config": "qwen"}),
        ("text_config.model_type", {"text_config": {"model_type": "qwen3_text"}}),
        ("tie_word_embeddings", {"tie_word_embeddings": True}),
        ("architectures", {"architectures": ["Qwen3_5MoeModel"]}),
        ("quantization_config", {"quantization_config": {"quant_method": "fp8"}}),
    ],
)
def test_parts_of_a_config_that_do_not_fit(tmp_path: Path, key: str, fields: dict[str, object]) -> None:
    written(tmp_path)
    change(tmp_path, **fields)
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
    save_tensors({**held, "model.audio.weight": torch.ones(2)}, weights)
    assert model_refused(tmp_path).lines["tensors"] == "model.audio.weight"
    save_tensors({name: tensor for name, tensor in held.items() if not name.startswith(VISION)}, weights)
    assert VISION in model_refused(tmp_path).headline


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
