"""Each work-around's reason is still there. A failure here means: look at the place that it names, and take it out.

megatron-core and mbridge are imported in the tests, since every worker of a parallel run collects this file.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny_model


def as_upstream_has_it(module: ModuleType) -> ModuleType:
    """The module once more from its file, without what engine/ has set in it."""
    spec = importlib.util.spec_from_file_location(f"fresh_{module.__name__}", module.__file__)
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    return fresh


@pytest.fixture(autouse=True)
def device_layer() -> None:
    """It comes before megatron-core."""
    from engine.runtime import parallel  # noqa: F401


@pytest.mark.parametrize(
    ("package", "expected"),
    [("megatron-core", "0.16.1"), ("megatron-fsdp", "0.6.1"), ("mbridge", "0.15.1"), ("ray", "2.60.0")],
)
def test_versions_that_the_work_arounds_were_written_for(package: str, expected: str) -> None:
    assert version(package) == expected


def test_megatron_core_still_brings_an_older_fsdp() -> None:
    """engine/runtime/workarounds.py:use_standalone_fsdp"""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.distributed.fsdp.src.megatron_fsdp import package_info

    assert package_info.__version__.startswith("0.3."), "megatron-core has a newer Megatron-FSDP: is the swap still needed?"
    assert not isinstance(as_upstream_has_it(mcore_fsdp_adapter).TELinear, type), "isinstance takes classes only"


def test_fsdp_still_fails_under_pipeline_parallelism(tmp_path: Path) -> None:
    """engine/runtime/workarounds.py:_stage_mesh, _reduce_tied_embeddings"""
    path = str(write_tiny_model(tmp_path, "qwen3", tied=True, num_hidden_layers=2, hidden_size=64))
    for said in run_ranks(2, "tests.engine.wrap.fsdp_cases:pipeline_without_work_arounds", {"path": path}, alone=True):
        assert "Shape mismatch" in said["mesh"]
        assert "_local_tensor" in said["gradients"]


def test_fsdp_still_reduces_gradients_in_the_dtype_of_weights() -> None:
    """engine/runtime/workarounds.py:_fsdp_with_policy"""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron_fsdp import MixedPrecisionPolicy, megatron_fsdp, param_and_grad_buffer

    assert MixedPrecisionPolicy().main_grads_dtype is None
    assert "mixed_precision_policy" not in inspect.getsource(mcore_fsdp_adapter)
    assert not any("grad_reduce_in_fp32" in inspect.getsource(each) for each in (megatron_fsdp, param_and_grad_buffer))


def test_fsdp_still_holds_float32_weights_twice() -> None:
    """engine/runtime/workarounds.py:_fsdp_with_policy"""
    from megatron_fsdp import MixedPrecisionPolicy, param_and_grad_buffer

    assert MixedPrecisionPolicy().main_params_dtype is torch.float32
    made = inspect.getsource(param_and_grad_buffer.ParamAndGradBuffer._init_each_parameter_group_buffers)
    condition = made.split("should_create_grad_buffer_or_main_weight_buffer\n", 1)[1].split(":", 1)[0]
    assert condition.split() == ["and", "self.mp_policy.main_params_dtype", "is", "not", "None", ")"], "of any dtype"


def test_megatron_core_still_keeps_a_table_of_angles_for_each_length() -> None:
    """engine/attention/rope.py:RotaryTable"""
    from engine.runtime.megatron import RotaryEmbedding

    assert RotaryEmbedding.forward.cache_info().maxsize == 32


def test_fsdp_still_scales_gradients_of_a_group_of_one_rank_every_microbatch() -> None:
    """engine/runtime/workarounds.py:scale_gradients_once"""
    for rank in run_ranks(2, "tests.engine.wrap.fsdp_cases:gradients_of_experts", {"num_microbatches": 4}, alone=True):
        assert rank["ours"] == pytest.approx({"dense": 1.0, "experts": 1.0})
        assert rank["upstream"]["dense"] == pytest.approx(1.0)
        assert rank["upstream"]["experts"] != pytest.approx(1.0), "right now: is the work-around still needed?"


def test_ddp_config_still_lacks_fields_of_megatron_fsdp() -> None:
    """engine/runtime/workarounds.py:add_fsdp_fields"""
    from megatron.core.distributed import DistributedDataParallelConfig

    import megatron_fsdp

    mine = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    assert {field.name for field in dataclasses.fields(megatron_fsdp.DistributedDataParallelConfig)} - mine


def test_torch_norm_still_refuses_sequence_parallel() -> None:
    """engine/attention/core.py:RMSNorm"""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        normalization="RMSNorm",
        persist_layer_norm=False,
    )
    with pytest.raises(AssertionError, match="sequence parallel"):
        WrappedTorchNorm(config, 8)


def test_mbridge_still_hard_codes_transformer_engine_and_shares_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """engine/model/build.py:_LocalSpec, _bridge_class"""
    from mbridge.core import llm_bridge
    from mbridge.models.qwen2 import Qwen2Bridge

    monkeypatch.setattr(llm_bridge, "get_gpt_decoder_block_spec", lambda config, use_transformer_engine: use_transformer_engine)
    asking = SimpleNamespace(config=SimpleNamespace(normalization="RMSNorm"))
    assert llm_bridge.LLMBridge._get_transformer_layer_spec(asking) is True
    assert "pre_mlp_layernorm.weight" not in llm_bridge.LLMBridge._MLP_MAPPING
    monkeypatch.setattr(Qwen2Bridge, "_DIRECT_MAPPING", {})
    tied = object.__new__(Qwen2Bridge)
    tied.hf_config = SimpleNamespace(tie_word_embeddings=True)
    tied._adjust_mapping_for_shared_weights()
    assert "output_layer.weight" in Qwen2Bridge._DIRECT_MAPPING, "one model's mapping is its class's"


def test_router_still_asks_for_a_gemm_that_only_transformer_engine_defines() -> None:
    """engine/runtime/workarounds.py:use_torch_in_router"""
    from megatron.core.transformer.moe import moe_utils

    assert not hasattr(as_upstream_has_it(moe_utils), "te_general_gemm")
    assert "te_general_gemm" in moe_utils.RouterGatingLinearFunction.forward.__code__.co_names


def test_checkpoints_still_take_a_false_fp8_for_one() -> None:
    """engine/runtime/workarounds.py:use_checkpoints_without_fp8"""
    from tests.engine.wrap.fsdp_cases import as_upstream

    fresh = as_upstream("megatron.core.tensor_parallel.random")
    assert fresh.CheckpointWithoutOutput().fp8
    assert not fresh.CheckpointWithoutOutput(fp8=None).fp8


def test_mbridge_still_leaves_tied_embeddings_out_of_mixtures() -> None:
    """model/build.py:_bridge_class; and the names of experts, which are those of moe/experts.py:ExpertLinear's state"""
    from mbridge.core.bridge import Bridge
    from mbridge.models.qwen3moe import Qwen3MoEBridge

    named = object.__new__(Qwen3MoEBridge)._weight_name_mapping_mlp
    assert named("decoder.layers.0.mlp.experts.linear_fc2.weight3") == ["model.layers.0.mlp.experts.3.down_proj.weight"]
    assert Qwen3MoEBridge._adjust_mapping_for_shared_weights is Bridge._adjust_mapping_for_shared_weights


def test_mbridge_still_collects_the_state_for_each_parameter_and_ours_once(tmp_path: Path) -> None:
    """engine/model/load.py:load_weights"""
    path = str(write_tiny_model(tmp_path, "qwen3_moe", num_hidden_layers=2))
    for upstream, ours, differing in run_ranks(2, "tests.engine.model.family_cases:state_dicts_of_a_load", {"path": path}):
        assert upstream > 20 and ours <= 2 and not differing


def test_mbridge_still_lacks_a_norm_of_glm4_moe_and_megatron_core_takes_padding_off_along_experts() -> None:
    """engine/model/build.py:_bridge_class; engine/moe/router.py:Router._apply_expert_bias"""
    from mbridge.models.glm4moe import GLM4MoEBridge
    from megatron.core.transformer.moe.router import TopKRouter

    with pytest.raises(NotImplementedError):
        object.__new__(GLM4MoEBridge)._weight_name_mapping_mcore_to_hf("decoder.layers.0.input_layernorm.weight")
    router = SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=torch.zeros(3))
    with pytest.raises(RuntimeError):
        TopKRouter._apply_expert_bias(router, torch.ones(5, 3, dtype=torch.bool), torch.zeros(5, dtype=torch.bool))


def test_mbridge_still_has_a_field_too_many_for_multi_latent_attention_and_no_padding() -> None:
    """engine/attention/latent.py:complete_tables"""
    from mbridge.models.deepseek_v3 import DeepseekV3Bridge
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    assert " max_position_embeddings=" in inspect.getsource(DeepseekV3Bridge._build_config)
    assert "max_position_embeddings" not in {field.name for field in dataclasses.fields(MLATransformerConfig)}
    assert "padded_vocab_size" not in inspect.getsource(DeepseekV3Bridge._model_provider)
    assert "self_attention.q_layernorm.weight" not in DeepseekV3Bridge._ATTENTION_MAPPING
    with pytest.raises(TypeError):
        DeepseekV3Bridge._get_safetensor_io(SimpleNamespace(dtype=torch.float32), "")


def test_megatron_core_still_gives_shared_keys_the_gradient_of_one_ranks_heads() -> None:
    """engine/attention/latent.py; engine/runtime/workarounds.py:use_latent_attention_without_te"""
    from megatron.core.tensor_parallel.mappings import _GatherFromModelParallelRegion
    from megatron.core.transformer import multi_latent_attention

    assert not isinstance(as_upstream_has_it(multi_latent_attention).TELinear, type), "isinstance takes classes only"
    code = inspect.getsource(multi_latent_attention.MLASelfAttention.get_query_key_value_tensors)
    assert "kv_combined = gather_from_tensor_model_parallel_region(kv_combined)" in code
    assert "_split_along_last_dim" in inspect.getsource(_GatherFromModelParallelRegion.backward), "no sum over ranks"


def test_transformers_still_keeps_rope_theta_elsewhere(tmp_path: Path) -> None:
    """engine/runtime/workarounds.py:rope_theta"""
    config = AutoConfig.from_pretrained(write_tiny_model(tmp_path, "qwen3"))
    assert not hasattr(config, "rope_theta") and "rope_theta" in config.rope_parameters


def test_mbridge_still_computes_with_a_head_size_of_null() -> None:
    """engine/runtime/workarounds.py:head_dim"""
    from mbridge.models.qwen2 import Qwen2Bridge

    bridge = object.__new__(Qwen2Bridge)
    bridge.hf_config = SimpleNamespace(num_key_value_heads=1, num_attention_heads=1, hidden_size=4, head_dim=None)
    with pytest.raises(TypeError):
        bridge._weight_to_hf_format("decoder.layers.0.self_attention.linear_qkv.weight", torch.zeros(12, 4))


def test_megatron_core_still_scales_as_llama_3_1_alone_and_mbridge_knows_no_mistral() -> None:
    """engine/attention/rope.py, engine/model/families/table.py"""
    from mbridge.core.bridge import _MODEL_REGISTRY
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    assert "rope_scaling_factor" in inspect.signature(RotaryEmbedding).parameters
    assert "low_freq_factor" not in inspect.signature(RotaryEmbedding).parameters
    assert "mistral" not in _MODEL_REGISTRY


def test_shards_are_still_compared_parameter_by_parameter_and_over_the_whole_world() -> None:
    """engine/runtime/workarounds.py:_skip_shard_comparison"""
    from megatron_fsdp import param_and_grad_buffer, uneven_dtensor
    from torch.distributed.tensor import _collective_utils

    source = inspect.getsource(param_and_grad_buffer)
    assert "run_check=run_check," in source and "run_check=True," in source
    assert "update_uneven_dtensor_chunk_meta=True," in source
    assert "all_gather_object" in inspect.getsource(uneven_dtensor.gather_and_compute_chunk_metadata)
    assert "torch.distributed.get_world_size()" in inspect.getsource(_collective_utils.check_tensor_meta)


def test_groups_of_gloo_still_have_a_thread_each_that_wakes_up_all_the_time() -> None:
    for before, own, shared in run_ranks(2, "tests.engine.wrap.fsdp_cases:threads_of_gloo", {"num_groups": 3}, alone=True):
        assert (own, shared) == (before + 3, before + 4)


def test_linears_still_know_one_product_for_weight_gradients_and_the_optimizer_one_adam() -> None:
    """workarounds.py:use_weight_gradient_product, use_adam: names that are set there, and no argument for either."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel import layers

    source = inspect.getsource(layers.LinearWithGradAccumulationAndAsyncCommunication.backward)
    assert all(f"fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_{kind}(" in source for kind in ("fp32", "fp16"))
    assert "_grad_accum_fusion_available" in vars(layers)
    assert {"Adam", "USING_PYTORCH_OPTIMIZER"} <= vars(optimizer).keys()
    assert {"Adam", "HAVE_APEX_OR_TE"} <= vars(distrib_optimizer).keys()


def test_a_frozen_output_layer_still_takes_a_product_for_each_token() -> None:
    """engine/runtime/workarounds.py:fold_gradients_of_frozen_linears"""
    from megatron.core.tensor_parallel import layers

    from engine.runtime import workarounds

    class Products(TorchDispatchMode):
        names: list[str]

        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            self.names.append(function.overloadpacket.__name__)
            return function(*arguments, **(options or {}))

    def backward(linear: Any) -> tuple[list[str], torch.Tensor]:
        hidden, weight = torch.ones(8, 1, 4, requires_grad=True), torch.arange(24.0).view(6, 4)
        logits = linear.apply(hidden, weight, None, False, None).transpose(0, 1).contiguous()
        mode = Products()
        mode.names = []
        with mode:
            logits.backward(torch.arange(48.0).view(1, 8, 6))
        return [name for name in mode.names if name in ("mm", "bmm")], hidden.grad

    plain = layers.LinearWithFrozenWeight
    names, expected = backward(plain.__base__ if hasattr(plain, "folds") else plain)
    assert names == ["bmm"]
    workarounds.fold_gradients_of_frozen_linears()
    names, gradient = backward(layers.LinearWithFrozenWeight)
    assert names == ["mm"] and torch.equal(gradient, expected)


def test_the_gradient_norm_is_still_a_sum_in_float32() -> None:
    """engine/runtime/workarounds.py:use_gradient_norm_in_float64"""
    from megatron.core.optimizer import clip_grads

    assert "float64" not in inspect.getsource(clip_grads.get_grad_norm_fp32)


def test_mbridge_still_imports_its_glm4_vl_and_a_rank_does_not() -> None:
    """engine/runtime/megatron.py; in a Python of its own, since tests import transformers' models."""
    import mbridge.models

    names = Path(mbridge.models.__file__).read_text(encoding="utf-8")
    assert "from .glm4_vl import Glm4VLBridgeMoe, Glm4VLBridgeDense\n" in names
    own = (Path(mbridge.models.__file__).parent / "glm4_vl" / "model.py").read_text(encoding="utf-8")
    assert "from transformers import PreTrainedModel" in own
    script = "import sys, engine.engine; assert 'mbridge' in sys.modules and 'transformers.modeling_utils' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
