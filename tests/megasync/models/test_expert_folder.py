"""Folders of models with experts or with multi-latent attention: which there are, which are refused. Real files throughout."""

from __future__ import annotations

from pathlib import Path

import pytest

from megasync.tools.assets.command import build_tokenizer
from megasync.checks.check import check_config
from megasync.config.load import load_config
from megasync.models.folder import check_model_folder
from tests.support.config_files import model_refused, refusal, write_model


QWEN3_5 = {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 64}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}


def test_mixtures_of_experts(tmp_path: Path) -> None:
    sizes = {**EXPERTS, "num_experts": None, "mlp_only_layers": [], "decoder_sparse_step": 1, "output_router_logits": False}
    shape = check_model_folder(write_model(tmp_path, **EXPERTS))
    assert (shape.num_experts, shape.num_experts_per_tok, shape.moe_intermediate_size) == (8, 2, 96)
    del sizes["num_experts"]
    assert check_model_folder(write_model(tmp_path, **sizes, num_local_experts=8)) == shape
    shape = check_model_folder(write_model(tmp_path, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2))
    assert (shape.num_experts, shape.moe_intermediate_size) == (8, 256)
    shared = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 64}
    shape = check_model_folder(write_model(tmp_path, **EXPERTS | shared))
    assert shape.shared_expert_intermediate_size == 64


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"num_experts": 0}, "num_experts", "0"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size", "None"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok", "9"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers", "[0]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step", "2"),
        ({"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size", "64"),
        ({"model_type": "qwen2_moe"}, "shared_expert_intermediate_size", "None"),
        ({"model_type": "qwen2_moe", "shared_expert_intermediate_size": 64, "qkv_bias": False}, "qkv_bias", "False"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise", "0.1"),
        ({"output_router_logits": True}, "output_router_logits", "True"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok", "1"),
        ({**QWEN3_5, "norm_topk_prob": False}, "norm_topk_prob", "False"),
        ({"model_type": "mixtral", "num_experts_per_tok": 1}, "num_experts_per_tok", "1"),
    ],
)
def test_unsupported_mixtures_of_experts(tmp_path: Path, changes: dict[str, object], key: str, value: str) -> None:
    error = model_refused(write_model(tmp_path, **{**EXPERTS, **changes}))
    assert (error.key, error.value) == (key, value)


GLM = {"model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 96}
GLM |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "attention_bias": True, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"n_group": 1, "topk_group": 2}, "topk_group"),
        ({"n_group": 2, "topk_group": 4, "num_experts_per_tok": 8}, "topk_group"),
        ({"n_group": 2, "topk_group": None}, "topk_group"),
        ({"n_group": 8, "topk_group": 2}, "n_group"),
        ({"n_group": 3, "topk_group": 2}, "n_group"),
        ({"n_group": None, "topk_group": 2}, "n_group"),
        ({"n_group": -2, "topk_group": 2}, "n_group"),
    ],
)
def test_groups_that_routers_cannot_choose_from(tmp_path: Path, changes: dict[str, object], key: str) -> None:
    """The model has 8 experts and sends each token to 4 of them."""
    error = model_refused(write_model(tmp_path, **{**GLM, **changes}))
    assert (error.key, error.value) == (key, str(changes[key]))


def test_routers_with_a_bias(tmp_path: Path) -> None:
    shape = check_model_folder(write_model(tmp_path, **GLM, n_group=4, topk_group=2, num_nextn_predict_layers=1))
    assert (shape.num_experts, shape.first_k_dense_replace) == (8, 1)
    assert shape.split_sizes == ("moe_intermediate_size", "intermediate_size")
    shape = check_model_folder(write_model(tmp_path, **GLM | {"first_k_dense_replace": 0}))
    assert shape.split_sizes == ("moe_intermediate_size",)


DEEPSEEK = {"model_type": "deepseek_v3", "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
DEEPSEEK |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
DEEPSEEK |= {"kv_lora_rank": 512, "qk_nope_head_dim": 24, "qk_rope_head_dim": 64, "v_head_dim": 32, "num_key_value_heads": 4}
DEEPSEEK |= {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}}


def test_multi_latent_attention(tmp_path: Path) -> None:
    shape = check_model_folder(write_model(tmp_path, **DEEPSEEK, q_lora_rank=None, num_nextn_predict_layers=1))
    assert (shape.q_lora_rank, shape.kv_lora_rank, shape.v_head_dim, shape.num_experts) == (0, 512, 32, 8)
    assert shape.cached_numbers(2) == 512 + 64
    shape = check_model_folder(write_model(tmp_path, **DEEPSEEK, rope_interleave=True, moe_layer_freq=1))
    assert shape.q_lora_rank == 1536
    assert check_model_folder(write_model(tmp_path)).cached_numbers(2) == 2 * 1 * 32
    without_numbers = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    check_model_folder(write_model(tmp_path, **DEEPSEEK | {"rope_parameters": without_numbers}))


LITE = {name: value for name, value in DEEPSEEK.items() if name not in ("topk_method", "scoring_func")}
LITE |= {"model_type": "glm4_moe_lite", "head_dim": 64}
KIMI = DEEPSEEK | {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}


def test_latent_attention_of_other_families(tmp_path: Path) -> None:
    check_model_folder(write_model(tmp_path / "kimi", **KIMI))
    check_model_folder(write_model(tmp_path / "one", **LITE))
    kinds = ["dense", "dense", "sparse", "sparse"]
    shape = check_model_folder(write_model(tmp_path / "two", **LITE | {"first_k_dense_replace": 2, "mlp_layer_types": kinds}))
    assert (shape.first_k_dense_replace, shape.q_lora_rank) == (2, 768)


@pytest.mark.parametrize(
    ("model", "changes", "key"),
    [
        (GLM, {"tie_word_embeddings": True}, "tie_word_embeddings"),
        (GLM, {"norm_topk_prob": False}, "norm_topk_prob"),
        (GLM, {"num_experts_per_tok": 1}, "num_experts_per_tok"),
        (GLM, {"n_group": 4, "topk_group": 4}, "n_group"),
        (GLM, {"n_shared_experts": 0}, "n_shared_experts"),
        (GLM, {"first_k_dense_replace": 4}, "first_k_dense_replace"),
        (GLM, {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        (GLM, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}, "rope_type"),
        (DEEPSEEK, {"kv_lora_rank": None}, "kv_lora_rank"),
        (DEEPSEEK, {"num_key_value_heads": 2}, "num_key_value_heads"),
        (DEEPSEEK, {"rope_interleave": False}, "rope_interleave"),
        (DEEPSEEK, {"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        (DEEPSEEK, {"v_head_dim": 89}, "v_head_dim"),
        (DEEPSEEK, {"topk_method": None}, "topk_method"),
        (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func"),
        (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (DEEPSEEK, {"index_topk": 2048}, "index_topk"),
        (DEEPSEEK, {"attention_bias": True}, "attention_bias"),
        (DEEPSEEK, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (DEEPSEEK, {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, "rope_type"),
        (DEEPSEEK, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0}}, "mscale"),
        (DEEPSEEK, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": False}}, "truncate"),
        (DEEPSEEK, {"norm_topk_prob": False}, "norm_topk_prob"),
        (LITE, {"first_k_dense_replace": None}, "first_k_dense_replace"),
        (LITE, {"first_k_dense_replace": 2}, "first_k_dense_replace"),
        (LITE, {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}, "first_k_dense_replace"),
        (LITE, {"rope_interleave": False}, "rope_interleave"),
        (LITE, {"num_key_value_heads": 2}, "num_key_value_heads"),
        (LITE, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LITE, {"head_dim": 192}, "head_dim"),
        (LITE, {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ],
)
def test_unsupported_fields(tmp_path: Path, model: dict[str, object], changes: dict[str, object], key: str) -> None:
    assert model_refused(write_model(tmp_path, **{**model, **changes})).key == key


def at(folder: Path, **fields: object) -> str:
    """An override for a model of these fields, with a tokenizer."""
    build_tokenizer().save_pretrained(write_model(folder, **fields))
    return f"model.path={folder}"


RANK, TENSOR = "engine.lora.rank=8", ("engine.parallel.tensor=2", "engine.parallel.sequence=true")
ATTENTION = "engine.lora.targets=[linear_qkv,linear_proj]"
LATENT = "engine.lora.targets=[linear_q_down_proj,linear_q_up_proj,linear_kv_down_proj,linear_kv_up_proj]"
BIAS = "algorithm.router_bias_update_rate=0.001"
QWEN2 = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 97}


@pytest.mark.parametrize(
    ("fields", "overrides"),
    [
        (DEEPSEEK, TENSOR),
        (DEEPSEEK, (RANK, "engine.lora.targets=[linear_proj]")),
        (DEEPSEEK, (RANK, LATENT, "engine.parallel.context=2")),
        (DEEPSEEK | {"kv_lora_rank": 32}, ("algorithm.name=sft",)),
        (GLM, (BIAS,)),
        (GLM, (RANK,)),
        (GLM, ("engine.parallel.context=2",)),
        (EXPERTS, TENSOR),
        (EXPERTS, ("engine.parallel.expert=2",)),
        (EXPERTS, (RANK,)),
        (EXPERTS, ("engine.lora.rank=6", ATTENTION, "engine.lora.dropout=0.1")),
    ],
)
def test_mixtures_that_can_run(runnable: Path, tmp_path: Path, fields: dict[str, object], overrides: tuple[str, ...]) -> None:
    check_config(load_config(runnable, [at(tmp_path / "other", **fields), *overrides]), 2)


@pytest.mark.parametrize(
    ("fields", "overrides", "key", "text"),
    [
        (DEEPSEEK, (RANK, ATTENTION), "engine.lora.targets", "linear_kv_up_proj"),
        (DEEPSEEK | {"q_lora_rank": 4}, (RANK, LATENT), "engine.lora.rank", "dimension, 4"),
        (DEEPSEEK | {"q_lora_rank": None}, (RANK, LATENT), "engine.lora.targets", "no linear_q_down_proj, linear_q_up_proj"),
        ({}, (RANK, LATENT), "engine.lora.targets", "leave linear_q_down_proj"),
        (DEEPSEEK | {"kv_lora_rank": 32}, (), "kv_lora_rank", "choices: 512"),
        (EXPERTS, (BIAS,), "algorithm.router_bias_update_rate", "glm4_moe"),
        (GLM, (BIAS, RANK, ATTENTION), "algorithm.router_bias_update_rate", "engine.lora.rank = 8"),
        (GLM | {"intermediate_size": 97}, TENSOR, "engine.parallel.tensor", "intermediate_size = 97"),
        (GLM | {"intermediate_size": 97}, ("rollout.tensor_parallel=2",), "rollout.tensor_parallel", "intermediate_size = 97"),
        (EXPERTS, TENSOR[:1], "engine.parallel.sequence", "write engine.parallel.sequence=true"),
        (EXPERTS | {"moe_intermediate_size": 97}, TENSOR, "engine.parallel.tensor", "moe_intermediate_size = 97"),
        (EXPERTS | {"moe_intermediate_size": 97}, ("rollout.tensor_parallel=2",), "rollout.tensor_parallel", "moe_intermediate"),
        (EXPERTS | QWEN2, TENSOR, "engine.parallel.tensor", "shared_expert_intermediate_size = 97"),
        (EXPERTS | QWEN2, ("rollout.tensor_parallel=2",), "rollout.tensor_parallel", "shared_expert_intermediate_size = 97"),
        (EXPERTS, (RANK, "engine.lora.sync=adapter"), "engine.lora.sync", "write engine.lora.sync=merged"),
        (EXPERTS, (RANK, "engine.lora.dropout=0.1"), "engine.lora.dropout", f"or {ATTENTION}"),
        (EXPERTS, ("engine.lora.rank=6",), "engine.lora.rank", "write engine.lora.rank=8"),
        (EXPERTS | {"moe_intermediate_size": 32}, ("engine.lora.rank=40",), "engine.lora.rank", "dimension, 32"),
    ],
)
def test_mixtures_that_cannot_run(
    runnable: Path, tmp_path: Path, fields: dict[str, object], overrides: tuple[str, ...], key: str, text: str
) -> None:
    """By key, with a name or a remedy in the text."""
    error = refusal(runnable, at(tmp_path / "other", **fields), *overrides)
    assert key in [part.key for part in error.parts] and text in str(error)
