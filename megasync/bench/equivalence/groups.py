"""Process groups and wrappers of a former engine, given up so that one start of ranks can run many engines in turn.

Leaves out how they are built (engine/parallel.py, engine/wrap.py).
"""

from __future__ import annotations

import gc

import torch.distributed as dist

from engine.megatron import parallel_state as mpu

FSDP_CLASSES = (
    *("MegatronFSDP", "ParamAndGradBuffer", "DataParallelBuffer", "FSDPDistributedIndex"),
    *("AllGatherPipeline", "GradReducePipeline"),
)


def leave_groups() -> None:
    """Give megatron-core's groups up and stay in the world, for an `initialize` with another layout.

    megatron-core 0.16.1 forgets its groups without ending them (core/parallel_state.py:2085), and each has threads.
    """
    if mpu.is_initialized():
        dist.barrier()
        groups, mpu._global_process_group_list = mpu._global_process_group_list or [], None
        for group in groups:
            if group is not None:  # None stands for the world
                dist.destroy_process_group(group)
        mpu.destroy_model_parallel()


def forget_wrappers() -> None:
    """Take Megatron-FSDP's objects apart: gradient hooks, which Python's collector does not see, keep them for ever.

    With them their process groups would stay, whose threads wake up a hundred times a second.
    """
    for thing in gc.get_objects():
        if type(thing).__name__ in FSDP_CLASSES and str(type(thing).__module__).startswith("megatron_fsdp."):
            vars(thing).clear()
    gc.collect()
