"""PEFT's folders: adapters of other kinds than W + scale B A are refused by their field, those that fit compute as in PEFT."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import LoraConfig
from engine.peft.fields import OFF, PEFT_VERSION, PLAIN, READ, WITHOUT_EFFECT, check_fields
from engine.peft.folder import base_shapes, check_peft_folder, target_of
from tests.engine.model.lora_cases import write_peft_adapter
from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny_model

FIELDS = {field.name: field for field in dataclasses.fields(peft.LoraConfig)}
LORA = LoraConfig(rank=4, alpha=8.0)
STARTS = ("gaussian", "orthogonal", "mica")
OTHER_VALUES: dict[str, list[Any]] = {  # of each field that can make another model of an adapter
    "peft_type": ["ADALORA", "LOHA", "VERA", None],
    "task_type": ["SEQ_CLS", "FEATURE_EXTRACTION"],
    "bias": ["all", "lora_only"],
    "init_lora_weights": ["pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga", "something_new"],
    "alora_invocation_tokens": [[1, 2]],
    "use_dora": [True, "false"],
    "use_qalora": [True],
    "lora_bias": [True],
    "fan_in_fan_out": [True],
    "rank_pattern": [{"q_proj": 8}],
    "alpha_pattern": [{"q_proj": 8}],
    "modules_to_save": [["lm_head"]],
    "layer_replication": [[[0, 2], [1, 2]]],
    "trainable_token_indices": [[3], {"embed_tokens": [3]}],
    "megatron_config": [{"tensor_model_parallel_size": 2}],
    "velora_config": [{}],
    "monteclora_config": [{"num_samples": 2}],
    "use_bdlora": [{"nblocks": 2}],
    "arrow_config": [{}],
    "kasa_config": [{"beta": 1e-4}],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("peft")


@pytest.fixture(scope="module")
def model(root: Path) -> str:
    return str(write_tiny_model(root / "model", "qwen3", True, num_hidden_layers=2))


@pytest.fixture(scope="module")
def adapter(root: Path, model: str) -> Path:
    return write_peft_adapter(root / "adapter", model, shared=True)


def refused(fields: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match=r"adapter_config\.json: ") as caught:
        check_fields(Path("adapter_config.json"), {"peft_type": "LORA", **fields})
    return str(caught.value)


def test_every_field_of_peft_is_known() -> None:
    """A field of a later version has to be looked at: does it change what an adapter computes?"""
    assert peft.__version__ == PEFT_VERSION
    assert sorted([*READ, *WITHOUT_EFFECT, *PLAIN]) == sorted(FIELDS)
    assert set(OTHER_VALUES) == set(PLAIN)
    variants = {name for name, field in FIELDS.items() if field.metadata.get("is_lora_variant")}
    assert len(variants) >= 7 and variants <= set(PLAIN)


def test_what_peft_has_by_default_is_plain() -> None:
    written = json.loads(json.dumps(peft.LoraConfig().to_dict()))
    check_fields(Path("adapter_config.json"), written)
    for name in PLAIN.keys() - {"peft_type"}:
        check_fields(Path("adapter_config.json"), {key: value for key, value in written.items() if key != name})


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in OTHER_VALUES.items() for value in values])
def test_another_kind_is_refused_by_its_field(name: str, value: Any) -> None:
    message = refused({name: value})
    assert message.startswith(f"adapter_config.json: {name} = {value!r} is not supported")
    converted = str(value).lower().startswith(("pissa", "olora", "corda", "lora_ga"))
    assert ("path_initial_model_for_weight_conversion" in message) == converted


def test_a_field_that_is_not_known_is_refused_unless_it_is_off() -> None:
    for value in OFF:
        check_fields(Path("adapter_config.json"), {"peft_type": "LORA", "of_the_future": value})
    for value in (True, 0, 1, "x", [0]):
        assert refused({"of_the_future": value}).startswith(f"adapter_config.json: of_the_future = {value!r} is a field")


@pytest.mark.parametrize("start", [*STARTS, "eva", True, False, "pissa", "pissa_niter_4", "olora"])
def test_the_base_is_changed_by_the_starts_that_are_refused(start: Any) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(16, 16, bias=False)

    built = Model()
    before = built.linear.weight.detach().clone()
    peft.get_peft_model(built, peft.LoraConfig(r=4, target_modules=["linear"], init_lora_weights=start))
    changed = not torch.equal(built.linear.base_layer.weight, before)
    assert changed == (start not in PLAIN["init_lora_weights"])


def test_adapters_with_other_starts_compute_as_in_peft(root: Path, model: str) -> None:
    paths = [str(write_peft_adapter(root / start, model, shared=True, start=start)) for start in STARTS]
    cases = [{"path": model, "lora": {"rank": 4, "alpha": 8.0, "adapter_path": path}} for path in paths]
    arguments = {"cases": cases, "folder": str(root / "again")}
    for start, result in zip(STARTS, run_ranks(1, "tests.engine.model.lora_cases:against_peft", arguments)[0], strict=True):
        assert result["on"] < 1e-5 and result["effect"] > 0.1, (start, result)


def test_experts_beside_fused_linears_that_need_more_ranks(root: Path) -> None:
    """q and v have an A of their own, so that all linears of the engine have twice the ranks."""
    path = str(write_tiny_model(root / "experts", "qwen3_moe", num_hidden_layers=1))
    targets = {"modules": ("q_proj", "v_proj"), "parameters": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")}
    adapter = write_peft_adapter(root / "mixed", path, shared=False, **targets)
    cases = [{"path": path, "lora": {"rank": 8, "alpha": 16.0, "adapter_path": str(adapter)}}]
    arguments = {"cases": cases, "folder": str(root / "mixed_again")}
    (result,) = run_ranks(1, "tests.engine.model.lora_cases:against_peft", arguments)[0]
    assert max(result["on"], result["again"]) < 1e-5 and result["effect"] > 0.1, result


def test_a_pissa_folder_is_refused_until_peft_has_converted_it(root: Path, model: str) -> None:
    from transformers import AutoModelForCausalLM

    config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights="pissa", target_modules=["o_proj"], task_type="CAUSAL_LM")
    built = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)
    built.peft_config["default"].init_lora_weights = True  # as PEFT's guide has it
    built.save_pretrained(root / "start")
    built.peft_config["default"].init_lora_weights = "pissa"
    built.save_pretrained(root / "pissa")
    with pytest.raises(ValueError, match="init_lora_weights = 'pissa' is not supported"):
        check_peft_folder(root / "pissa", LORA, model)
    built.save_pretrained(root / "converted", path_initial_model_for_weight_conversion=str(root / "start"))
    check_peft_folder(root / "converted", LoraConfig(rank=8, alpha=16.0), model)


# -------------------------------------------------------------------------------------------------------- tensors


def rewritten(adapter: Path, to: Path, change: Any, **fields: Any) -> Path:
    """A copy of an adapter whose tensors `change` has changed."""
    to.mkdir()
    config = json.loads((adapter / "adapter_config.json").read_text()) | fields
    (to / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, to / "adapter_model.safetensors")
    return to


A = "base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("key", "tensor", "words"),
    [
        (A.replace("lora_A", "lora_magnitude_vector"), torch.ones(128), "is no adapter of one of"),
        ("base_model.model.model.embed_tokens.weight", torch.ones(8, 8), "is no adapter of one of"),
        ("base_model.model.lm_head.lora_A.weight", torch.ones(4, 128), "is no adapter of one of"),
        (A.replace("o_proj", "gate"), torch.ones(4, 128), "is no adapter of one of"),
        (A.replace("lora_A", "lora_B").replace("weight", "bias"), torch.ones(128), "is no adapter of one of"),
        (A.replace("layers.0", "layers.2"), torch.ones(4, 128), "layers.2.self_attn.o_proj has only lora_A"),
        (A, torch.ones(2, 128), "adapter_config.json: r = 4, and"),
        (A, torch.ones(4, 64), "[4, 128] and [128, 4] are expected"),
        (A, torch.ones(4, 128, dtype=torch.int8), "of the dtype I8"),
    ],
)
def test_every_tensor_has_a_place_in_the_model(
    adapter: Path, model: str, tmp_path: Path, key: str, tensor: torch.Tensor, words: str
) -> None:
    folder = rewritten(adapter, tmp_path / "other", lambda tensors: tensors.update({key: tensor}))
    with pytest.raises(ValueError, match=re.escape(words)):
        check_peft_folder(folder, LORA, model)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"r": 8}, "r = 8, and base_model"),
        ({"target_modules": ["q_proj", "k_proj"]}, "does not name model.layers.0.mlp.down_proj"),
        ({"target_modules": ".*q_proj"}, "does not name model.layers.0.mlp.down_proj"),
        ({"target_modules": None}, "target_modules = None does not name"),
        ({"exclude_modules": ["o_proj"]}, "does not name model.layers.0.self_attn.o_proj"),
        ({"layers_to_transform": [1]}, "does not name model.layers.0."),
        ({"target_modules": "all-linear"}, ""),
        ({"target_modules": r".*\.(self_attn|mlp)\..*_proj", "layers_to_transform": []}, ""),
    ],
)
def test_a_config_agrees_with_its_tensors(adapter: Path, model: str, tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    folder = rewritten(adapter, tmp_path / "other", lambda tensors: None, **fields)
    if not words:
        check_peft_folder(folder, LORA, model)
        return
    with pytest.raises(ValueError, match=rf"adapter_config\.json: .*{re.escape(words)}"):
        check_peft_folder(folder, LORA, model)


def test_linears_that_the_config_names_have_tensors(adapter: Path, model: str, tmp_path: Path) -> None:
    def take_out(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "layers.1.self_attn.q_proj" in name]:
            del tensors[name]

    with pytest.raises(ValueError, match=r"names model\.layers\.1\.self_attn\.q_proj, and adapter_model.* has no adapter for it"):
        check_peft_folder(rewritten(adapter, tmp_path / "cut", take_out), LORA, model)


@pytest.mark.parametrize("is_rslora", [True, False])
def test_the_remedy_for_another_scale_is_a_config_that_fits(adapter: Path, model: str, tmp_path: Path, is_rslora: bool) -> None:
    folder = rewritten(adapter, tmp_path / "scaled", lambda tensors: None, use_rslora=is_rslora)
    for wrong in (LoraConfig(rank=4, alpha=3.0, rslora=not is_rslora), LoraConfig(rank=2, alpha=8.0, rslora=not is_rslora)):
        with pytest.raises(ValueError, match=rf"engine\.lora\.rslora={str(is_rslora).lower()} engine\.lora\.alpha=8$"):
            check_peft_folder(folder, wrong, model)
    check_peft_folder(folder, LoraConfig(rank=4, alpha=8.0, rslora=is_rslora), model)


def test_a_layer_that_the_model_has_not_is_named(adapter: Path, model: str, tmp_path: Path) -> None:
    def move(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "layers.1." in name]:
            tensors[name.replace("layers.1.", "layers.7.")] = tensors.pop(name)

    with pytest.raises(ValueError, match=r"has no model\.layers\.7\."):
        check_peft_folder(rewritten(adapter, tmp_path / "moved", move), LORA, model)


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral", "glm4_moe", "deepseek_v3", "gemma3_text"])
def test_shapes_of_the_base_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """Of all that may have an adapter."""
    from transformers import AutoModelForCausalLM

    path = write_tiny_model(tmp_path / family, family, num_hidden_layers=2)
    found = base_shapes(path)
    for name, tensor in AutoModelForCausalLM.from_pretrained(path).named_parameters():
        if tensor.ndim > 1 and target_of(linear := name.removesuffix(".weight")):
            assert found[linear] == (1, *tensor.shape)[-3:], name


def test_values_that_are_not_finite_are_refused(adapter: Path, model: str, tmp_path: Path) -> None:
    folder = rewritten(adapter, tmp_path / "nan", lambda tensors: tensors[A].fill_(float("nan")))
    arguments = {"path": model, "cases": [{"rank": 4, "alpha": 8.0, "adapter_path": str(folder)}]}
    (message,) = run_ranks(1, "tests.engine.model.lora_cases:refusals", arguments)[0]
    assert f"{A} has values that are not finite" in message
