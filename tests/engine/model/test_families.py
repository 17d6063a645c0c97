"""Families and types of rotary embedding against transformers and their own folders, with a vocabulary that two does not divide.

Mixtures of experts in more layouts: test_experts.py; on their way to vLLM: test_sync_trainer.py.

    python -m pytest tests/engine/model/test_families.py
"""

from __future__ import annotations

import json
from collections import OrderedDict
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig

from bridge.vllm.weights import experts
from engine.sample import Sample
from tests.engine.engine_cases import random_samples
from tests.support.ranks import run_ranks
from tests.support.tiny_models import LLAMA3, YARN, publish, rename, write_tiny_model

ODD = 131  # tokens; two ranks pad it to 256
WINDOW = {"use_sliding_window": True, "sliding_window": 8}  # samples have up to 38 tokens
GROUPS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}  # of 8 experts
MODELS: dict[str, tuple[str, bool, dict[str, Any]]] = {  # family, tied, fields of its config
    "deepseek_v3": ("deepseek_v3", False, {**GROUPS, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}}),
    "deepseek_v3, whole queries": ("deepseek_v3", False, {"q_lora_rank": None, "first_k_dense_replace": 0}),
    "deepseek_v3, stages": ("deepseek_v3", False, {"rope_parameters": YARN, "num_nextn_predict_layers": 1}),
    "gemma3_text": ("gemma3_text", True, {}),
    "gemma3_text, stages": ("gemma3_text", False, {"num_hidden_layers": 3}),
    "gemma3, published": ("gemma3", True, {}),
    "gemma3, renamed": ("gemma3", False, {}),
    "glm4_moe": ("glm4_moe", False, {**GROUPS, "use_qk_norm": True, "attention_bias": False, "rope_parameters": LLAMA3}),
    "glm4_moe, tied": ("glm4_moe", True, {"n_shared_experts": 2, "num_nextn_predict_layers": 1}),
    "glm4_moe, stages": ("glm4_moe", False, {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.25}}),
    "glm4_moe_lite": ("glm4_moe_lite", False, {**GROUPS, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}}),
    "glm4_moe_lite, expert": ("glm4_moe_lite", False, {"q_lora_rank": None, "mlp_layer_types": ["sparse"] * 2}),
    "glm4_moe_lite, stages": ("glm4_moe_lite", False, {"num_nextn_predict_layers": 1, "n_shared_experts": 2}),
    "gpt_oss": ("gpt_oss", False, {"swiglu_limit": 0.5} if hasattr(GptOssConfig(), "swiglu_limit") else {}),  # not in 5.17
    "gpt_oss, expert": ("gpt_oss", False, {}),
    "gpt_oss, stages": ("gpt_oss", False, {}),
    "kimi_k2": ("kimi_k2", False, {"rope_parameters": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0}}),
    "llama": ("llama", True, {"rope_parameters": LLAMA3}),
    "llama, linear": ("llama", False, {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}),
    "mistral": ("mistral", False, {"sliding_window": None}),
    "mistral, tied": ("mistral", True, {"sliding_window": 8}),
    "mixtral": ("mixtral", False, {"head_dim": None}),
    "mixtral, tied": ("mixtral", True, {"num_local_experts": 8, "sliding_window": 8}),
    "olmo3": ("olmo3", False, {"layer_types": ["sliding_attention", "full_attention"]}),
    "olmo3, tied": ("olmo3", True, {"num_key_value_heads": 4, "layer_types": ["full_attention", "sliding_attention"]}),
    "olmo3, stages": ("olmo3", False, {"num_hidden_layers": 4}),
    "qwen2": ("qwen2", False, {**WINDOW, "max_window_layers": 0}),
    "qwen2_5_vl, published": ("qwen2_5_vl", True, {"num_key_value_heads": 4}),
    "qwen2_5_vl, renamed": ("qwen2_5_vl", False, {**WINDOW, "max_window_layers": 0}),
    "qwen2_moe": ("qwen2_moe", False, WINDOW),
    "qwen2_moe, tied": ("qwen2_moe", True, {"norm_topk_prob": True}),
    "qwen3": ("qwen3", True, {"rope_parameters": YARN, **WINDOW, "max_window_layers": 1}),
    "qwen3_5_text": ("qwen3_5_text", False, {}),
    "qwen3_5_text, tied": ("qwen3_5_text", True, {"linear_num_key_heads": 4, "linear_value_head_dim": 16}),
    "qwen3_5_text, stages": ("qwen3_5_text", False, {"num_hidden_layers": 4}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", False, {}),
    "qwen3_5_moe_text, expert": ("qwen3_5_moe_text", False, {}),
    "qwen3_5_moe, published": ("qwen3_5_moe", False, {}),
    "qwen3_moe": ("qwen3_moe", False, WINDOW),
    "qwen3_next": ("qwen3_next", True, {"linear_num_key_heads": 4, "norm_topk_prob": False}),
    "qwen3_vl, published": ("qwen3_vl", True, {}),
    "qwen3_vl, stages": ("qwen3_vl", False, {"rms_norm_eps": 1e-5}),
    "seed_oss": ("seed_oss", False, {"head_dim": 48}),
    "smollm3": ("smollm3", True, {"no_rope_layers": [0, 1], "head_dim": 48}),
    "smollm3, stages": ("smollm3", True, {"num_hidden_layers": 4, "no_rope_layer_interval": 3}),
    "qwen3_next, stages": ("qwen3_next", False, {"num_hidden_layers": 4}),
}
CORE_AND_EXPERTS = {"recompute": "selective", "recompute_modules": ("core_attn", "moe")}
TENSOR: dict[str, dict[str, Any]] = {  # how two ranks share each
    "deepseek_v3": {"wrap": "megatron_fsdp", "tensor": 2, "sequence": True, "recompute": "selective"},
    "deepseek_v3, whole queries": {"expert": 2, "fusions": "all", **CORE_AND_EXPERTS},
    "deepseek_v3, stages": {"wrap": "megatron_fsdp", "pipeline": 2},
    "gemma3_text": {"tensor": 2, "sequence": True, "recompute": "selective"},
    "gemma3_text, stages": {"wrap": "megatron_fsdp", "pipeline": 2, "fusions": "all", "recompute": "full"},
    "gemma3, published": {"tensor": 2, "sequence": True, "fusions": "all"},
    "gemma3, renamed": {"wrap": "megatron_fsdp", "pipeline": 2},
    "glm4_moe": {"tensor": 2, "sequence": True},
    "glm4_moe, tied": {"wrap": "megatron_fsdp", "expert": 2, "fusions": "all"},
    "glm4_moe, stages": {"wrap": "megatron_fsdp", "pipeline": 2},
    "glm4_moe_lite": {"tensor": 2, "sequence": True, "recompute": "selective"},
    "glm4_moe_lite, expert": {"wrap": "megatron_fsdp", "expert": 2, "fusions": "all"},
    "glm4_moe_lite, stages": {"wrap": "megatron_fsdp", "pipeline": 2},
    "gpt_oss": {"tensor": 2, "sequence": True},
    "gpt_oss, expert": {"wrap": "megatron_fsdp", "expert": 2, "fusions": "all"},
    "gpt_oss, stages": {"wrap": "megatron_fsdp", "pipeline": 2, "recompute": "full"},
    "kimi_k2": {"wrap": "megatron_fsdp", "tensor": 2, "sequence": True},
    "llama": {"wrap": "megatron_fsdp", "tensor": 2},
    "llama, linear": {"tensor": 2, "sequence": True, "fusions": "all"},
    "mistral": {"pipeline": 2},
    "mistral, tied": {"tensor": 2, "fusions": "all"},
    "mixtral": {"tensor": 2, "sequence": True},
    "mixtral, tied": {"wrap": "megatron_fsdp", "expert": 2},
    "olmo3": {"tensor": 2, "sequence": True, "recompute": "selective"},
    "olmo3, tied": {"wrap": "megatron_fsdp", "tensor": 2, "fusions": "all"},
    "olmo3, stages": {"wrap": "megatron_fsdp", "pipeline": 2, "recompute": "full"},
    "qwen2": {"tensor": 2, "logits_chunk_tokens": 16},
    "qwen2_5_vl, published": {"wrap": "megatron_fsdp", "tensor": 2, "fusions": "all"},
    "qwen2_5_vl, renamed": {"tensor": 2, "sequence": True},
    "qwen2_moe": {"tensor": 2, "sequence": True},
    "qwen2_moe, tied": {"wrap": "megatron_fsdp", "expert": 2, "fusions": "all"},
    "qwen3_5_text": {"tensor": 2, "sequence": True, "recompute": "selective", "recompute_modules": ("core_attn", "mlp_act")},
    "qwen3_5_text, tied": {"wrap": "megatron_fsdp", "tensor": 2, "fusions": "all"},
    "qwen3_5_text, stages": {"wrap": "megatron_fsdp", "pipeline": 2, "stages": {"virtual_pipeline": 2}, "recompute": "full"},
    "qwen3_5_moe_text": {"tensor": 2, "sequence": True},
    "qwen3_5_moe_text, expert": {"wrap": "megatron_fsdp", "expert": 2, "fusions": "all"},
    "qwen3_5_moe, published": {"wrap": "megatron_fsdp", "tensor": 2, "sequence": True},
    "qwen3_moe": {"wrap": "megatron_fsdp", "expert": 2},
    "qwen3_next": {"tensor": 2, "sequence": True},
    "qwen3_vl, published": {"context": 2},
    "qwen3_vl, stages": {"wrap": "megatron_fsdp", "pipeline": 2, "recompute": "full"},
    "seed_oss": {"wrap": "megatron_fsdp", "tensor": 2, "sequence": True},
    "smollm3": {"tensor": 2, "sequence": True},
    "smollm3, stages": {"wrap": "megatron_fsdp", "pipeline": 2, "fusions": "all"},
    "qwen3_next, stages": {"wrap": "megatron_fsdp", "pipeline": 2},
    "qwen3": {"tensor": 2, "wrap": "megatron_fsdp", "fusions": "all"},
}
LONG = {  # whose families have others that go through the same code
    *("deepseek_v3, stages", "gemma3_text, stages", "glm4_moe_lite, expert", "gpt_oss, stages", "mixtral", "olmo3, tied"),
    *("olmo3, stages", "qwen2_5_vl, renamed", "qwen2_moe", "qwen3_5_text, tied", "qwen3_5_text, stages", "qwen3_5_moe_text"),
    *("qwen3_vl, stages", "gemma3, renamed", "gpt_oss, expert", "llama, linear"),
}
BIAS_RATE = 0.01
ANYWHERE: dict[str, dict[str, Any]] = {  # on one rank, too
    "deepseek_v3": {"load_balancing": 0.01, "router_bias_update_rate": BIAS_RATE},
    "glm4_moe": {"load_balancing": 0.01, "router_bias_update_rate": BIAS_RATE},
    "glm4_moe, tied": {"router_bias_update_rate": BIAS_RATE},
    "glm4_moe_lite": {"load_balancing": 0.01, "router_bias_update_rate": BIAS_RATE},
    "glm4_moe_lite, stages": {"lora": {"rank": 4, "targets": ("linear_q_up_proj", "linear_kv_down_proj", "linear_fc1")}},
    "gpt_oss": {"load_balancing": 0.01},
    "gpt_oss, stages": {"lora": {"rank": 4, "targets": ("linear_qkv", "linear_proj")}},
    "llama, linear": {"lora": {"rank": 4}},
    "gemma3, renamed": {"lora": {"rank": 4, "targets": ("linear_qkv", "linear_fc1")}},
    "qwen2_5_vl, renamed": {"lora": {"rank": 4}},
    "qwen3_5_text, stages": {"lora": {"rank": 4, "targets": ("linear_qkv", "in_proj", "out_proj")}},
}


@pytest.fixture(scope="module")
def paths(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of the models that the selected tests name, or of all of them."""
    root, tests = tmp_path_factory.mktemp("families"), (test for test in request.session.items if test.path == request.path)
    cases = [getattr(test, "callspec", None) for test in tests]
    named = {case.params["name"] for case in cases if case is not None and "name" in case.params} or MODELS.keys()
    chosen = {name: fields for name, fields in MODELS.items() if name in named}
    for name, (family, tied, fields) in chosen.items():
        write_tiny_model(root / name, family, tied, vocab_size=ODD, **{"num_hidden_layers": 2, **fields})
        if "published" in name or "renamed" in name:
            publish(root / name)
        if "renamed" in name:
            rename(root / name)
    return {name: str(root / name) for name in chosen}


@pytest.fixture(scope="module")
def alone(paths: dict[str, str]) -> dict[str, dict[str, Any]]:
    """On one rank, with fusions where two have none."""
    fusions = {name: "none" if "fusions" in TENSOR[name] else "all" for name in paths}
    cases = [{"path": path, **ANYWHERE.get(name, {}), "fusions": fusions[name]} for name, path in paths.items()]
    return dict(zip(paths, run_ranks(1, "tests.engine.model.family_cases:against_folder", {"cases": cases})[0], strict=True))


@pytest.fixture(scope="module")
def shared(paths: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """On two, each."""
    cases = [{"path": path, **ANYWHERE.get(name, {}), **TENSOR[name]} for name, path in paths.items()]
    ranks = run_ranks(2, "tests.engine.model.family_cases:against_folder", {"cases": cases})
    return dict(zip(paths, zip(*ranks, strict=True), strict=True))


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in MODELS])
def test_a_family_is_that_of_transformers(
    alone: dict[str, dict[str, Any]], shared: dict[str, list[dict[str, Any]]], name: str
) -> None:
    """Log-probs to 1e-4, the export bit for bit; losses, gradient norms and entropies of two ranks are those of one."""
    one, two = alone[name], shared[name]
    assert max(one["worst"], *(rank["worst"] for rank in two)) < 1e-4
    for ranks in ([one], two):
        assert sorted(name for rank in ranks for name in rank["names"]) == one["disk"], "each tensor once"
        assert not any(rank["differing"] or rank["reshaped"] for rank in ranks)
    for mine, other in zip(two[0]["history"], one["history"], strict=True):
        assert mine == pytest.approx(other, rel=1e-5, abs=1e-5)


def test_gradients_are_those_of_transformers(tmp_path: Path) -> None:
    """Of each tensor to 1e-4, also where a response has the padding token, whose embedding is 0 in models that transformers
    draws: the derivative of RMSNorm there is rms_norm_eps ** -0.5, a thousand, so that this one token outweighs all others.
    """
    folders = [
        publish(write_tiny_model(tmp_path / "published", "qwen3_5_moe", num_hidden_layers=2)),
        publish(write_tiny_model(tmp_path / "seen", "qwen2_5_vl", num_hidden_layers=2)),
        write_tiny_model(tmp_path / "hybrid", "qwen3_5_text", num_hidden_layers=2),
        write_tiny_model(tmp_path / "dense", "qwen3", num_hidden_layers=2),
        write_tiny_model(tmp_path / "normed", "olmo3"),
    ]
    for folder in folders:
        weights = load_file(folder / "model.safetensors")
        (embeddings,) = (tensor for name, tensor in weights.items() if name.endswith("embed_tokens.weight"))
        embeddings[0] = 0.0
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    samples = [*random_samples(6, seed=5), Sample((5, 6, 7), (8, 0, 9), (-4.8,) * 3, reward=1.0, group=1)]
    given = {"paths": [str(folder) for folder in folders], "samples": samples}
    for result in run_ranks(1, "tests.engine.model.family_cases:gradients_against_hf", given)[0]:
        assert max(result["worst"].values()) < 1e-4
        assert result["padding"] > result["others"]


def test_the_biases_of_routers_are_frozen_or_move_by_a_rate(
    alone: dict[str, dict[str, Any]], shared: dict[str, list[dict[str, Any]]]
) -> None:
    """On two ranks as on one: by the tokens of both."""
    moved = {name: [round(number / BIAS_RATE, 3) for number in result["biases"]] for name, result in alone.items()}
    assert set(moved["glm4_moe, stages"]) == {0.0} and moved["llama"] == []
    for name in ("glm4_moe", "glm4_moe, tied"):
        assert set(moved[name]) <= {-2.0, -1.0, 0.0, 1.0, 2.0}, "two steps"
        assert min(moved[name]) < 0 < max(moved[name])
    for name, ranks in shared.items():
        assert [number for rank in ranks for number in rank["biases"]] == alone[name]["biases"], name


@pytest.mark.parametrize("wrap", ["ddp", "megatron_fsdp"])
def test_biases_of_routers_are_float32_beside_bfloat16(tmp_path: Path, wrap: str) -> None:
    path = str(write_tiny_model(tmp_path, "glm4_moe", num_hidden_layers=2, dtype=torch.bfloat16))
    case = {"path": path, "wrap": wrap, "dtype": "bfloat16", "router_bias_update_rate": BIAS_RATE}
    (result,) = run_ranks(1, "tests.engine.engine_cases:export_differences", {"cases": [case]})[0]
    assert result["differing"] == [] and result["names"] == result["disk"]
    bias = load_file(tmp_path / "model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert not torch.equal(bias, bias.bfloat16().float())


def test_gemmas_embeddings_and_norms_round_to_bfloat16_as_those_of_transformers() -> None:
    from engine.model.families import gemma
    from engine.attention.core import RMSNorm
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm, Gemma3TextScaledWordEmbedding

    theirs = Gemma3TextScaledWordEmbedding(64, 96, 0, embed_scale=96**0.5).bfloat16()
    mine = torch.nn.Sequential(OrderedDict(word_embeddings=torch.nn.Embedding.from_pretrained(theirs.weight)))
    gemma.scale_embeddings(SimpleNamespace(embedding=mine), SimpleNamespace(model_type="gemma3_text", hidden_size=96))
    hidden = mine(torch.arange(64))
    assert torch.equal(hidden, theirs(torch.arange(64)))
    norm, config = Gemma3RMSNorm(96, 1e-6).bfloat16(), {"sequence_parallel": False, "params_dtype": torch.bfloat16}
    ours = RMSNorm(SimpleNamespace(layernorm_zero_centered_gamma=True, **config), 96, 1e-6)
    assert torch.equal(ours.weight, norm.weight), "zeros"
    for each in (norm, ours):
        torch.nn.init.constant_(each.weight, 0.013)
    assert torch.equal(ours(hidden), norm(hidden))


def test_padding_of_the_vocabulary_stays_zero(alone: dict[str, dict[str, Any]], shared: dict[str, list[dict[str, Any]]]) -> None:
    """Also after training with weight decay; there is none on one rank and under pipeline parallelism."""
    assert [rank["padding"] for rank in shared["qwen2"]] == [(0, 0.0), (256 - ODD, 0.0)]
    assert [rank["padding"] for rank in shared["mistral, tied"]] == [(0, 0.0), (256 - ODD, 0.0)]
    assert all(result["padding"] == (0, 0.0) for result in [*alone.values(), *shared["mistral"]])


def test_a_run_with_a_padded_vocabulary_resumes(paths: dict[str, str], tmp_path: Path) -> None:
    """Bit for bit, with biases of routers that move, and the checkpoint is a folder that transformers loads."""
    case = {"tensor": 2, "sequence": True, "wrap": "ddp", "router_bias_update_rate": 0.05}
    arguments = {"path": paths["glm4_moe, tied"], "root": str(tmp_path), "cases": [case], "steps": 3, "stop": 1}
    ((result,), _) = run_ranks(2, "tests.engine.engine_cases:resumed_losses", arguments)
    assert result["resumed"] == result["whole"]
    assert result["worst"] < 1e-4
    (folder,) = (tmp_path / "0").iterdir()
    fields = json.loads((folder / "hf" / "config.json").read_text())
    assert fields["num_nextn_predict_layers"] == 0, "what the folder does not hold"


@pytest.mark.long
def test_a_vision_language_model_resumes_in_another_layout(paths: dict[str, str], tmp_path: Path) -> None:
    """As in the run that goes on in the first one; the folder of its end is one that transformers loads."""
    lora = {"lora": {"rank": 4, "targets": ("linear_qkv", "in_proj", "out_proj")}}
    ways: list[dict[str, Any]] = [{"wrap": "ddp"}, {"wrap": "megatron_fsdp"}, {"wrap": "ddp", **lora}]
    cases = [({"tensor": 2, "sequence": True, **way}, {"pipeline": 2, **way}) for way in ways]
    arguments = {"path": paths["qwen3_5_moe, published"], "root": str(tmp_path), "cases": cases}
    for case, result in zip(cases, run_ranks(2, "tests.engine.model.family_cases:resumed_elsewhere", arguments)[0], strict=True):
        print(case, result)
        for mine, other in zip(result["rest"], result["whole"], strict=True):
            assert mine == pytest.approx(other, rel=1e-5, abs=1e-5)
        assert result["apart"] < 1e-4 and result["worst"] < 1e-4


def test_vllms_experts_of_mixtral_are_read_back_by_their_names(paths: dict[str, str]) -> None:
    layer, path = SimpleNamespace(local_num_experts=8), "model.layers.1.block_sparse_moe.experts"
    names = [experts.hf_names(f"{path}.routed_experts", layer, name) for name in experts.PARTS]
    disk = load_file(Path(paths["mixtral, tied"]) / "model.safetensors")
    assert sorted(chain.from_iterable(names)) == sorted(name for name in disk if name.startswith(path))


@pytest.mark.gpu(2)
def test_padding_over_gpus_trains_as_on_one(paths: dict[str, str]) -> None:
    """bf16 with compiled kernels: losses of some steps, and the vocabulary over two GPUs against one that has it whole."""
    common = {"path": paths["llama"], "name": "sft", "dtype": "bfloat16"}
    (alone,) = run_ranks(1, "tests.engine.engine_cases:losses", {"cases": [common], "num_steps": 4})[0]
    cases = [{**common, "tensor": 2, "wrap": wrap} for wrap in ("ddp", "megatron_fsdp")]
    histories = run_ranks(2, "tests.engine.engine_cases:losses", {"cases": cases, "num_steps": 4})[0]
    for case, history in zip(cases, histories, strict=True):
        print(case, history, alone)
        for (loss, norm), (expected_loss, expected_norm) in zip(history, alone, strict=True):
            assert loss == pytest.approx(expected_loss, rel=5e-3)
            assert norm == pytest.approx(expected_norm, rel=5e-2)
