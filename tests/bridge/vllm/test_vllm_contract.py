"""What bridge/ relies on in vLLM, the same for 0.26 and 0.32: names, signatures, and what they stand for.

Imports vLLM and starts nothing, but for the test marked gpu. A failure names what a new version has changed. The imports are
the tests' own, since every worker of a parallel run collects this file.

    python -m pytest tests/bridge/vllm/test_vllm_contract.py
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import os
import re
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bridge.vllm.weights import adapter, experts, latent, reload as vllm_reload

from bridge.config import ReplicaConfig
from bridge.vllm.serving import api, arguments as vllm_arguments, patches
from megasync.config.keys import all_keys
from megasync.config.schema import Config
from tests.support.replicas import numbers

if TYPE_CHECKING:
    import vllm.outputs


def arguments(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_receiver_is_a_whole_weight_transfer_engine() -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    from bridge.receive.receiver import BucketReceiver

    assert arguments(WeightTransferEngine.__init__)[1:] == ["config", "vllm_config", "device", "model"]
    assert not inspect.isabstract(BucketReceiver)
    api.register()
    assert WeightTransferEngineFactory._registry[api.BACKEND]() is BucketReceiver


def test_windows_in_some_layers_are_still_left_out() -> None:
    """megasync/hf/windows.py refuses them; Gemma 3 has its own for each layer."""
    from vllm.model_executor.models import gemma3, qwen2, qwen2_moe, qwen3_moe

    assert "Sliding window for some but all layers is not supported" in inspect.getsource(qwen2.Qwen2Model)
    of_layer = "per_layer_sliding_window="
    assert [of_layer in inspect.getsource(module) for module in (gemma3, qwen2_moe, qwen3_moe)] == [True, False, False]


def test_workers_have_what_the_extension_calls_and_nothing_of_its_names() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    from bridge.receive.receiver import WorkerExtension

    for name in ("start_weight_update", "update_weights", "finish_weight_update"):
        assert callable(getattr(Worker, name))
    assert arguments(Worker.sleep) == ["self", "level"] and arguments(Worker.wake_up) == ["self", "tags"]
    assert [name for name in dir(WorkerExtension) if not name.startswith("__") and hasattr(Worker, name)] == []


def test_a_sampler_and_the_modules_of_layers_are_as_a_trace_takes_them() -> None:
    """vllm/serving/trace.py: what a sampler's `sample` gives is what is sampled; modules have these names."""
    from vllm.model_executor.models import llama, qwen2, qwen3
    from vllm.v1.sample.sampler import Sampler

    assert arguments(Sampler.sample)[:3] == ["self", "logits", "sampling_metadata"]
    assert "sampled, processed_logprobs = self.sample(logits, sampling_metadata)" in inspect.getsource(Sampler.forward)
    for attention in (llama.LlamaAttention, qwen2.Qwen2Attention, qwen3.Qwen3Attention):
        source = inspect.getsource(attention.forward)
        for call in ("self.qkv_proj(", "self.rotary_emb(positions, q, k)", "self.attn(q, k, v)", "self.o_proj("):
            assert call in source, call
        made = set(re.findall(r"self\.(\w+) =", inspect.getsource(attention.__init__)))
        assert made >= {"num_heads", "num_kv_heads", "head_dim"}
    for mlp in (llama.LlamaMLP, qwen2.Qwen2MLP):
        assert all(f"self.{name}(" in inspect.getsource(mlp.forward) for name in ("gate_up_proj", "down_proj"))


def test_the_engine_has_the_calls_of_a_sync() -> None:
    from vllm.v1.engine import core
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient

    for name in ("collective_rpc", "reset_prefix_cache", "resume_generation", "abort", "shutdown", "get_supported_tasks"):
        assert callable(getattr(AsyncLLM, name))
    assert {"vllm_config", "disable_log_stats"} <= set(arguments(AsyncLLM.from_vllm_config))
    assert arguments(AsyncMPClient.pause_scheduler_async)[1:] == ["mode", "clear_cache"]
    assert arguments(AsyncLLM.finish_weight_update)[1:] in ([], ["weight_version"])
    assert api.START_FAILURE in inspect.getsource(core)


def test_processes_of_a_replica_spin_for_a_second_after_a_message_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm_patches.spin_less changes a default that all callers take."""
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("of replicas on CPUs")
    start = shm_broadcast.SpinCondition.__init__
    monkeypatch.setattr(start, "__defaults__", start.__defaults__)  # put back in the end
    assert start.__defaults__ == (1,) and list(inspect.signature(start).parameters)[-1] == "busy_loop_s"
    assert "busy_loop_s=" not in inspect.getsource(shm_broadcast)
    patches.spin_less()
    assert inspect.signature(start).parameters["busy_loop_s"].default == patches.CPU_SPIN_SECONDS


def test_engine_arguments_are_known() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    ours = {"load_format", "enable_sleep_mode", *api.engine_arguments(ReplicaConfig("model", adapter_rank=8))}
    assert ours <= known
    assert ours - {"enable_prefix_caching", "disable_log_stats"} <= vllm_arguments.OWN_KEYS.keys() | vllm_arguments.REFUSED.keys()
    assert set(vllm_arguments.fields()) == {name for name in known if not name.startswith("_")}
    assert not vllm_arguments.OWN_KEYS.keys() & vllm_arguments.REFUSED.keys()
    assert set(vllm_arguments.OWN_KEYS.values()) <= all_keys(Config).keys()


def test_requests_are_handed_in_as_the_engine_does_it() -> None:
    """vllm_api.core_requests and submit stand for AsyncLLM.add_request"""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    used = ["request_id", "prompt", "params", "supported_tasks"]
    assert arguments(InputProcessor.process_inputs)[1:5] == used and "lora_request" in arguments(InputProcessor.process_inputs)
    assert arguments(OutputProcessor.add_request)[1:] == ["request", "prompt", "parent_req", "request_index", "queue"]
    assert arguments(AsyncMPClient.add_request_async)[1:] == ["request"]
    assert "self._run_output_handler()" in inspect.getsource(AsyncLLM.__init__)
    code = inspect.getsource(OutputProcessor) + inspect.getsource(RequestState)
    assert set(re.findall(r"queue\.(\w+)\(", code.replace("_queue.", "."))) == {"put"}


def test_samplings_are_known() -> None:
    from vllm import SamplingParams

    assert {"top_k", "min_p", "stop", "detokenize"} <= set(arguments(SamplingParams))


def test_a_finish_asks_for_all_that_this_vllm_has_in_order() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    class Plain:
        def __init__(self) -> None:
            self.told: list[str] = []

        async def finish_weight_update(self) -> None:
            self.told.append("finish")

        async def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
            self.told.append("reset running" if reset_running_requests else "reset")
            return len(self.told) != 2

    class Stamping(Plain):
        async def update_weight_version(self, new_version: str) -> None:
            self.told.append(new_version)

    plain, stamping = Plain(), Stamping()
    assert not asyncio.run(api.finish_update(plain, 7, adapter=False, recompute=True))
    assert asyncio.run(api.finish_update(Stamping(), 7, adapter=False, recompute=False))
    assert not asyncio.run(api.finish_update(stamping, 7, adapter=True, recompute=False))
    assert plain.told == ["finish", "reset running"]
    assert stamping.told == ["7", "reset"], "vLLM's own finish drops adapters"
    methods = {name for name in dir(AsyncLLM) if name in dir(stamping) and not name.startswith("_")}
    assert {"finish_weight_update", "reset_prefix_cache"} <= methods


def finished(**fields: Any) -> vllm.outputs.RequestOutput:
    import vllm.outputs
    from vllm.logprobs import FlatLogprobs, Logprob

    log_probs = FlatLogprobs()
    log_probs.extend([{5: Logprob(-0.5), 7: Logprob(-0.25)}, {6: Logprob(-1.5)}])
    sample = vllm.outputs.CompletionOutput(0, "", [5, 6], -2.0, log_probs, finish_reason="length", **fields)
    return vllm.outputs.RequestOutput("0", None, [1], None, [sample], finished=True)


def test_every_token_has_the_version_that_the_replica_served() -> None:
    completion = api.to_completion(finished(), [], 3)
    assert numbers(completion) == ((5, 6), (-0.5, -1.5), (3, 3), "length")
    arrays = (completion.token_ids, completion.log_probs, completion.weight_versions)
    assert [array.dtype.name for array in arrays] == ["int32", "float32", "int32"]


def test_tokens_before_an_update_keep_their_version() -> None:
    assert api.to_completion(finished(), [(1, 3)], 4).weight_versions.tolist() == [3, 4]
    assert api.to_completion(finished(), [(0, 2), (1, 3), (2, 4)], 5).weight_versions.tolist() == [3, 4]


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


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen3_moe", False), ("glm4_moe", False)])
def test_a_replica_on_a_gpu_of_its_own_is_planned_whole(tmp_path: Path, family: str, tied: bool) -> None:
    """Needs 2 devices. The trainer's is the first; the replica gets the second. vLLM has routers of glm4_moe in float32."""
    import ray
    from safetensors.torch import load_file

    from bridge.config import SyncConfig
    from bridge.send.publish import Publisher
    from tests.support.replicas import OpenPool
    from tests.runs.test_sync_vllm import DictSource, differing, in_layer_order
    from tests.support.tiny_models import write_tiny_model

    folders = [write_tiny_model(tmp_path / str(seed), family, tied, seed, torch.bfloat16, head_dim=64) for seed in range(3)]
    torch.zeros(1, device="cuda")
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    ray.init(include_dashboard=False, log_to_driver=False)
    pool = OpenPool.start(ReplicaConfig(str(folders[0]), max_model_len=64, kv_cache_bytes=2**26), 1)
    try:
        for transport in ("nccl", "shm"):
            source = DictSource({})
            publisher = None
            for version, folder in enumerate(folders[1:]):
                tensors = in_layer_order(load_file(folder / "model.safetensors"))
                source.tensors = {name: tensor.cuda() for name, tensor in tensors.items()}
                sync = SyncConfig(transport=transport, bucket_bytes=100_000, verify="readback")
                publisher = publisher or Publisher(source, pool, sync)
                fallback = {name.rpartition(".")[2] for name in publisher.publish(version).loader_fallback}
                assert fallback == ({"gate"} if family == "glm4_moe" else set())
                assert differing(pool.read_back(), tensors) == []
            publisher.close()
    finally:
        pool.close()
        ray.shutdown()


def test_what_torchrun_told_the_trainer_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch takes the address at which vLLM's workers meet for torchrun's store, and waits for it."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANKING", "kept")
    api.forget_launcher()
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"} & os.environ.keys()
    assert os.environ["RANKING"] == "kept"
    wait = timedelta(seconds=20)
    torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1, timeout=wait)
    torch.distributed.destroy_process_group()
