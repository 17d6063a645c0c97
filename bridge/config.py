"""What the YAML key `sync` means, and what a vLLM replica is started with. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass, field

TRANSPORTS = ("auto", "shm", "nccl", "ipc")
VERIFY = ("none", "digest", "readback")


@dataclass(frozen=True)
class SyncConfig:
    """How weights travel to the replicas."""

    # shm (one host) | nccl (process groups: NCCL, gloo on CPUs) | ipc (memory of GPUs that trainer and replicas share)
    # auto: shm without CUDA; with it ipc where the placement is colocated, else nccl
    transport: str = "auto"
    bucket_bytes: int = 512 * 2**20  # YAML also takes 512MiB and the like
    verify: str = "digest"  # none | digest | readback (digest, and every tensor read back and compared after commit)
    timeout_seconds: float = 60.0  # deadline of one sync


@dataclass(frozen=True)
class ReplicaConfig:
    """One vLLM replica: a Ray actor with an AsyncLLM of `tensor_parallel` workers."""

    model_path: str
    dtype: str = "bfloat16"
    tensor_parallel: int = 1
    max_model_len: int | None = None
    max_num_seqs: int = 256
    kv_cache_bytes: int | None = None  # None: by gpu_memory_utilization; on a CPU 1 GiB
    gpu_memory_utilization: float = 0.85
    enforce_eager: bool = False  # on CPUs always
    seed: int = 0
    start_timeout_seconds: float = 600.0
    adapter_rank: int = 0  # above 0: it serves the folder's weights with an adapter of at most this rank
    shares_devices: bool = False  # with the trainer: it sleeps while the trainer works
    devices: tuple[str, ...] = ()  # what CUDA_VISIBLE_DEVICES is to be for each replica; without any, Ray gives them devices
    engine_arguments: dict[str, object] = field(default_factory=dict)  # any vLLM EngineArgs field
