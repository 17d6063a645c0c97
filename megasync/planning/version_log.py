"""What the log of versions (`sync.log`) takes: memory for a copy of the weights, and room on a disk. No torch in here.

So does `sync.transport: delta` of memory, on both sides.

Bytes of a delta are what was measured at small learning rates (docs/bisect.md); larger ones, or new optimizers, change more.
"""

from __future__ import annotations

import math

from engine.config import DTYPE_BYTES
from megasync.config.schema import Config

DELTA_SHARE = {"bfloat16": 0.005, "float16": 0.005, "float32": 0.6}  # of the weights' bytes


def has_weights(config: Config) -> bool:
    return config.algorithm.name == "grpo" and config.sync.log == "deltas"


def copy_bytes(config: Config, parameters: int) -> int:
    """Of the former version, which the next one is compared with, by the log and by the transport: in host memory of senders."""
    copies = has_weights(config) + (config.algorithm.name == "grpo" and config.sync.transport == "delta")
    return copies * parameters * DTYPE_BYTES[config.model.dtype]


def workers_bytes(config: Config, parameters: int) -> int:
    """Of the copy that each vLLM worker keeps in host memory."""
    if config.algorithm.name != "grpo" or config.sync.transport != "delta":
        return 0
    return config.rollout.replicas * config.rollout.tensor_parallel * parameters * DTYPE_BYTES[config.model.dtype]


def disk_bytes(config: Config, parameters: int) -> int:
    """By the end of a run that is not interrupted: each process that goes on with it begins with a whole version."""
    if not has_weights(config):
        return 0
    every, keep = config.sync.log_full_every, config.sync.log_keep
    versions = config.run.steps + 1
    if keep is not None:
        versions = min(versions, keep + every)  # what the oldest kept one is made of, and the one that is being written
    whole = math.ceil(versions / every)
    weights = parameters * DTYPE_BYTES[config.model.dtype]
    return round(weights * (whole + (versions - whole) * DELTA_SHARE[config.model.dtype]))
