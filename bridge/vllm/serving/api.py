"""vLLM's engine as a replica has it, with 0.26 and 0.32; file:line notes are relative to the package of vllm(-cpu) 0.32.0.

register       the entry point `vllm.general_plugins`: every vLLM process calls it
environment    variables to set before vLLM is imported
build_engine, stop_engine, pause, num_tokens, sleep, wake, finish_update   an AsyncLLM from a ReplicaConfig

Leaves out its requests (requests.py), replaced parts of vLLM (patches.py), and its weights: loading, reading back,
adapters (vllm/weights/). vLLM is imported inside the functions: the trainer imports this file too.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from bridge import processes
from bridge.config import ReplicaConfig
from bridge.generation import Speculation
from bridge.vllm.exact import register as exact
from bridge.vllm.serving import multicast, patches, routing, speculation, text_alone
from bridge.vllm.serving.requests import MAX_LOG_PROBS
from bridge.vllm.weights import adapter as vllm_adapter
from bridge.vllm.weights import delta_net, fp8, gpt_oss, latent

BACKEND = "megasync"
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")
REPLICA_PID = "MEGASYNC_REPLICA_PID"  # set in a replica's actor, inherited by its engine core and workers
START_FAILURE = "EngineCore failed to start"  # v1/engine/core.py:1510, also in 0.26
FAILED_START_SECONDS = 20.0
CPU_KV_CACHE_BYTES = 2**30
NICENESS_ON_CPU = 10  # a tenth of a core that others have work for
SCHEDULERS = ("bridge.vllm.serving.outputs.HoldingScheduler", "bridge.vllm.serving.outputs.AsyncHoldingScheduler")
WEIGHTS, CACHES = "weights", "kv_cache"  # kinds of memory (device_allocator/cumem.py)


def register() -> None:
    """Make the receiver known to vLLM, and let a replica's child processes end with the replica. Safe to repeat."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # no public query; factory.py:57 raises
        WeightTransferEngineFactory.register_engine(BACKEND, "bridge.receive.receiver", "BucketReceiver")
    text_alone.register()
    gpt_oss.register()
    if os.environ.get(fp8.VARIABLE) == "1":
        fp8.register()
    exact.keep_nccl()
    if exact.is_exact():
        exact.register()
    elif exact.is_steady():
        exact.register_attention()
    replica = os.environ.get(REPLICA_PID)
    if replica is not None and int(replica) != os.getpid():
        processes.die_with(int(replica))
        patches.spin_less()
        patches.verify_drafts_on_cpus()


def environment(*, cuda: bool) -> dict[str, str]:
    """Environment variables of a replica's processes, to be there before vLLM and torch are imported."""
    common = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # not every host has flashinfer
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # but see patches.fork_processes
        "NUMBA_NUM_THREADS": "1",  # numba's pool sets OpenMP's number of threads for all kernels, and idle ones spin
    }
    if cuda:
        return common | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # looks for GPUs without CUDA, as a process to be forked has to
    return common | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_CI_ENV": "1",  # no warm-up
        "TORCHDYNAMO_DISABLE": "1",  # its inductor asks for a C++ compiler, which not every host has
        "OMP_NUM_THREADS": "1",
        processes.MALLOC: os.environ.get(processes.MALLOC, processes.MALLOC_ON_CPU),
    }


def prepare_process() -> None:
    """Before a replica's engine is built: its children are to end with this process, and their sockets have a folder."""
    forget_launcher()
    os.environ |= {REPLICA_PID: str(os.getpid()), "VLLM_RPC_BASE_PATH": processes.make_sockets()}


def yield_cores() -> None:
    """On CPUs, of a replica that has started: on cores that it shares with the trainer, whose steps a run waits for, that one is
    first. On GPUs those wait for vLLM's core.
    """
    import torch

    if not torch.cuda.is_available():
        processes.lower_priority(os.getpid(), NICENESS_ON_CPU)


def forget_launcher() -> None:
    """Remove torchrun's variables from this process's environment, which a Ray started by the trainer inherits.

    With TORCHELASTIC_USE_AGENT_STORE torch takes any tcp:// address for that of torchrun's store, and the workers of vLLM 0.26,
    which meet at one (v1/executor/uniproc_executor.py:73), wait for a server that nobody starts (torch's
    distributed/rendezvous.py:188).
    """
    for name in [name for name in os.environ if name in LAUNCHER or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]


def import_engine() -> tuple[Any, Any]:
    """AsyncEngineArgs and AsyncLLM, most of the seconds before an engine is built."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncEngineArgs, AsyncLLM


def build_engine(config: ReplicaConfig) -> Any:
    """Start an AsyncLLM whose core keeps tokens until their request ends; it can serve then. Raises what vLLM raises."""
    engine_args, async_llm = import_engine()
    choose_layers(config)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over `kv_cache_bytes` (platforms/cpu.py:324)
    patches.inspect_models_in_forks()
    arguments = engine_args(**engine_arguments(config))
    made = arguments.create_engine_config()
    patches.fork_processes()
    if config.detokenizes:
        from bridge.vllm.serving import stops  # imports vLLM

        stops.detokenizer(config.model_path)  # or the first request with a stop text would hold up the others
    made.scheduler_config.scheduler_cls = SCHEDULERS[bool(made.scheduler_config.async_scheduling)]
    return async_llm.from_vllm_config(made, disable_log_stats=arguments.disable_log_stats)


def choose_layers(config: ReplicaConfig) -> None:
    """Environment variables by which `register` has other layers computed; before vLLM loads its plug-ins, for EngineArgs."""
    import torch

    if config.is_fp8:
        os.environ[fp8.VARIABLE] = "1"
    if config.is_exact:
        os.environ[exact.VARIABLE] = "1"
        os.environ |= exact.GPU_ENVIRONMENT if torch.cuda.is_available() else {}
    if config.is_deterministic and torch.cuda.is_available():  # on CPUs equal batches give equal bits
        os.environ |= {"VLLM_BATCH_INVARIANT": "1", exact.STEADY: "1"}


def engine_arguments(config: ReplicaConfig) -> dict[str, Any]:
    """Fields of AsyncEngineArgs, overridden by the config's; arguments.py has the fields that a config may not set."""
    import torch
    from vllm.config import WeightTransferConfig
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    one_worker = "uni" if torch.cuda.is_available() else UniProcExecutor  # CPUs make "mp" of "uni" (platforms/cpu.py:334)
    arguments: dict[str, Any] = {
        "model": config.model_path,
        "dtype": config.dtype,
        "tensor_parallel_size": config.tensor_parallel,
        "distributed_executor_backend": "mp" if config.tensor_parallel > 1 else one_worker,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "kv_cache_memory_bytes": config.kv_cache_bytes or (None if torch.cuda.is_available() else CPU_KV_CACHE_BYTES),
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enforce_eager": config.enforce_eager or not torch.cuda.is_available(),  # compiling asks for a C++ compiler there
        "seed": config.seed,
        "skip_tokenizer_init": True,  # stop texts are looked for by our own (stops.py)
        "generation_config": "vllm",
        "enable_prefix_caching": True,
        # CPU generators cannot put back the random numbers of a prompt's first part (v1/worker/gpu_model_runner.py:3502)
        "enable_chunked_prefill": torch.cuda.is_available(),
        "disable_log_stats": True,
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": "bridge.receive.receiver.WorkerExtension",
    }
    arguments |= _optional_arguments(config, arguments["enforce_eager"])
    arguments |= config.engine_arguments | latent.engine_arguments(config.model_path, config.engine_arguments)
    arguments |= delta_net.engine_arguments(config.model_path, config.engine_arguments)
    if gpt_oss.is_quantised(config.model_path):
        arguments["hf_overrides"] = partial(gpt_oss.without_quantisation, fields=arguments.get("hf_overrides") or {})
    has_workers = config.tensor_parallel > 1 and torch.cuda.is_available()
    return multicast.without_fusion(arguments) if has_workers and not multicast.is_available() else arguments


def _optional_arguments(config: ReplicaConfig, enforce_eager: bool) -> dict[str, Any]:
    import torch

    arguments: dict[str, Any] = {}
    if not config.warms_up and config.enforce_eager and torch.cuda.is_available():
        arguments["worker_cls"] = "bridge.vllm.serving.unwarmed.UnwarmedWorker"
    if config.is_exact:
        arguments["quantization"] = exact.METHOD
    if config.is_fp8:
        arguments |= fp8.ENGINE_ARGUMENTS
    if (config.is_exact or config.is_deterministic) and not enforce_eager:
        arguments["compilation_config"] = exact.UNCOMPILED  # how compiled kernels add is chosen by their time
    arguments |= text_alone.engine_arguments(config.model_path, config.head_dtype) | speculation.engine_arguments(config)
    if config.returns_experts:
        arguments |= routing.engine_arguments()
    if config.returns_support:
        arguments["max_logprobs"] = MAX_LOG_PROBS
    if config.shares_devices and torch.cuda.is_available():
        arguments["enable_sleep_mode"] = True
    if config.adapter_rank:
        arguments |= vllm_adapter.engine_arguments(config.adapter_rank, config.adapter_slots)
    return arguments


@contextmanager
def noticing_failure(read_log: Callable[[], str]) -> Iterator[None]:
    """Around build_engine: an engine core that has said that it failed and does not end is ended, so that the start fails too.

    The client waits for a message of the core or for its end (v1/engine/utils.py), which a core that is held up in its exit,
    by CUDA or by threads of its own, gives neither of.
    """

    def watch(over: threading.Event) -> None:
        while not over.wait(1.0):
            if START_FAILURE in read_log():
                if not over.wait(FAILED_START_SECONDS):
                    processes.end_descendants(os.getpid())
                return

    with processes.watched(watch, "watch-start"):
        yield


def stop_engine(engine: Any, timeout: float) -> None:
    """End the engine's processes and give back what they left in /dev/shm.

    Who removes shared memory that an ended process left is Python's resource tracker, a child of this process. Ray
    kills it together with this process, so it has to have finished before.
    """
    from multiprocessing import resource_tracker

    engine.shutdown(timeout=timeout)
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


async def pause(engine: Any, mode: str) -> None:
    """AsyncLLM.pause_generation (v1/engine/async_llm.py:952) without its sleep of 20 ms, keeping the prefix cache."""
    await engine.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)


async def num_tokens(engine: Any) -> dict[str, int]:
    """The number of tokens of each request that has not ended in the core (outputs.py), while generation is paused."""
    return await engine.engine_core.call_utility_async("scheduler")  # type: ignore[no-any-return]


async def take_speculation(engine: Any) -> Speculation:
    """Since the last call."""
    return Speculation(*await engine.engine_core.call_utility_async("scheduler", "speculation"))


async def sleep(engine: Any, *, keep_weights: bool) -> None:
    """Give device memory up while paused, straight from the workers (v1/worker/gpu_worker.py:294): AsyncLLM.sleep has a pause of
    its own. Kept weights go to host memory. CPU workers only log that they cannot.
    """
    await engine.collective_rpc("megasync_sleep", args=(1 if keep_weights else 2,))


async def wake(engine: Any, kinds: list[str]) -> None:
    """Get memory of these kinds back; WEIGHTS that were not kept have any values until the next sync."""
    await engine.collective_rpc("megasync_wake", args=(kinds,))


async def finish_update(engine: Any, version: int, *, adapter: bool, recompute: bool) -> bool:
    """End a weight update, stamp what is generated from now on (0.26 has no stamps) and forget cached prefixes, which were
    computed with other weights; whether that was possible: not where requests are held, unless theirs are
    recomputed (`recompute`). vLLM is not notified of adapter updates.

    The core takes requests in this order (v1/engine/core.py:926), so that none waits for the answer to an earlier one.
    """
    calls = [] if adapter else [engine.finish_weight_update()]
    if hasattr(engine, "update_weight_version"):
        calls.append(engine.update_weight_version(str(version)))
    *_, is_reset = await asyncio.gather(*calls, engine.reset_prefix_cache(reset_running_requests=recompute))
    return bool(is_reset)
