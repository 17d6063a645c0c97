"""Keys of vLLM replicas that serve a folder beside the policy, which teachers and judges share. No torch in here."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveInt

from engine.config import Section
from megasync.config.data_section import Share


class ReplicaKeys(Section):
    """How many replicas serve a path, and how."""

    replicas: PositiveInt = 1
    """For a path on replicas: number of vLLM engines, of each folder."""
    tensor_parallel: PositiveInt = 1
    """For a path on replicas: tensor-parallel workers per replica."""
    gpu_memory_utilization: Share = 0.85
    """For a path on replicas: fraction of the GPU's memory that vLLM may use."""
    engine_arguments: dict[str, Any] = Field(default_factory=dict)
    """For a path on replicas: further fields of vLLM's EngineArgs, by name, such as {max_model_len: 8192}."""

    @property
    def num_gpus(self) -> int:
        """GPUs of all replicas of a folder."""
        return self.replicas * self.tensor_parallel

    @property
    def given_replica_keys(self) -> list[str]:
        """Keys whose values are not the defaults."""
        defaults = ReplicaKeys()
        return [name for name in ReplicaKeys.model_fields if getattr(self, name) != getattr(defaults, name)]
