"""All that depends on the vLLM version: 0.26 and 0.32; file:line notes are relative to the package of vllm(-cpu) 0.32.0.

register       the entry point `vllm.general_plugins`: every vLLM process calls it
environment    variables to set before vLLM is imported
build_engine, stop_engine, pause, sleep, wake, finish_update   an AsyncLLM from a ReplicaConfig
submit, to_completion, submit_probe, prompt_log_probs    requests and outputs

Leaves out loading weights (vllm_reload.py), reading them back (vllm_readback.py) and adapters (vllm_adapter.py). vLLM is
imported inside the functions: the trainer imports this file too.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from bridge.config import ReplicaConfig
from bridge.generation import Completion, GenerationRequest
from bridge.layout.splitmix import GAMMA, mix64
from bridge.receive import vllm_adapter, vllm_latent, vllm_routing
from bridge.replicas import processes, vllm_outputs

BACKEND = "megasync"
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")
REPLICA_PID = "MEGASYNC_REPLICA_PID"  # set in a replica's actor, inherited by its engine core and workers
START_FAILURE = "EngineCore failed to start"  # v1/engine/core.py:1510, also in 0.26
FAILED_START_SECONDS = 20.0
SEED_MASK = 2**63 - 1
CPU_KV_CACHE_BYTES = 2**30
CPU_SPIN_SECONDS = 0.01
WEIGHTS, CACHES = "weights", "kv_cache"  # kinds of memory (device_allocator/cumem.py)
# Large tensors come from the kernel, in huge pages where it has them, and go back to it: a reload takes and frees each of
# the weights several times, between ones that stay, which leaves glibc's own heap full of holes.
MALLOC_OF_CPU_REPLICAS = f"glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold={4 * 2**20}"


def register() -> None:
    """Make the receiver known to vLLM, and let a replica's child processes end with the replica. Safe to repeat."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # no public query; factory.py:57 raises
        WeightTransferEngineFactory.register_engine(BACKEND, "bridge.receive.receiver", "BucketReceiver")
    replica = os.environ.get(REPLICA_PID)
    if replica is not None and int(replica) != os.getpid():
        processes.die_with(int(replica))
        spin_less()
        if vllm_outputs.HOLDS in os.environ:
            vllm_outputs.hold_outputs()


def spin_less() -> None:
    """The core and the workers of a replica on CPUs wait for each other's messages asleep.

    vLLM has each of them spin for a second after a message (distributed/device_communicators/shm_broadcast.py:122), on cores
    that the trainer and other replicas could use.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

        SpinCondition.__init__.__defaults__ = (CPU_SPIN_SECONDS,)  # busy_loop_s, which no caller gives


def environment(*, cuda: bool) -> dict[str, str]:
    """Environment variables of a replica's processes, to be there before vLLM and torch are imported."""
    common = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # not every host has flashinfer
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if cuda:
        return common
    return common | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_CI_ENV": "1",  # no warm-up
        "TORCHDYNAMO_DISABLE": "1",  # its inductor asks for a C++ compiler, which not every host has
        "OMP_NUM_THREADS": "1",
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", MALLOC_OF_CPU_REPLICAS),
    }


def prepare_process(*, holds_outputs: bool = True) -> None:
    """Before a replica's engine is built: its children are to end with this process, their sockets have a folder, and its core
    holds outputs back (vllm_outputs.py).
    """
    forget_launcher()
    os.environ |= {vllm_outputs.HOLDS: "1"} if holds_outputs else {}
    os.environ |= {REPLICA_PID: str(os.getpid()), "VLLM_RPC_BASE_PATH": processes.make_sockets()}


def forget_launcher() -> None:
    """Drop what torchrun told the trainer from this process's environment, which a Ray of the trainer's has handed on.

    With TORCHELASTIC_USE_AGENT_STORE torch takes any tcp:// address for that of torchrun's store, and the workers of vLLM 0.26,
    which meet at one (v1/executor/uniproc_executor.py:73), wait for a server that nobody starts (torch's
    distributed/rendezvous.py:188).
    """
    for name in [name for name in os.environ if name in LAUNCHER or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]


def build_engine(config: ReplicaConfig) -> Any:
    """Start an AsyncLLM; comes back when it can serve. Raises what vLLM raises."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over `kv_cache_bytes` (platforms/cpu.py:324)
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(config)))


def engine_arguments(config: ReplicaConfig) -> dict[str, Any]:
    """Fields of AsyncEngineArgs, the config's own over ours; those that it may not set are in vllm_arguments.py."""
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
        "skip_tokenizer_init": not config.detokenizes,
        "generation_config": "vllm",
        "enable_prefix_caching": True,
        # CPU generators cannot put back the random numbers of a prompt's first part (v1/worker/gpu_model_runner.py:3502)
        "enable_chunked_prefill": torch.cuda.is_available(),
        "disable_log_stats": True,
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": "bridge.receive.receiver.WorkerExtension",
    }
    if config.returns_experts:
        arguments |= vllm_routing.engine_arguments()
    if config.shares_devices and torch.cuda.is_available():
        arguments["enable_sleep_mode"] = True
    if config.adapter_rank:
        arguments |= vllm_adapter.engine_arguments(config.adapter_rank)
    return arguments | config.engine_arguments | vllm_latent.engine_arguments(config.model_path, config.engine_arguments)


@contextmanager
def noticing_failure(read_log: Callable[[], str]) -> Iterator[None]:
    """Around build_engine: an engine core that has said that it failed and does not end is ended, so that the start fails too.

    The client waits for a message of the core or for its end (v1/engine/utils.py), which a core that is held up in its exit,
    by CUDA or by threads of its own, gives neither of.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(1.0):
            if START_FAILURE in read_log():
                if not over.wait(FAILED_START_SECONDS):
                    processes.end_descendants(os.getpid())
                return

    thread = threading.Thread(target=watch, name="watch-start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


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


async def sleep(engine: Any, *, keep_weights: bool) -> None:
    """Give device memory up while paused, straight from the workers (v1/worker/gpu_worker.py:294): AsyncLLM.sleep has a pause of
    its own. Kept weights go to host memory. CPU workers only log that they cannot.
    """
    await engine.collective_rpc("sleep", args=(1 if keep_weights else 2,))


async def wake(engine: Any, kinds: list[str]) -> None:
    """Get memory of these kinds back; WEIGHTS that were not kept have any values until the next sync."""
    await engine.collective_rpc("wake_up", args=(kinds,))


async def finish_update(engine: Any, version: int, *, adapter: bool, recompute: bool) -> bool:
    """End a weight update, stamp what is generated from now on (0.26 has no stamps) and forget cached prefixes, which were
    computed with other weights; whether that was possible: not where requests are held, unless theirs are to be computed
    anew (`recompute`). vLLM knows nothing of an update that brought an adapter.

    The core takes what it is asked in this order (v1/engine/core.py:926), so that nothing waits for the answer before it.
    """
    calls = [] if adapter else [engine.finish_weight_update()]
    if hasattr(engine, "update_weight_version"):
        calls.append(engine.update_weight_version(str(version)))
    *_, is_reset = await asyncio.gather(*calls, engine.reset_prefix_cache(reset_running_requests=recompute))
    return bool(is_reset)


def mix_seed(seed: int, sample: int) -> int:
    """A seed for one sample that shares no noise with its neighbours'."""
    state = (seed * GAMMA + sample * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) % 2**64
    return int(mix64(np.array([state], np.uint64))[0]) & SEED_MASK


async def submit(
    engine: Any,
    request: GenerationRequest,
    sample: int,
    request_id: str,
    *,
    version: int,
    with_adapter: bool = False,
    returns_experts: bool = False,
) -> Any:
    """Hand one sample to the engine; comes back once it is on its way to the core. The queue gives the output.

    Prefixes are shared with requests of the same `version` only: those of held requests outlast an update.
    """
    parameters = sampling_parameters(request, sample, returns_experts=returns_experts)
    prompt = {"prompt_token_ids": list(request.prompt_ids), "cache_salt": str(version)}
    return await engine.add_request(request_id, prompt, parameters, lora_request=vllm_adapter.request(with_adapter))


def sampling_parameters(request: GenerationRequest, sample: int, *, returns_experts: bool = False) -> Any:
    """vLLM's SamplingParams of one sample of a request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        max_tokens=request.max_new_tokens,
        seed=mix_seed(request.seed, sample) if request.temperature > 0 else None,
        stop_token_ids=list(request.stop_token_ids),
        stop=list(request.stop),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(request.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        **(vllm_routing.sampling_arguments() if returns_experts else {}),
    )


async def submit_probe(engine: Any, ids: Sequence[int], request_id: str, *, version: int, with_adapter: bool) -> Any:
    """As `submit`: a sequence whose own tokens get log-probs, of which vLLM reads none from its prefix cache."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.FINAL_ONLY
    parameters = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=kind)
    prompt = {"prompt_token_ids": list(ids), "cache_salt": str(version)}
    return await engine.add_request(request_id, prompt, parameters, lora_request=vllm_adapter.request(with_adapter))


def prompt_log_probs(output: Any) -> npt.NDArray[np.float32]:
    """Of a finished `submit_probe`; the first token has none."""
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return np.array([entry[token].logprob for token, entry in pairs], np.float32)


def to_completion(output: Any, marks: Sequence[tuple[int, int]], version: int, routed_experts: Any = None) -> Completion:
    """From a finished RequestOutput with one sample.

    `marks`: up to which token it was made by which version; the rest is `version`'s. vLLM 0.32 stamps outputs by itself.
    """
    sample = output.outputs[0]
    tokens = np.array(sample.token_ids, np.int32)
    firsts = sample.logprobs.start_indices  # the sampled token comes first at its position (vllm/v1/engine/logprobs.py:110)
    log_probs = np.array(sample.logprobs.logprobs, np.float32)[firsts]
    assert len(tokens) == len(log_probs), "vLLM gave a log-prob for each token"
    versions = np.full(len(tokens), version, np.int32)
    begin = 0
    for end, former in marks:
        versions[begin:end], begin = former, end
    experts = np.empty((0, 0, 0), np.uint8) if routed_experts is None else routed_experts
    return Completion(tokens, log_probs, versions, str(sample.finish_reason), experts)
