"""Folders of models with experts or with multi-latent attention: which there are, which are refused. Real files throughout."""

from __future__ import annotations

from pathlib import Path

import pytest

from megasync.assets import build_tokenizer
from megasync.checks.check import check_config
from megasync.config.load import load_config
from megasync.hf.folder import check_model_folder
from tests.support.config_files import cannot_run, model_refused, write_model, write_runnable


@pytest.fixture
def runnable(tmp_path: Path) -> Path:
    return write_runnable(tmp_path)


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
    ("changes", "word"),
    [
        ({"num_experts": 0}, "num_experts = 0"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size = None"),
        ({"num_experts_per_tok": 9}, "more than num_experts = 8"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ({"shared_expert_intermediate_size": 64}, "a shared expert on qwen3_moe"),
        ({"model_type": "qwen2_moe"}, "qwen2_moe without a shared expert"),
        ({"model_type": "qwen2_moe", "shared_expert_intermediate_size": 64, "qkv_bias": False}, "qkv_bias = false"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise"),
        ({"output_router_logits": True}, "load-balancing loss"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok = 1"),
        ({"model_type": "mixtral", "num_experts_per_tok": 1}, "num_experts_per_tok = 1"),
    ],
)
def test_unsupported_mixtures_of_experts(tmp_path: Path, changes: dict[str, object], word: str) -> None:
    message = model_refused(write_model(tmp_path, **{**EXPERTS, **changes}))
    assert word in message
    assert "remedy:" in message


GLM = {"model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 96}
GLM |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "attention_bias": True, "partial_rotary_factor": 0.5}


def test_routers_with_a_bias(tmp_path: Path) -> None:
    shape = check_model_folder(write_model(tmp_path, **GLM, n_group=4, topk_group=2, num_nextn_predict_layers=1))
    assert (shape.num_experts, shape.first_k_dense_replace) == (8, 1)
    assert shape.split_sizes == ("moe_intermediate_size", "intermediate_size")
    shape = check_model_folder(write_model(tmp_path, **GLM | {"first_k_dense_replace": 0}))
    assert shape.split_sizes == ("moe_intermediate_size",)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings = true on glm4_moe, which vLLM ignores"),
        ({"norm_topk_prob": False}, "norm_topk_prob = false"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok = 1"),
        ({"n_group": 4, "topk_group": 4}, "n_group = 4"),
        ({"n_shared_experts": 0}, "n_shared_experts = 0"),
        ({"first_k_dense_replace": 4}, "first_k_dense_replace = 4"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}, "'yarn' with partial_rotary_factor"),
    ],
)
def test_unsupported_routers_with_a_bias(tmp_path: Path, changes: dict[str, object], word: str) -> None:
    assert word in model_refused(write_model(tmp_path, **{**GLM, **changes}))


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


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank = None"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ({"rope_interleave": False}, "rope_interleave = false"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim = 63"),
        ({"v_head_dim": 89}, "v_head_dim = 89, more than queries have (24 + 64)"),
        ({"topk_method": None}, "remedy: if it was trained so, write them into config.json: noaux_tc and sigmoid"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"index_topk": 2048}, "sparse attention"),
        ({"attention_bias": True}, "attention_bias = true on deepseek_v3"),
        ({"quantization_config": {"quant_method": "fp8"}}, "convert its weights to bfloat16"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, "'linear' with multi-latent attention"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0}}, "one of mscale and mscale_all_dim"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": False}}, "'yarn' with truncate"),
        ({"norm_topk_prob": False}, "norm_topk_prob = false"),
    ],
)
def test_unsupported_multi_latent_attention(tmp_path: Path, changes: dict[str, object], word: str) -> None:
    assert word in model_refused(write_model(tmp_path, **{**DEEPSEEK, **changes}))


def test_what_multi_latent_attention_needs(runnable: Path, tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path / "latent")
    model = f"model.path={write_model(tmp_path / 'latent', **DEEPSEEK)}"
    check_config(load_config(runnable, [model, "engine.parallel.tensor=2", "engine.parallel.sequence=true"]), 2)
    check_config(load_config(runnable, [model, "engine.lora.rank=8", "engine.lora.targets=[linear_proj]"]), 2)
    message = cannot_run(runnable, model, "engine.lora.rank=8", "engine.lora.targets=[linear_qkv,linear_proj]")
    assert "no adapters beside linear_qkv in deepseek_v3" in message and "linear_kv_up_proj" in message
    targets = "engine.lora.targets=[linear_q_down_proj,linear_q_up_proj,linear_kv_down_proj,linear_kv_up_proj]"
    check_config(load_config(runnable, [model, "engine.lora.rank=8", targets, "engine.parallel.context=2"]), 2)
    write_model(tmp_path / "latent", **DEEPSEEK | {"q_lora_rank": 4})
    assert "smallest dimension, 4" in cannot_run(runnable, model, "engine.lora.rank=8", targets)
    write_model(tmp_path / "latent", **DEEPSEEK | {"q_lora_rank": None})
    message = cannot_run(runnable, model, "engine.lora.rank=8", targets)
    assert "no adapters beside linear_q_down_proj, linear_q_up_proj" in message
    message = cannot_run(runnable, "engine.lora.rank=8", targets)
    assert "linear_kv_up_proj in qwen" in message and "leave linear_q_down_proj" in message
    write_model(tmp_path / "latent", **DEEPSEEK | {"kv_lora_rank": 32})
    message = cannot_run(runnable, model)
    assert "kv_lora_rank = 32" in message and "allowed: 512" in message
    check_config(load_config(runnable, [model, "algorithm.name=sft"]), 2)


def test_what_biases_of_routers_need(runnable: Path, tmp_path: Path) -> None:
    for name, fields in {"glm": GLM, "experts": EXPERTS}.items():
        build_tokenizer().save_pretrained(tmp_path / name)
        write_model(tmp_path / name, **fields)
    moving = "algorithm.router_bias_update_rate=0.001"
    check_config(load_config(runnable, [f"model.path={tmp_path / 'glm'}", moving]), 2)
    message = cannot_run(runnable, f"model.path={tmp_path / 'experts'}", moving)
    assert "algorithm.router_bias_update_rate = 0.001: the routers of qwen3_moe have no bias" in message
    lora = ("engine.lora.rank=8", "engine.lora.targets=[linear_qkv,linear_proj]")
    assert "checkpoints hold adapters alone" in cannot_run(runnable, f"model.path={tmp_path / 'glm'}", moving, *lora)
    glm = f"model.path={tmp_path / 'glm'}"
    check_config(load_config(runnable, [glm, lora[0]]), 2)
    check_config(load_config(runnable, [glm, "engine.parallel.context=2"]), 2)
    odd = f"model.path={write_model(tmp_path / 'glm', **{**GLM, 'intermediate_size': 97})}"
    message = cannot_run(runnable, odd, "engine.parallel.tensor=2", "engine.parallel.sequence=true")
    assert "intermediate_size = 97" in message
    assert "intermediate_size = 97" in cannot_run(runnable, odd, "rollout.tensor_parallel=2")


def test_what_experts_need(runnable: Path, tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path / "experts")
    model = f"model.path={write_model(tmp_path / 'experts', **EXPERTS)}"
    tensor = (model, "engine.parallel.tensor=2")
    message = cannot_run(runnable, *tensor)
    assert "engine.parallel.sequence = false" in message
    assert "write engine.parallel.sequence=true" in message
    check_config(load_config(runnable, [*tensor, "engine.parallel.sequence=true"]), 2)
    check_config(load_config(runnable, [model, "engine.parallel.expert=2"]), 2)
    odd = f"model.path={write_model(tmp_path / 'odd', **{**EXPERTS, 'moe_intermediate_size': 97})}"
    message = cannot_run(runnable, odd, "engine.parallel.tensor=2", "engine.parallel.sequence=true")
    assert "moe_intermediate_size = 97" in message
    assert "moe_intermediate_size = 97" in cannot_run(runnable, odd, "rollout.tensor_parallel=2")
    shared = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 97}
    odd = f"model.path={write_model(tmp_path / 'odd', **{**EXPERTS, **shared})}"
    for split in (("engine.parallel.tensor=2", "engine.parallel.sequence=true"), ("rollout.tensor_parallel=2",)):
        assert "shared_expert_intermediate_size = 97" in cannot_run(runnable, odd, *split)
    lora = (model, "engine.lora.rank=8")
    check_config(load_config(runnable, lora), 2)
    assert "write engine.lora.sync=merged" in cannot_run(runnable, *lora, "engine.lora.sync=adapter")
    attention = "engine.lora.targets=[linear_qkv,linear_proj]"
    message = cannot_run(runnable, *lora, "engine.lora.dropout=0.1")
    assert "engine.lora.dropout = 0.1: PEFT has none for experts" in message and f"or {attention}" in message
    message = cannot_run(runnable, model, "engine.lora.rank=6")
    assert "allowed: multiples of 8" in message and "write engine.lora.rank=8" in message
    check_config(load_config(runnable, [model, "engine.lora.rank=6", attention, "engine.lora.dropout=0.1"]), 2)
    narrow = f"model.path={write_model(tmp_path / 'narrow', **{**EXPERTS, 'moe_intermediate_size': 32})}"
    assert "smallest dimension, 32" in cannot_run(runnable, narrow, "engine.lora.rank=40")
