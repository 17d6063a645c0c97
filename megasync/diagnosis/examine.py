"""All checks on this machine, for a config or without one.

findings = examine(None, None, os.environ)
findings = examine(load_config("configs/smollm2.yaml"), None, os.environ)
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

import psutil

from megasync.config.errors import ConfigError
from megasync.config.files import CHECKPOINTS, VERSIONS, existing, lock_holder
from megasync.config.schema import Config
from megasync.diagnosis import environment, gpus, inputs, leftovers, limits, network, packages, storage
from megasync.diagnosis.finding import Finding
from megasync.diagnosis.needs import Needs, needs_of
from megasync.hf.tensors import num_parameters
from megasync.launch.num_ranks import default_num_ranks
from megasync.launch.processes import pidfd_problem

DEVICE_FILE, INFINIBAND = Path("/dev/nvidia0"), Path("/sys/class/infiniband")
SHARED_MEMORY, FALLBACK = Path("/dev/shm"), Path("/tmp")  # noqa: S108


class Machine(NamedTuple):
    """What several checks look at."""

    lane: str
    gpus: list[gpus.Gpu]  # all
    visible: list[gpus.Gpu]
    processes: list[leftovers.Process]


def look(given: Mapping[str, str]) -> Machine:
    found = gpus.read_gpus()
    lane = given.get("MEGASYNC_LANE", "")
    if lane not in packages.PYTHONS:  # `environment` says so
        lane = "gpu" if found or DEVICE_FILE.exists() else "cpu"
    return Machine(lane, found, gpus.visible(found, given.get("CUDA_VISIBLE_DEVICES"))[0], leftovers.snapshot())


def examine(config: Config | None, num_ranks: int | None, given: Mapping[str, str]) -> Iterator[Finding]:
    """Findings as they come. `num_ranks`: of the trainer; None: as many as the launchers would start."""
    machine = look(given)
    for check in _of_installation(machine, given), _of_gpus(machine, config, num_ranks, given):
        yield from check
    needs = _needs(config, num_ranks, machine)
    yield from _of_machine(machine, config, needs, given)
    yield from _of_collectives(machine, given)
    if config is not None:
        yield from _of_config(config, needs.num_ranks)


def _of_installation(machine: Machine, given: Mapping[str, str]) -> Iterator[Finding]:
    there = packages.installed()
    pins = packages.read_lock(packages.LOCKS / f"{machine.lane}.txt")
    yield from packages.check_python(tuple(sys.version_info[:3]), machine.lane, sys.executable)
    yield from packages.check_kernel(pidfd_problem())
    yield from packages.check_processor(platform.machine(), packages.processor_flags(), machine.lane)
    compiler = given.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    yield from packages.check_compiler(compiler, Path(sysconfig.get_paths()["include"]), machine.lane)
    if pins:
        yield from packages.check_packages(pins, there, machine.lane)
    else:
        yield from packages.check_requirements(packages.required(), there, machine.lane)
    yield from packages.check_companions(there, packages.import_problem)
    yield from packages.check_apex(there, sys.path)
    yield from packages.check_plugin([each.value for each in entry_points(group="vllm.general_plugins")])


def _of_gpus(machine: Machine, config: Config | None, num_ranks: int | None, given: Mapping[str, str]) -> Iterator[Finding]:
    cuda = packages.cuda_of_torch()
    yield from gpus.check_driver(machine.gpus, cuda, machine.lane, has_device=DEVICE_FILE.exists())
    use = _gpu_use(config, num_ranks, len(machine.visible))
    yield from gpus.check_visible(machine.gpus, given.get("CUDA_VISIBLE_DEVICES"), use)
    yield from gpus.check_memory(machine.visible, gpus.read_users() if machine.visible else {}, use)
    yield from gpus.check_capability(machine.visible, use)
    if len(machine.visible) > 1:
        links, peers = gpus.ask("topo", "-m") or "", gpus.ask("topo", "-p2p", "r") or ""
        yield from gpus.check_links(machine.visible, gpus.parse_links(links), gpus.parse_links(peers))


def _gpu_use(config: Config | None, num_ranks: int | None, num_visible: int) -> gpus.GpuUse:
    if config is None or not _is_one_machine(config):
        return gpus.GpuUse(num_ranks=min(1, num_visible), dtype=config.model.dtype if config else "float32")
    needs = needs_of(config, 0, num_ranks or 1, has_gpus=True)
    has_replicas = config.algorithm.name == "grpo"
    return gpus.GpuUse(
        num_ranks=num_ranks or max(1, num_visible - needs.replica_gpus),
        replica_gpus=needs.replica_gpus,
        dtype=config.model.dtype,
        replica_share=config.rollout.gpu_memory_utilization if has_replicas else 0.0,
        is_colocated=config.rollout.is_colocated,
    )


def _needs(config: Config | None, num_ranks: int | None, machine: Machine) -> Needs:
    if config is None:
        return Needs(num_ranks=num_ranks or 2)
    try:
        num_ranks = num_ranks or default_num_ranks(config, len(machine.visible))
    except ConfigError:  # `GPUs` says so
        parallel = config.engine.parallel
        num_ranks = parallel.tensor * parallel.pipeline * max(parallel.context, parallel.expert)
    parameters = 0
    try:
        parameters = num_parameters(Path(config.model.path)) if config.model.path else 0
    except Exception:  # noqa: BLE001 # safetensors' own; `weights` says so
        parameters = 0
    needs = needs_of(config, parameters, num_ranks, has_gpus=bool(machine.visible))
    return needs if _is_one_machine(config) else replace(needs, host_memory=0, shared_memory=0, replica_gpus=0)


def _is_one_machine(config: Config) -> bool:
    """Else nobody here knows which ranks and replicas are on this one."""
    return config.rollout.ray_address == "local"


def _of_machine(machine: Machine, config: Config | None, needs: Needs, given: Mapping[str, str]) -> Iterator[Finding]:
    yield from limits.check_limits(limits.read_limits(), has_infiniband=INFINIBAND.is_dir() and any(INFINIBAND.iterdir()))
    yield from limits.check_memory(*limits.read_memory(), needs)
    yield from limits.check_threads(given, os.cpu_count() or 1, needs.num_ranks, has_gpus=bool(machine.visible))
    shared = storage.free_bytes(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else -1
    yield from storage.check_shared_memory(shared, needs)
    folder = Path() if config is None else config.run.folder
    if config is not None:
        yield from storage.check_run_folder(folder, lock_holder(folder))
    held = storage.bytes_below(folder / CHECKPOINTS) + storage.bytes_below(folder / VERSIONS)
    yield from storage.check_disk(folder, storage.free_bytes(folder), held, needs)
    yield from storage.check_temporary(given.get("TMPDIR"))
    newest = storage.newest_file(Path(__file__).parent)
    skew = storage.file_system_skew(existing(folder))
    yield from storage.check_clock(time.time(), newest, skew, storage.clock_rate())
    place = environment.Place(
        has_gpus=bool(machine.visible),
        is_colocated=config is not None and config.rollout.is_colocated,
        interfaces=tuple(psutil.net_if_addrs()),
        has_rollouts=config is None or config.algorithm.name == "grpo",
        has_compiled_torch=environment.has_compiled("torch"),
    )
    yield from environment.check_environment(given, place)
    yield from leftovers.check_ray(given, machine.processes, config.rollout.ray_address if config is not None else "local")
    roots = {FALLBACK, Path(given.get("TMPDIR") or FALLBACK)}
    yield from leftovers.check_leftovers(SHARED_MEMORY, roots, machine.processes, leftovers.mapped_inodes())


def _of_collectives(machine: Machine, given: Mapping[str, str]) -> Iterator[Finding]:
    yield from network.check_loopback()
    yield from network.check_ports(*network.read_port_range())
    yield from network.check_proxy(given)
    if packages.cuda_of_torch() is None:
        return  # without torch, which `packages` says
    yield from network.check_collective("gloo", given)
    if len(machine.visible) > 1:
        yield from network.check_collective("nccl", given)


def _of_config(config: Config, num_ranks: int) -> Iterator[Finding]:
    yield from inputs.check_whole_config(config, num_ranks)
    found = inputs.check_model(config.model.path)
    yield from found
    prompts = None
    if found[0].level == "ok":
        told, prompts = inputs.check_tokenizer(config)
        yield from told
    yield from inputs.check_data(config, prompts)
    yield from inputs.check_reward(config)
