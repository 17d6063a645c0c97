"""engine.lora against names of other libraries, the model's sizes and a PEFT folder: all before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.config import ALL_TARGETS, TARGET_OF
from megasync.checks.check import check_config
from megasync.config.load import load_config
from tests.support.config_files import cannot_run, refusal, refused, write_model

LINEARS = {"q_proj": (128, 128), "v_proj": (64, 128), "o_proj": (128, 128)}  # of config_files.MODEL
RIGHT = {
    "in_proj": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba"),
    "out_proj": ("linear_attn.out_proj",),  # the same name in both
    "linear_qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj", "linear_q", "linear_v", "model.layers.3.self_attn.q_proj"),
    "linear_proj": ("o_proj", "self_attn.o_proj"),
    "linear_fc1": ("gate_proj", "up_proj", "gate_up_proj", "mlp.experts.gate_up_proj", "w1", "w3", "fc1"),
    "linear_fc2": ("down_proj", "mlp.experts.down_proj", "w2", "fc2"),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
}


# ------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(("own", "other"), [(own, other) for own, others in RIGHT.items() for other in others])
def test_names_of_other_libraries_are_refused_with_ours(runnable: Path, own: str, other: str) -> None:
    message = refused(runnable, f"engine.lora.targets=[{other}]")
    assert f"{other} lies in {own}" in message
    assert message.endswith(f"engine.lora.targets=[{own}]")
    assert "nearest" not in message


def test_names_are_those_of_the_adapters_that_are_read() -> None:
    assert set(TARGET_OF.values()) == set(RIGHT) == set(ALL_TARGETS)
    assert set(TARGET_OF) - {"out_proj"} <= {name for names in RIGHT.values() for name in names}


def test_a_list_is_translated_whole(runnable: Path) -> None:
    message = refused(runnable, "engine.lora.targets=[q_proj,v_proj,linear_proj,down_proj]")
    assert message.endswith("engine.lora.targets=[linear_qkv,linear_proj,linear_fc2]")
    for every in ("all-linear", "[all-linear]", "all"):
        message = refused(runnable, f"engine.lora.targets={every}")
        assert "all linears are the default" in message and "[linear_qkv,linear_proj,linear_fc1,linear_fc2]" in message


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens", "gate", "router", "c_proj", "dense", "proj", ".*_proj"])
def test_no_name_is_guessed(runnable: Path, name: str) -> None:
    message = refused(runnable, f'engine.lora.targets=["{name}"]')
    assert message.startswith(f"engine.lora.targets = {name!r}: ") and "nearest" not in message
    message = refused(runnable, f'engine.lora.targets=["{name}",o_proj]')
    assert message.endswith("engine.lora.targets=[linear_proj]")


# ----------------------------------------------------------------------------------------------------------- folders


def write_adapter(folder: Path, *, shared: bool, rank: int = 4, dtype: Any = np.float16, **fields: Any) -> Path:
    """Of PEFT's form, on all layers; `shared`: q and v have one A."""
    folder.mkdir()
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for layer in range(4):
        for number, (name, (rows, columns)) in enumerate(LINEARS.items()):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_"
            tensors[f"{prefix}A.weight"] = np.full((rank, columns), 1 if shared else number, dtype)
            tensors[f"{prefix}B.weight"] = np.zeros((rows, rank), dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    given = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": list(LINEARS)}
    (folder / "adapter_config.json").write_text(json.dumps(given | fields))
    return folder


@pytest.mark.parametrize(("shared", "rank", "alpha"), [(True, 4, "8"), (False, 8, "16")])
def test_the_rank_that_an_adapter_needs_is_known_before_the_start(
    runnable: Path, tmp_path: Path, shared: bool, rank: int, alpha: str
) -> None:
    """Of fused linears whose A differ it is the sum of theirs."""
    start = f"engine.lora.adapter_path={write_adapter(tmp_path / 'adapter', shared=shared)}"
    for wrong in {4, 8, 12, 16} - {rank}:
        message = cannot_run(runnable, f"engine.lora.rank={wrong}", start)
        assert message.endswith(f"write engine.lora.rank={rank} engine.lora.alpha={alpha}")
    message = cannot_run(runnable, f"engine.lora.rank={rank}", "engine.lora.alpha=5", start)
    assert message.endswith(f"write engine.lora.alpha={alpha}")
    check_config(load_config(runnable, [f"engine.lora.rank={rank}", f"engine.lora.alpha={alpha}", start]), 1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' is not supported"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens = [1, 2] is not supported"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config = {'top_k': 3} is not supported"),
        ({"of_the_future": True}, "of_the_future = True is a field that is not known"),
        ({"r": 0}, "r is 0, a whole number above 0"),
        ({"r": 4.5}, "r is 4.5, a whole number"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan, a number above 0"),
        ({"lora_alpha": -8}, "lora_alpha is -8, a number above 0"),
        ({"r": 8, "lora_alpha": 16}, "is [4, 128], of rank 4"),
    ],
)
def test_another_kind_of_adapter_is_refused_by_its_field(
    runnable: Path, tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    adapter = write_adapter(tmp_path / "adapter", shared=True, **fields)
    rank = fields.get("r") or 4
    error = refusal(runnable, f"engine.lora={{rank: {int(rank)}, alpha: {2 * int(rank)}, adapter_path: {adapter}}}")
    assert words in str(error) and (error.key, error.value) == ("engine.lora.adapter_path", str(adapter)) and error.remedy


def test_an_adapter_of_another_model_is_refused_by_its_shapes(runnable: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", shared=True)
    lora = f"engine.lora={{rank: 4, alpha: 8, adapter_path: {adapter}}}"
    check_config(load_config(runnable, [lora]), 1)
    write_model(runnable.parent / "model", num_hidden_layers=1)
    assert "has no model.layers.1.self_attn." in cannot_run(runnable, lora, world_size=1)
    write_model(runnable.parent / "model", num_key_value_heads=4)
    assert "v_proj has A [4, 128] and B [64, 4]" in cannot_run(runnable, lora, world_size=1)


@pytest.mark.parametrize(
    ("changes", "target", "smallest"),
    [
        ({"num_attention_heads": 2, "num_key_value_heads": 1}, "linear_proj", 64),
        ({"num_attention_heads": 2, "num_key_value_heads": 1}, "linear_qkv", 128),
        ({"intermediate_size": 48}, "linear_fc2", 48),
        ({"intermediate_size": 48}, "linear_qkv", 128),
    ],
)
def test_the_rank_is_no_larger_than_a_dimension_of_what_is_adapted(
    runnable: Path, changes: dict[str, int], target: str, smallest: int
) -> None:
    """As in the engine (engine/model/lora.py), where linears of attention may be smaller than the model's hidden size."""
    write_model(runnable.parent / "model", **changes)
    check_config(load_config(runnable, [f"engine.lora.targets=[{target}]", f"engine.lora.rank={smallest}"]), 1)
    message = cannot_run(runnable, f"engine.lora.targets=[{target}]", f"engine.lora.rank={smallest + 1}", world_size=1)
    assert f"larger than the model's smallest dimension, {smallest}" in message


def test_a_link_of_a_cache_whose_target_is_gone_is_named(runnable: Path, tmp_path: Path) -> None:
    weights = write_adapter(tmp_path / "adapter", shared=True) / "adapter_model.safetensors"
    weights.unlink()
    weights.symlink_to("../../blobs/0123")
    error = refusal(runnable, "engine.lora.rank=4", f"engine.lora.adapter_path={weights.parent}")
    assert f"{weights} is a link to ../../blobs/0123, which is not there" in str(error)
    assert (error.key, error.remedy) == ("engine.lora.adapter_path", "download it again")
