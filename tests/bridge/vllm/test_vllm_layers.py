"""What bridge/ relies on in vLLM's layers, the same for 0.26 and 0.32: which stay as loaded, what they compute with.

Imports vLLM and starts nothing. The imports are the tests' own, since every worker of a parallel run collects this file.

    python -m pytest tests/bridge/vllm/test_vllm_layers.py
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from bridge.vllm.weights import adapter, experts, latent, reload as vllm_reload

from bridge.config import ReplicaConfig
from bridge.vllm.serving import api


def arguments(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_windows_in_some_layers_are_still_left_out() -> None:
    """megasync/models/features.py refuses them; Gemma 3 has its own for each layer."""
    from vllm.model_executor.models import gemma3, qwen2, qwen2_moe, qwen3_moe

    assert "Sliding window for some but all layers is not supported" in inspect.getsource(qwen2.Qwen2Model)
    of_layer = "per_layer_sliding_window="
    assert [of_layer in inspect.getsource(module) for module in (gemma3, qwen2_moe, qwen3_moe)] == [True, False, False]


def cuda_platform() -> Any:
    """What vLLM's layers ask which device they are on, as on a machine with a GPU."""
    from vllm.platforms.interface import Platform, PlatformEnum

    return type("Cuda", (Platform,), {"_enum": PlatformEnum.CUDA})()


def test_layers_that_stay_as_loaded_keep_their_weights_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm_reload.AS_LOADED"""
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    modules = {"UnquantizedLinearMethod": linear, "UnquantizedEmbeddingMethod": vocab_parallel_embedding}
    assert (*modules, "ExactLinearMethod", "ExactEmbeddingMethod") == vllm_reload.AS_LOADED  # the last two are our own, for CPUs
    for name, module in modules.items():
        monkeypatch.setattr(module, "current_platform", cuda_platform())
        layer = torch.nn.Linear(4, 6, bias=False)
        weight, values = layer.weight, layer.weight.tolist()
        method = getattr(module, name)
        method.process_weights_after_loading(object.__new__(method), layer)
        assert layer.weight is weight and weight.tolist() == values


def test_experts_stay_as_loaded_for_these_kernels_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm_experts.AS_LOADED"""
    from vllm.model_executor.layers.fused_moe.oracle import unquantized
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    assert UnquantizedFusedMoEMethod.__name__ == experts.METHOD
    monkeypatch.setattr(unquantized, "current_platform", cuda_platform())
    for name in experts.AS_LOADED:
        weights = torch.rand(2, 8, 4), torch.rand(2, 4, 4)
        values = [weight.tolist() for weight in weights]
        kept = unquantized.convert_to_unquantized_kernel_format(unquantized.UnquantizedMoeBackend[name], None, *weights)
        assert kept[0] is weights[0] and kept[1] is weights[1] and [weight.tolist() for weight in kept] == values


def test_experts_are_packed_where_their_kernel_is_made() -> None:
    """vllm_experts.forget_kernel, and the order that CPUs pack in"""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    code = inspect.getsource(UnquantizedFusedMoEMethod)
    assert "is_weight_update = self.moe_kernel is not None" in code
    if "cpu_fused_moe" in code:
        pytest.skip("this vLLM packs experts at each loading")
    assert "self.moe_kernel.fused_experts.process_weights_after_loading(layer)" in code


def test_multi_latent_attention_computes_with_two_parts_of_a_weight() -> None:
    """vllm_latent; what CPUs do with kv_b_proj"""
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    assert MLAAttention.__name__ == latent.KIND
    code = inspect.getsource(MLAAttention.process_weights_after_loading)
    assert all(part in code for part in latent.PARTS)
    names = set(arguments(MLAAttention.__init__))
    assert {"num_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "kv_b_proj"} <= names
    if "is_cpu" in inspect.getsource(linear.UnquantizedLinearMethod.process_weights_after_loading):
        layer = torch.nn.Linear(4, 6, bias=False)
        layer._cpu_skip_gemm_dispatch = True
        linear.UnquantizedLinearMethod.process_weights_after_loading(object.__new__(linear.UnquantizedLinearMethod), layer)
        assert latent.stays_as_loaded(layer) and tuple(layer.weight.shape) == (6, 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of vLLM's kernels for CPUs")
def test_the_rotary_kernel_of_cpus_turns_pairs_of_several_heads_wrongly() -> None:
    """Once it does not, vllm_latent.engine_arguments need not choose another."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    positions, query, key = torch.arange(5), torch.randn(5, 4, 64), torch.randn(5, 1, 64)
    angles = positions[:, None] / 10000 ** (torch.arange(0, 64, 2) / 64)
    table = torch.cat([angles.cos(), angles.sin()], -1)
    expected, expected_key = RotaryEmbedding.forward_static(positions, query.clone(), key.clone(), 64, 64, table, False)
    _custom_ops.rotary_embedding(positions, query, key, 64, table, False)
    assert expected_key is not None and torch.allclose(key, expected_key, atol=1e-5)
    assert not torch.allclose(query, expected, atol=0.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of vLLM's kernels for CPUs")
def test_no_config_brings_that_kernel_back(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"kv_lora_rank": 8}')
    given = {"compilation_config": {"mode": 0, "custom_ops": ["all", "+rotary_embedding"]}, "max_num_batched_tokens": 512}
    arguments = api.engine_arguments(ReplicaConfig(str(tmp_path), engine_arguments=given))
    assert arguments["compilation_config"] == {"mode": 0, "custom_ops": ["all", "-rotary_embedding"]}
    assert (arguments["max_num_batched_tokens"], arguments["attention_backend"]) == (512, "CPU_MLA")


def test_layerwise_reload_takes_any_module() -> None:
    from vllm.model_executor.model_loader import reload

    assert arguments(reload.initialize_layerwise_reload) == ["model"]
    info = reload.layerwise.get_layerwise_info(torch.nn.Linear(2, 2))
    assert not info.can_load() and {"load_numel", "load_numel_total"} <= vars(info).keys()


def test_adapters_can_be_made_of_tensors() -> None:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.model_executor.models.utils import WeightsMapper

    used = {"lora_model_id", "tensors", "peft_helper", "device", "dtype", "model_vocab_size", "weights_mapper"}
    assert used <= set(arguments(LoRAModel.from_lora_tensors))
    assert PEFTHelper.from_dict({"r": 8, "lora_alpha": 16, "use_rslora": False, "target_modules": []}).r == 8
    assert {"_lora_model_cls", "vocab_size", "lora_config"} <= set(inspect.getsource(WorkerLoRAManager).replace(".", " ").split())
    mapper = WeightsMapper(orig_to_new_prefix={"a.": "b."})
    assert adapter._renames(mapper)._map_name("a.c") == "b.c"
