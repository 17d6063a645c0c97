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
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch


from bridge.config import ReplicaConfig
from bridge.vllm.exact import register
from bridge.vllm.serving import api, arguments as vllm_arguments, patches
from bridge.vllm.serving.requests import to_completion
from megasync.checks.served_sizes import HEADS_ON_CPUS
from megasync.config.keys import all_keys
from megasync.config.schema import Config
from megasync.models.folder import check_model_folder, longest_by
from tests.support.config_files import write_model
from tests.support.replicas import numbers

if TYPE_CHECKING:
    import vllm.outputs

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


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


def test_sizes_of_heads_on_cpus_are_those_that_the_check_knows() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == HEADS_ON_CPUS


@pytest.mark.parametrize(
    ("fields", "longest", "by"),
    [
        ({}, 32768, "max_position_embeddings"),
        ({"max_position_embeddings": 64, "n_positions": 128}, 64, "max_position_embeddings"),
        ({"max_position_embeddings": 64, "seq_length": 32, "max_sequence_length": 48}, 32, "seq_length"),
        ({"max_position_embeddings": 64, "model_max_length": 56, "seq_len": 8}, 56, "model_max_length"),
        ({"n_positions": 64, "rope_parameters": LINEAR | {"factor": 2.5}}, 160, "n_positions and the factor 2.5"),
        ({"max_position_embeddings": 64, "rope_parameters": LLAMA3}, 64, "max_position_embeddings"),
        ({"max_position_embeddings": 64, "rope_parameters": YARN}, 64, "max_position_embeddings"),
        ({"seq_len": 40, "rope_parameters": None, "rope_scaling": LINEAR | {"factor": 4}}, 160, "seq_len and the factor 4"),
    ],
)
def test_a_model_has_as_many_positions_as_the_check_knows(
    tmp_path: Path, fields: dict[str, object], longest: int, by: str
) -> None:
    """Whatever its tokenizer's model_max_length is."""
    from vllm.config import ModelConfig

    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 8}')
    folder = write_model(tmp_path, architectures=["Qwen3ForCausalLM"], **fields)
    assert check_model_folder(folder).max_position_embeddings == longest and longest_by(folder) == by
    assert ModelConfig(model=str(folder), dtype="float32", skip_tokenizer_init=True).max_model_len == longest


def test_workers_have_what_the_extension_calls_and_nothing_of_its_names() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    from bridge.receive.receiver import SLEPT_BESIDE_OTHERS, WorkerExtension

    for name in ("start_weight_update", "update_weights", "finish_weight_update"):
        assert callable(getattr(Worker, name))
    assert arguments(Worker.sleep) == ["self", "level"] and arguments(Worker.wake_up) == ["self", "tags"]
    after_all = inspect.getsource(Worker.sleep).partition("self.sleep_mode_backend.suspend(level)")[2]
    assert f'assert freed_bytes >= 0, "{SLEPT_BESIDE_OTHERS}"' in after_all  # and only logs after it
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


def test_processes_of_a_replica_spin_for_a_second_after_a_message_unless_set(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_processes_of_a_replica_on_cpus_are_forked_by_what_vllm_looks_at() -> None:
    """patches.fork_processes. That they end with their actor is in tests/runs/test_sync_vllm.py."""
    from vllm import plugins
    from vllm.platforms import current_platform
    from vllm.utils import system_utils
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    if not current_platform.is_cpu():
        pytest.skip("of replicas on CPUs")
    assert "if is_in_ray_actor():" in inspect.getsource(system_utils._maybe_force_spawn)
    assert "multiprocessing.get_context(mp_method)" in inspect.getsource(system_utils.get_mp_context)
    assert "import setproctitle\n" in inspect.getsource(system_utils.set_process_title)
    assert "if plugins_loaded:" in inspect.getsource(plugins.load_general_plugins)
    assert all("load_general_plugins()" in inspect.getsource(begins) for begins in (EngineCore, WorkerWrapperBase))


def test_values_of_requests_are_expanded_to_their_drafts_as_vllm_says() -> None:
    """patches.verify_drafts_on_cpus: a request without drafts has no rows, and temperature 0 counts as 1."""
    from vllm.v1.sample import rejection_sampler

    ours = patches.expand_batch_to_tokens
    theirs = inspect.signature(rejection_sampler.expand_batch_to_tokens).parameters.values()
    assert [each.default for each in theirs] == [each.default for each in inspect.signature(ours).parameters.values()]
    filtering = inspect.getsource(rejection_sampler.apply_sampling_constraints)
    assert "expand_batch_to_tokens(" in filtering and "apply_top_k_top_p(logits, top_k, top_p)" in filtering
    assert torch.equal(ours(torch.tensor([0.0, 0.7, 0.5]), torch.tensor([2, 2, 5]), 5, 0, 1), torch.tensor([1, 1, 0.5, 0.5, 0.5]))
    assert ours(torch.tensor([3, 8]), torch.tensor([1, 3]), 3).tolist() == [3, 8, 8]


def test_the_class_of_a_model_is_looked_at_where_patches_put_it() -> None:
    """patches.inspect_models_in_forks."""
    from vllm.model_executor.models import registry

    assert "_run_in_subprocess(" in inspect.getsource(registry._LazyRegisteredModel.inspect_model_cls)
    assert list(inspect.signature(registry._run_in_subprocess).parameters) == ["fn"]


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
    """core_requests and submit stand for AsyncLLM.add_request"""
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
            self.reported: list[str] = []

        async def finish_weight_update(self) -> None:
            self.reported.append("finish")

        async def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
            self.reported.append("reset running" if reset_running_requests else "reset")
            return len(self.reported) != 2

    class Stamping(Plain):
        async def update_weight_version(self, new_version: str) -> None:
            self.reported.append(new_version)

    plain, stamping = Plain(), Stamping()
    assert not asyncio.run(api.finish_update(plain, 7, adapter=False, recompute=True))
    assert asyncio.run(api.finish_update(Stamping(), 7, adapter=False, recompute=False))
    assert not asyncio.run(api.finish_update(stamping, 7, adapter=True, recompute=False))
    assert plain.reported == ["finish", "reset running"]
    assert stamping.reported == ["7", "reset"], "vLLM's own finish drops adapters"
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
    completion = to_completion(finished(), [], 3)
    assert numbers(completion) == ((5, 6), (-0.5, -1.5), (3, 3), "length")
    arrays = (completion.token_ids, completion.log_probs, completion.weight_versions)
    assert [array.dtype.name for array in arrays] == ["int32", "float32", "int32"]


def test_the_most_likely_tokens_follow_each_sampled_one() -> None:
    from vllm.logprobs import FlatLogprobs

    output, log_probs = finished(), FlatLogprobs()
    for sampled in (5, 6):
        log_probs.append_fast([sampled, 7, sampled], [-1.5, -0.25, -1.5], iter([2, 1, 2]), [None] * 3)
    log_probs.append_fast([8], [-9.0], iter([1]), [None])  # behind a stop text
    output.outputs[0].logprobs = log_probs
    completion = to_completion(output, [], 3, num_top=2)
    assert (completion.log_probs.tolist(), completion.support.size) == ([-1.5, -1.5], 0)
    assert [array.tolist() for array in completion.top] == [[[7, 5], [7, 6]], [[-0.25, -1.5]] * 2]


def test_tokens_before_an_update_keep_their_version() -> None:
    assert to_completion(finished(), [(1, 3)], 4).weight_versions.tolist() == [3, 4]
    assert to_completion(finished(), [(0, 2), (1, 3), (2, 4)], 5).weight_versions.tolist() == [3, 4]


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen3_moe", False), ("glm4_moe", False)])
def test_a_replica_on_a_gpu_of_its_own_is_planned_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, tied: bool
) -> None:
    """Needs 2 devices. The trainer's is the first; the replica gets the second. vLLM has routers of glm4_moe in float32."""
    import ray
    from safetensors.torch import load_file

    from bridge.config import SyncConfig
    from bridge.send.publish import Publisher
    from tests.support.replicas import OpenPool
    from tests.runs.sync_pools import differing, in_layer_order
    from tests.support.sources import DictSource
    from tests.support.tiny_models import write_tiny_model

    folders = [write_tiny_model(tmp_path / str(seed), family, tied, seed, torch.bfloat16, head_dim=64) for seed in range(3)]
    torch.zeros(1, device="cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with ExitStack() as stack:
        ray.init(include_dashboard=False, log_to_driver=False)
        stack.callback(ray.shutdown)
        replica = ReplicaConfig(str(folders[0]), max_model_len=64, kv_cache_bytes=2**26, enforce_eager=True)
        pool = OpenPool.start(replica, 1)
        stack.callback(pool.close)
        for transport in ("nccl", "shm"):
            source = DictSource({})
            publisher = None
            for version, folder in enumerate(folders[1:]):
                tensors = in_layer_order(load_file(folder / "model.safetensors"))
                source.tensors = {name: tensor.cuda() for name, tensor in tensors.items()}
                sync = SyncConfig(transport=transport, bucket_bytes=100_000, verify="readback")
                publisher = publisher or Publisher(source, pool, sync)
                assert publisher.publish(version).loader_fallback == {}
                assert differing(pool.read_back(), tensors) == []
            publisher.close()


def test_what_batch_invariance_tells_nccl_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the worker and the trainer may choose another protocol for one broadcast of weights, and wait for each other."""
    for name in register.NCCL:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_PROTO", "LL")
    monkeypatch.setattr(register, "_nccl", {})
    register.keep_nccl()
    monkeypatch.setenv("NCCL_PROTO", "Simple")
    monkeypatch.setenv("NCCL_MAX_NCHANNELS", "1")
    register.keep_nccl()  # in a process whose plug-ins are loaded again
    register.restore_nccl()
    assert {name: value for name, value in os.environ.items() if name in register.NCCL} == {"NCCL_PROTO": "LL"}


def test_variables_of_torchrun_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_worker_that_compiles_nothing_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm/serving/unwarmed.py: the method that it replaces is vLLM's, as is what that returns."""
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.worker.gpu_worker import Worker

    cold = ReplicaConfig("model", warms_up=False, enforce_eager=True)
    assert "worker_cls" not in api.engine_arguments(cold)  # a CPU's has no such kernels
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert "worker_cls" not in api.engine_arguments(ReplicaConfig("model"))
    assert "worker_cls" not in api.engine_arguments(ReplicaConfig("model", warms_up=False))  # graphs are made of compiled kernels
    name = api.engine_arguments(cold)["worker_cls"]
    worker = resolve_obj_by_qualname(name)
    assert issubclass(worker, Worker)
    assert worker.compile_or_warm_up_model is not Worker.compile_or_warm_up_model
    assert worker.compile_or_warm_up_model(None)._fields == ("language_model", "encoder")
