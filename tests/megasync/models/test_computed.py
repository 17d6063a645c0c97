"""Folders whose weights are the same, and what they compute with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from engine.checkpoint.hf_folder import _of_weights
from engine.config import FAMILIES, LIKE
from megasync.models.computed import different_fields
from tests.support.tiny_models import WITH_VISION, publish, write_tiny_model


@pytest.mark.parametrize("family", [*FAMILIES, *WITH_VISION])
def test_what_a_run_writes_computes_as_its_start_model(tmp_path: Path, family: str) -> None:
    own = write_tiny_model(tmp_path / "own", family, num_hidden_layers=2)
    path = publish(own) / "config.json" if family in WITH_VISION else own / "config.json"
    fields = json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}
    path.write_text(json.dumps(fields))
    written = folder(tmp_path / "written", _of_weights(fields, "bfloat16"))
    assert different_fields(own, written) == []
    fields.get("text_config", fields)["rms_norm_eps"] = 0.5
    assert different_fields(own, folder(tmp_path / "written", fields)) == ["rms_norm_eps"]


def folder(path: Path, fields: dict[str, Any]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(fields))
    return path


SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.2079441541679836}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": YARN},
        {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 2},
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8, "no_rope_layers": [1, 1, 1, 0, 1]},
    ],
)
def test_a_folder_that_transformers_saved_again_computes_the_same(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    own = folder(tmp_path / "own", {"model_type": family, **SIZES, **fields})
    known = LIKE.get(family, family)
    AutoConfig.for_model(known, **SIZES, **json.loads(json.dumps(fields))).save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    harmless = {"max_position_embeddings": 99, "attention_dropout": 0.1, "output_hidden_states": True, "unsloth_version": "1"}
    assert different_fields(own, folder(tmp_path / "again", again | harmless | {"model_type": family})) == []


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("llama", "rope_theta", 5.0),
        ("llama", "rope_scaling", {"type": "linear", "factor": 4.0}),
        ("qwen2", "use_sliding_window", True),
        ("mistral", "sliding_window", 8),
        ("gemma3_text", "rope_local_base_freq", 5e4),
        ("smollm3", "no_rope_layers", [1, 1, 1, 1]),
        ("smollm3", "no_rope_layer_interval", 2),
        ("qwen3_moe", "num_experts_per_tok", 3),
        ("qwen3", "rms_norm_eps", 1e-3),
    ],
)
def test_what_computes_something_else_is_found(tmp_path: Path, family: str, name: str, value: object) -> None:
    fields = {"model_type": family, **SIZES, "max_window_layers": 0}
    assert different_fields(folder(tmp_path / "own", fields), folder(tmp_path / "other", fields | {name: value}))
