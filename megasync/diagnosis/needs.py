"""What a config needs of the machine that it is to run on, from below: where there is less, it cannot run.

Leaves out the memory of GPUs, which depends on the lengths of sequences. No torch in here.
"""

from __future__ import annotations

from dataclasses import dataclass

from bridge.config import Transport
from engine.config import DTYPE_BYTES
from megasync.config.schema import Config
from megasync.launch.num_ranks import num_replica_gpus
from megasync.planning import version_log

SEGMENT_BUFFERS = 2  # of a sender (bridge/transport/segment.py)
OBJECT_STORE_BYTES = 200 * 2**20  # of a Ray of the run's own (launch/ray_cluster.py)
SMALL_SEGMENTS_BYTES = 16 * 2**20  # vLLM's message queues, locks
PROCESS_BYTES = {False: 0.4 * 2**30, True: 1.5 * 2**30}  # a process that has imported torch, without and with CUDA
MOMENT_BYTES = 8  # Adam's two of a parameter, float32
MAIN_BYTES = {"float32": 0, "bfloat16": 4, "float16": 4}  # of a parameter's copy in float32, in memory
SAVED_BYTES = MOMENT_BYTES + 4  # in a checkpoint beside the weights: there the copy is of either dtype
CPU_CACHE_BYTES = 2**30  # vLLM's, where rollout.kv_cache_bytes is null


@dataclass(frozen=True)
class Needs:
    """In bytes, on one machine."""

    num_ranks: int = 2
    replica_gpus: int = 0  # beside the trainer's
    shared_memory: int = 0  # without it a sync fails
    roomy_shared_memory: int = OBJECT_STORE_BYTES + SMALL_SEGMENTS_BYTES  # with what Ray and vLLM would like
    host_memory: int = 0
    disk: int = 0
    parameters: int = 0


def needs_of(config: Config, parameters: int, num_ranks: int, *, has_gpus: bool) -> Needs:
    """`parameters`: of the model, 0 where it cannot be read; `has_gpus`: whether the run would use some."""
    shared = _segment_bytes(config, has_gpus=has_gpus)
    return Needs(
        num_ranks=num_ranks,
        replica_gpus=num_replica_gpus(config) if has_gpus else 0,
        shared_memory=shared,
        roomy_shared_memory=shared + (OBJECT_STORE_BYTES + SMALL_SEGMENTS_BYTES if _has_rollouts(config) else 0),
        host_memory=int(
            _trainer_bytes(config, parameters, num_ranks, has_gpus=has_gpus)
            + _replica_bytes(config, parameters, has_gpus)
            + version_log.copy_bytes(config, parameters)
            + version_log.workers_bytes(config, parameters)
        ),
        disk=_disk_bytes(config, parameters),
        parameters=parameters,
    )


def _has_rollouts(config: Config) -> bool:
    return config.algorithm.name == "grpo"


def transport_of(config: Config, *, has_gpus: bool) -> Transport:
    """As bridge/transport/open.py chooses, which imports torch."""
    if config.sync.transport != "auto":
        return config.sync.transport
    if not has_gpus:
        return "shm"
    return "ipc" if config.rollout.is_colocated else "nccl"


def _segment_bytes(config: Config, *, has_gpus: bool) -> int:
    """Each stage's sender has a segment of two buckets."""
    if not _has_rollouts(config) or transport_of(config, has_gpus=has_gpus) != "shm":
        return 0
    return config.engine.parallel.pipeline * SEGMENT_BUFFERS * config.sync.bucket_bytes


def _disk_bytes(config: Config, parameters: int) -> int:
    """Checkpoints that are kept, one more while it is written, the exported folder and the log of versions.

    Checkpoints of adapters are small.
    """
    weights = parameters * DTYPE_BYTES[config.model.dtype]
    needed, kept = weights if config.run.export_hf else 0, 0
    if every := config.checkpoint.every_steps:
        kept = min(config.checkpoint.keep + 1, max(1, -(-config.run.steps // every)))
    if config.engine.lora.rank == 0:
        needed += kept * (weights + parameters * SAVED_BYTES)
        needed += weights if config.checkpoint.resume == "newest_weights" else 0  # rebuilt at the start (run/checkpoints.py)
    return needed + version_log.disk_bytes(config, parameters)


def _trainer_bytes(config: Config, parameters: int, num_ranks: int, *, has_gpus: bool) -> float:
    """Of host memory: on CPUs all there is; on GPUs what is offloaded to it."""
    engine, rollout = config.engine, config.rollout
    trained = 0 if engine.lora.rank else parameters
    copies = 1 if engine.wrap == "megatron_fsdp" else max(1, num_ranks // (engine.parallel.tensor * engine.parallel.pipeline))
    parts = {
        "parameters": copies * parameters * DTYPE_BYTES[config.model.dtype],
        "gradients": copies * trained * DTYPE_BYTES[engine.gradient_dtype],
        "optimizer": trained * (MOMENT_BYTES + MAIN_BYTES[config.model.dtype]),
    }
    processes = num_ranks * PROCESS_BYTES[has_gpus]
    if not has_gpus:
        return sum(parts.values()) + processes
    offloaded = set(rollout.offload_trainer) if _has_rollouts(config) and rollout.is_colocated else set()
    offloaded |= {"optimizer"} if engine.optimizer.offload else set()
    return sum(parts[name] for name in offloaded) + processes


def _replica_bytes(config: Config, parameters: int, has_gpus: bool) -> float:
    if not _has_rollouts(config):
        return 0
    rollout = config.rollout
    workers = rollout.replicas * rollout.tensor_parallel
    processes = 2 * workers * PROCESS_BYTES[has_gpus]  # the actor and its engine core
    if has_gpus:
        return processes
    cache = workers * (CPU_CACHE_BYTES if rollout.kv_cache_bytes is None else rollout.kv_cache_bytes)
    return processes + rollout.replicas * parameters * DTYPE_BYTES[config.model.dtype] + cache
