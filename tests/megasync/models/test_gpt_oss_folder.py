"""Folders of gpt-oss: what is refused before anything starts, with key and value; MXFP4 of a wrong shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megasync.models.folder import check_model_folder
from tests.support.config_files import model_refused, refusal, write_model, write_runnable

YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
YARN |= {"original_max_position_embeddings": 4096}
GPT_OSS: dict[str, Any] = {"model_type": "gpt_oss", "attention_bias": True, "rope_parameters": YARN}
GPT_OSS |= {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": 128}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
SLIDING, FULL = "sliding_attention", "full_attention"


def test_sizes_of_gpt_oss(tmp_path: Path) -> None:
    shape = check_model_folder(write_model(tmp_path, **GPT_OSS))
    assert (shape.num_experts, shape.moe_intermediate_size, shape.num_experts_per_tok) == (4, 64, 2)
    check_model_folder(write_model(tmp_path, **GPT_OSS, layer_types=[SLIDING, FULL] * 2, swiglu_limit=7.0))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"layer_types": [FULL, SLIDING] * 2}, "layer_types"),
        ({"sliding_window": None}, "layer_types"),
        ({"attention_bias": False}, "attention_bias"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha"),
        ({"swiglu_limit": 6.0}, "swiglu_limit"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_type"),
        ({"rope_parameters": {key: value for key, value in YARN.items() if key != "beta_slow"}}, "beta_slow"),
        ({"rope_parameters": YARN | {"original_max_position_embeddings": 0}}, "original_max_position_embeddings"),
        ({"rope_parameters": YARN | {"beta_fast": "32"}}, "beta_fast"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok"),
    ],
)
def test_unsupported_gpt_oss(tmp_path: Path, changes: dict[str, object], key: str) -> None:
    error = model_refused(write_model(tmp_path, **{**GPT_OSS, **changes}))
    assert error.key == key


@pytest.mark.parametrize("part", ["gate_up_proj_blocks", "down_proj_scales"])
def test_mxfp4_of_a_wrong_shape_or_dtype(tmp_path: Path, part: str) -> None:
    weights = write_model(tmp_path, **GPT_OSS, **MXFP4) / "model.safetensors"
    tensors = load_file(weights)
    tensors |= {name: tensors[name].astype(np.uint8) for name in tensors if name.endswith(("_blocks", "_scales"))}
    save_file(tensors, weights)
    check_model_folder(tmp_path)
    name = f"model.layers.1.mlp.experts.{part}"
    save_file({**tensors, name: tensors[name][:, :-1]}, weights)
    assert name in model_refused(tmp_path).headline
    save_file({other: tensor for other, tensor in tensors.items() if other != name}, weights)
    assert model_refused(tmp_path).lines["missing"] == name
    save_file({**tensors, name: tensors[name].astype(np.float16)}, weights)
    assert name in model_refused(tmp_path).lines["tensors"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["engine.lora.rank=8"], "engine.lora.targets"),
        (["engine.recompute=selective"], "engine.recompute_modules"),
        (["engine.parallel.tensor=2"], "engine.parallel.sequence"),
        (["model.dtype=float16"], "model.dtype"),
    ],
)
def test_layouts_that_gpt_oss_has_not(tmp_path: Path, overrides: list[str], key: str) -> None:
    from megasync.tools.assets.command import build_tokenizer

    path = write_model(tmp_path / "other", **GPT_OSS)
    build_tokenizer().save_pretrained(path)
    assert refusal(write_runnable(tmp_path), f"model.path={path}", *overrides).key == key
