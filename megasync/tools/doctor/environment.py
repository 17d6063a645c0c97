"""Environment variables that change what a run does: a table of the harmful ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from megasync.launch.machine import Finding, Level

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")


@dataclass(frozen=True)
class Place:
    """The machine and the run that the variables act on."""

    has_gpus: bool = False
    is_colocated: bool = False
    interfaces: tuple[str, ...] = ("lo",)
    has_rollouts: bool = True


def _is_on(value: str, place: Place) -> bool:
    return place.has_gpus and value.strip().lower() not in ("", "0", "false", "no")


def _names_no_interface(value: str, place: Place) -> bool:
    """NCCL and gloo take prefixes; NCCL also `=name` for a whole one and `^name` for all others."""
    names = value.lstrip("=").split(",")
    is_there = any(interface.startswith(name) for name in names for interface in place.interfaces)
    return bool(value) and not value.startswith("^") and not is_there


@dataclass(frozen=True)
class Rule:
    """A condition under which a variable's value does harm, and the harm."""

    name: str
    level: Level
    is_wrong: Callable[[str, Place], bool]
    effect: str
    remedy: str = "unset it"


RULES = (
    Rule("MEGASYNC_LANE", "error", lambda value, _: value not in ("", "cpu", "gpu"), "the lanes are cpu and gpu"),
    Rule(
        "VLLM_PLUGINS",
        "error",
        lambda value, place: place.has_rollouts and "megasync" not in value.split(","),
        "vLLM loads these plug-ins only, without ours",
        "unset it, or add megasync",
    ),
    Rule("NCCL_SOCKET_IFNAME", "error", lambda value, place: place.has_gpus and _names_no_interface(value, place),
         "no such network interface", "unset it, or name one that `ip addr` lists"),
    Rule("GLOO_SOCKET_IFNAME", "error", _names_no_interface,
         "no such network interface", "unset it, or name one that `ip addr` lists"),
    Rule("CUDA_LAUNCH_BLOCKING", "warning", _is_on, "the host waits for every kernel: several times slower"),
    Rule("NCCL_P2P_DISABLE", "warning", _is_on, "GPUs communicate through host memory"),
    Rule("NCCL_SHM_DISABLE", "warning", _is_on, "GPUs without peer access communicate through sockets"),
    Rule("TORCHDYNAMO_DISABLE", "warning", _is_on, "vLLM and the trainer compile no kernels: both are slower"),
    Rule("PYTORCH_NO_CUDA_MEMORY_CACHING", "warning", _is_on, "the driver allocates each tensor: many times slower"),
    Rule(
        "PYTORCH_CUDA_ALLOC_CONF",
        "warning",
        lambda value, place: place.has_gpus and place.is_colocated and "expandable_segments:true" in value.lower(),
        "not tested with vLLM's sleep mode and with memory that processes share",
    ),
)  # fmt: skip


def check_environment(environment: Mapping[str, str], place: Place) -> Iterator[Finding]:
    """Check variables of the environment, also those that Slurm or torchrun leave in a shell: `megasync.train` would use them."""
    for rule in RULES:
        value = environment.get(rule.name)
        if value is not None and rule.is_wrong(value, place):
            yield Finding("environment", rule.level, f"{rule.name}={value}: {rule.effect}", rule.remedy)
    left = [name for name in LAUNCHER if name in environment]
    if left and "TORCHELASTIC_RUN_ID" not in environment:
        seen = f"{' '.join(f'{name}={environment[name]}' for name in left)}: set by another launcher"
        yield Finding("environment", "warning", seen, f"unset {' '.join(left)} before you start a run")
