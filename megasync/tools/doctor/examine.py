"""All checks on this machine, for a config or without one.

findings = examine(None, None, os.environ)
findings = examine(load_config("configs/smollm2.yaml"), None, os.environ)
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path

import psutil

from bridge.processes import MEMORY_FOLDER
from bridge.vllm.serving import multicast
from megasync.config.errors import ConfigError
from megasync.config.files import CHECKPOINTS, VERSIONS, lock_holder
from megasync.config.schema import Config
from megasync.launch.machine import Finding, check_shared_memory, free_bytes, installed, segment_bytes
from megasync.launch.num_ranks import default_num_ranks, num_replica_gpus, num_teacher_gpus
from megasync.models.tensors import num_parameters
from megasync.tools.doctor import gpus, network, software, system
from megasync.tools.doctor.environment import Place, check_environment
from megasync.tools.doctor.inputs import check_inputs

DEVICE_FILE = Path("/dev/nvidia0")


def examine(config: Config | None, num_ranks: int | None, given: Mapping[str, str]) -> Iterator[Finding]:
    """Findings as they come. `num_ranks`: of the trainer, None for the launchers' number; `given`: the environment."""
    there = gpus.read_gpus()
    visible, _ = gpus.visible(there, given.get("CUDA_VISIBLE_DEVICES"))
    is_colocated = config is not None and config.rollout.is_colocated
    has_rollouts = config is None or config.algorithm.name == "grpo"
    yield from _software(there, given)
    if there:
        use = gpu_use(config, num_ranks, len(visible))
        yield gpus.check_visible(there, given.get("CUDA_VISIBLE_DEVICES"), use)
        if len(visible) > 1:
            yield gpus.check_multicast(is_available=multicast.is_available())
        yield from or_ok("GPU memory", gpus.check_gpu_memory(visible, gpus.read_users(), use))
    yield gpus.check_leftovers(processes())
    yield system.check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    needed = segment_bytes(config, has_gpus=bool(visible)) if config is not None else 0
    yield check_shared_memory(free_bytes(MEMORY_FOLDER) if MEMORY_FOLDER.is_dir() else -1, needed)
    place = Place(bool(visible), is_colocated, tuple(psutil.net_if_addrs()), has_rollouts)
    yield from or_ok("environment", check_environment(given, place))
    yield from _network(given, num_gpus=len(visible))
    if config is not None:
        yield from _config(config, num_ranks, len(visible))


def _software(there: list[gpus.Gpu], given: Mapping[str, str]) -> Iterator[Finding]:
    lane = given.get("MEGASYNC_LANE", "")
    if lane not in software.VLLM:
        lane = "gpu" if there or DEVICE_FILE.exists() else "cpu"
    yield from or_ok("packages", software.check_packages(software.wanted_packages(lane), installed(), lane))
    yield software.check_apex(sys.path)
    yield software.check_plugin([each.value for each in entry_points(group="vllm.general_plugins")])
    yield gpus.check_driver(there, software.cuda_of_torch(), lane, has_device=DEVICE_FILE.exists())


def _network(given: Mapping[str, str], num_gpus: int) -> Iterator[Finding]:
    yield network.check_proxy(given)
    if software.cuda_of_torch() is not None:  # else `packages` says that torch is missing
        for backend in ("gloo", "nccl") if num_gpus > 1 else ("gloo",):
            yield network.check_collective(backend, *network.run_probe(backend, given))


def _config(config: Config, num_ranks: int | None, num_gpus: int) -> Iterator[Finding]:
    folder, parameters = config.run.folder, 0
    yield system.check_run_folder(folder, lock_holder(folder))
    with suppress(ValueError, OSError):  # reported as `model`
        parameters = num_parameters(Path(config.model.path))
    there = sum(system.bytes_below(folder / name) for name in (CHECKPOINTS, VERSIONS))
    yield system.check_disk(folder, free_bytes(folder), system.disk_bytes(config, parameters) - there)
    if num_ranks is None:
        try:
            num_ranks = default_num_ranks(config, num_gpus)
        except ConfigError:  # reported as `GPUs`
            num_ranks = config.engine.parallel.tensor * config.engine.parallel.pipeline
    yield from check_inputs(config, num_ranks)


def or_ok(check: str, found: Iterable[Finding]) -> list[Finding]:
    return list(found) or [Finding(check, "ok", "nothing wrong")]


def gpu_use(config: Config | None, num_ranks: int | None, num_visible: int) -> gpus.GpuUse:
    """GPUs that the run uses; unknown where the replicas are in another Ray."""
    if config is None or config.rollout.ray_address != "local":
        return gpus.GpuUse(min(1, num_visible))
    replica_gpus = num_replica_gpus(config) + num_teacher_gpus(config)
    share = config.rollout.gpu_memory_utilization if config.algorithm.name == "grpo" else 0.0
    return gpus.GpuUse(num_ranks or max(1, num_visible - replica_gpus), replica_gpus, share, config.rollout.is_colocated)


def processes() -> list[gpus.Process]:
    """All of this machine."""
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if each.status() != psutil.STATUS_ZOMBIE:
                found.append(gpus.Process(each.pid, each.ppid(), " ".join(each.cmdline())))
    return found
