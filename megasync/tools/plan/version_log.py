"""Memory and disk space of the log of versions (`sync.log`), and memory of `sync.transport: delta`. No torch in here.

Bytes of a delta were measured at small learning rates (docs/verify.md); larger ones, or new optimizers, change more weights.
"""

from __future__ import annotations

import math

from engine.config import DTYPE_BYTES
from megasync.config.schema import Config

DELTA_SHARE = {"bfloat16": 0.005, "float16": 0.005, "float32": 0.6}  # of the weights' bytes


def has_weights(config: Config) -> bool:
    return config.algorithm.name == "grpo" and config.sync.log == "deltas"


def copy_bytes(config: Config, parameters: int) -> int:
    """Host memory of senders: the log and the transport each compare with a copy of the previous version."""
    copies = has_weights(config) + (config.algorithm.name == "grpo" and config.sync.transport == "delta")
    return copies * parameters * DTYPE_BYTES[config.model.dtype]


def workers_bytes(config: Config, parameters: int) -> int:
    """Host memory of all vLLM workers: under `delta` each keeps a copy."""
    if config.algorithm.name != "grpo" or config.sync.transport != "delta":
        return 0
    return config.rollout.replicas * config.rollout.tensor_parallel * parameters * DTYPE_BYTES[config.model.dtype]


def disk_bytes(config: Config, parameters: int) -> int:
    """At the end of a run without interruptions: each process that resumes it begins with a whole version."""
    if not has_weights(config):
        return 0
    every, keep = config.sync.log_full_every, config.sync.log_keep
    versions = config.run.steps + 1
    if keep is not None:
        versions = min(versions, keep + every)  # the oldest kept version is made of up to `every` before it
    whole = math.ceil(versions / every)
    weights = parameters * DTYPE_BYTES[config.model.dtype]
    return round(weights * (whole + (versions - whole) * DELTA_SHARE[config.model.dtype]))
