"""Process groups: torch.distributed and megatron-core's parallel state, from a ParallelConfig.

Leaves out who starts the ranks (torchrun or Ray); reads their environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from engine import rules
from engine.runtime import device, gloo, memory
from engine.config import ParallelConfig
from engine.runtime.megatron import parallel_state as mpu, tensor_parallel


@dataclass(frozen=True)
class Layout:
    """This rank's place in every group."""

    rank: int
    world_size: int
    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    data_rank: int
    data_size: int
    expert_size: int
    expert_data_rank: int  # among the ranks that have the same experts
    context_rank: int = 0
    context_size: int = 1

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def reports(self) -> bool:
        """Whether this rank reports for its data-parallel rank: the first tensor- and context-parallel one of the last stage."""
        return self.is_last_stage and self.tensor_rank == self.context_rank == 0

    @property
    def is_sender(self) -> bool:
        """One rank of each pipeline stage holds the gathered tensors of an export."""
        return self.tensor_rank == 0 and self.copy_rank == 0

    @property
    def copy_rank(self) -> int:
        """Among the ranks that have the same parameters outside of experts: the data- and context-parallel ones."""
        return self.data_rank * self.context_size + self.context_rank


def initialize(config: ParallelConfig, seed: int, timeout_seconds: float = 1800.0) -> Layout:
    """Join the world and build the groups.

    Raises:
        ValueError: the world size is no multiple of tensor * pipeline * context, or of tensor * pipeline * expert.
    """
    if found := rules.ranks_problem(config, int(os.environ.get("WORLD_SIZE", "1"))):
        raise ValueError(str(found))
    if device.has_cuda():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    memory.enable_expandable_segments()
    if not device.has_cuda():
        gloo.share_device()
    if not dist.is_initialized():
        backend, timeout = "nccl" if device.has_cuda() else "gloo", timedelta(seconds=timeout_seconds)
        if "MASTER_ADDR" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:  # one rank, which no launcher has started, meets no other: its store needs no socket
            os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
            dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
        context_parallel_size=config.context,
        expert_model_parallel_size=config.expert,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return layout()


def layout() -> Layout:
    return Layout(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tensor_rank=mpu.get_tensor_model_parallel_rank(),
        tensor_size=mpu.get_tensor_model_parallel_world_size(),
        pipeline_rank=mpu.get_pipeline_model_parallel_rank(),
        pipeline_size=mpu.get_pipeline_model_parallel_world_size(),
        data_rank=mpu.get_data_parallel_rank(),
        data_size=mpu.get_data_parallel_world_size(),
        expert_size=mpu.get_expert_model_parallel_world_size(),
        expert_data_rank=mpu.get_expert_data_parallel_rank(),
        context_rank=mpu.get_context_parallel_rank(),
        context_size=mpu.get_context_parallel_world_size(),
    )


def expert_group() -> dist.ProcessGroup | None:
    """The expert-parallel ranks, and of each the tensor-parallel ones, in this order; None where every rank has all experts."""
    group: dist.ProcessGroup = mpu.get_expert_tensor_and_model_parallel_group()
    return group if mpu.get_expert_model_parallel_world_size() > 1 else None


def shutdown() -> None:
    """Leave the groups and the world. Safe to call when they were never built."""
    if mpu.is_initialized():
        mpu.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
