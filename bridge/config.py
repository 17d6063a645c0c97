"""The YAML key `sync`, and the settings of a vLLM replica. No torch in here."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt
from pydantic_core import PydanticCustomError

CANARY_SEQUENCES, CANARY_TOKENS = 4, 64  # scored after each sync, of so many tokens at most
BYTE_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

Transport = Literal["auto", "shm", "nccl", "ipc", "delta"]
Verify = Literal["none", "digest", "readback"]
VersionLog = Literal["off", "digests", "deltas"]
OnUpdate = Literal["drain", "continue", "restart"]


def _num_bytes(value: object) -> object:
    """`512MiB` as a whole number; other types are returned unchanged."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    num_bytes = float(match[1]) * BYTE_UNITS.get(match[2], math.nan) if match else math.nan
    if not num_bytes.is_integer():
        choices = "a whole number of bytes, or one with " + ", ".join(unit for unit in BYTE_UNITS if unit)
        raise PydanticCustomError("num_bytes", "a size in bytes is expected", {"choices": choices, "example": "64MiB"})
    return int(num_bytes)


ByteSize = Annotated[int, BeforeValidator(_num_bytes, json_schema_input_type=int | str)]


class SyncConfig(BaseModel):
    """How weights travel to the replicas."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    transport: Transport = "auto"
    """shm: shared memory, on one host; nccl: process groups, over NCCL between GPUs and gloo between CPUs; ipc: memory of GPUs
    that trainer and replicas share; delta: for slow links, what changed since the last sync, compressed, by gloo between host
    memories, where each side keeps a copy of the weights; auto: shm on one host without CUDA, ipc with CUDA and placement
    colocated, else nccl."""
    lanes: bool = True
    """With nccl, where trainer and replicas are on several hosts: all ranks that hold weights send a share of the buckets, to one
    worker of each host, which passes them on inside; false: one rank a pipeline stage sends all to all workers."""
    bucket_bytes: Annotated[ByteSize, Field(ge=4096)] = 512 * 2**20
    """Size of the two buffers that weights are streamed through, such as 512MiB."""
    verify: Verify = "digest"
    """digest: of every bucket, before it is loaded; readback: besides, every tensor is read back and compared once
    the sync is done."""
    timeout_seconds: PositiveFloat = 60.0
    """Deadline of one sync."""
    canary_tolerance: Annotated[float, Field(ge=0)] | None = 0.2
    """After each sync trainer and one replica in turn score a few prompts; the run stops where their log-probs differ by more
    than this a token on average, which averages bf16 noise out (0.006 in a dense 3B, 0.03 at its worst token) and wrong weights
    not; with rollout.dtype=fp8 the limit is five times as large; 0 or null: no such probe."""
    log: VersionLog = "off"
    """What `versions/` in the run's folder keeps of every version. digests: a digest of each tensor; deltas: besides, what
    changed since the version before, out of which `megasync export --version` makes the weights again, bit for bit; that takes
    host memory for a copy of the weights, and time at each sync."""
    log_full_every: PositiveInt = 20
    """With sync.log=deltas one version of so many is written whole; the others are made of it and of what changed since."""
    log_keep: PositiveInt | None = None
    """The number of newest versions that stay in the log, beside the files that they are built from (up to
    sync.log_full_every - 1 more); null: all."""


class SpeculationConfig(BaseModel):
    """Speculative decoding: tokens are drafted, and the model verifies several in one pass. What it samples is distributed as
    without drafts, and log-probs are the model's own.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    method: Literal["none", "ngram", "draft_model"] = "none"
    """ngram: prompt lookup, which drafts the tokens that followed an earlier occurrence of the last ones, in the prompt or the
    response. draft_model: a smaller model of the same vocabulary, whose weights syncs do not change."""
    path: Annotated[str, AfterValidator(os.path.expanduser)] = ""
    """draft_model: its Hugging Face folder."""
    num_tokens: Annotated[int, Field(ge=1, le=32)] = 4
    """The most drafted tokens of a sample that one pass verifies."""
    prompt_lookup_max: Annotated[int, Field(ge=1, le=64)] = 4
    """ngram: the longest run of last tokens that is searched for."""
    prompt_lookup_min: Annotated[int, Field(ge=1, le=64)] = 2
    """ngram: the shortest run of last tokens that is searched for, where longer ones have no match."""

    @property
    def is_set(self) -> bool:
        return self.method != "none"

    @property
    def draft_path(self) -> str:
        """Folder of the draft model; empty where there is none."""
        return self.path if self.method == "draft_model" else ""


@dataclass(frozen=True)
class ReplicaConfig:
    """One vLLM replica: a Ray actor with an AsyncLLM of `tensor_parallel` workers."""

    model_path: str
    dtype: str = "bfloat16"
    head_dtype: str = ""  # of logits; empty: that of the model
    is_deterministic: bool = False  # equal requests get equal responses, whatever runs beside them, on GPUs too
    is_fp8: bool = False  # linears of layers are quantised (export/fp8.py); the first sync brings the weights
    is_exact: bool = False  # every log-prob has the trainer's bits
    tensor_parallel: int = 1
    max_model_len: int | None = None
    max_num_seqs: int = 256
    kv_cache_bytes: int | None = None  # None: by gpu_memory_utilization; on a CPU 1 GiB
    gpu_memory_utilization: float = 0.85
    enforce_eager: bool = False  # on CPUs always
    warms_up: bool = True  # on GPUs; False, with enforce_eager alone: kernels are compiled by the first requests that need them
    seed: int = 0
    start_timeout_seconds: float = 600.0
    answer_timeout_seconds: float = 120.0  # without an answer for this long it counts as hung, where a call itself has no limit
    adapter_rank: int = 0  # above 0: it serves the folder's weights with adapters of at most this rank
    adapter_slots: int = 1  # how many of them it holds at a time
    shares_devices: bool = False  # with the trainer: it sleeps while the trainer works
    has_room: bool = False  # beside the trainer, on devices that they share: it need not wait with its start for memory
    devices: tuple[str, ...] = ()  # what CUDA_VISIBLE_DEVICES is to be for each replica; without any, Ray gives them devices
    on_update: OnUpdate = "drain"  # what a sync does with running requests: wait for them, hold them, or restart them
    recomputes_cache: bool = True  # continue: the KV cache of held requests is recomputed with the new weights
    never_syncs: bool = False  # a replica that starts again serves the folder's weights at once
    detokenizes: bool = False  # requests have stop texts: the tokenizer is read at the start
    returns_experts: bool = False  # completions have the experts of their tokens
    returns_support: bool = False  # completions of requests with a `top_k` have the tokens that the sampler kept
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    engine_arguments: dict[str, object] = field(default_factory=dict)  # any vLLM EngineArgs field
    key: str = "rollout"  # of the user's config, for errors
    gpus_beside: int = 0  # of this host, for replicas of other models

    @property
    def serves_folder(self) -> bool:
        """Whether it may generate before the first sync: a quantised one has random weights until then, as a bench may want."""
        return not self.is_fp8 or self.engine_arguments.get("load_format") == "dummy"
