"""Environment variables that change what a run does: a table of those that are known to do harm, and the names of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from megasync.config.errors import some
from megasync.diagnosis.finding import Finding, Level, ok

FAMILIES = ("CUDA_", "NCCL_", "VLLM_", "PYTORCH_", "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "NVTE_", "GLOO_", "TRITON_")
OF_SCRIPTS = ("VLLM_NO_USAGE_STATS", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND")  # launch/setup.sh writes them
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")


@dataclass(frozen=True)
class Place:
    """What the meaning of a variable depends on."""

    has_gpus: bool = False
    is_colocated: bool = False
    interfaces: tuple[str, ...] = ("lo",)
    has_rollouts: bool = True
    has_compiled_torch: bool = True


@dataclass(frozen=True)
class Rule:
    """Of one variable: where its value does harm, and why."""

    name: str
    level: Level
    is_wrong: Callable[[str, Place], object]
    seen: str
    remedy: str


def _is_on(value: str, _: Place) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no")


def _names_no_interface(value: str, place: Place) -> bool:
    """NCCL and gloo take prefixes; NCCL besides `=name` for a whole one and `^name` for all others."""
    if value.startswith("^"):
        return False
    names = value.lstrip("=").split(",")
    return bool(value) and not any(interface.startswith(name) for name in names for interface in place.interfaces)


def _has_library(folders: str, place: Place) -> bool:
    found = (path for folder in folders.split(":") if folder for path in Path(folder).glob("libnccl.so*"))
    return place.has_gpus and next(found, None) is not None


def _is_on_with_gpus(value: str, place: Place) -> bool:
    return place.has_gpus and _is_on(value, place)


_UNSET = "unset it"
_INTERFACE = "unset it, or name one that `ip addr` lists"
RULES = (
    Rule("MEGASYNC_LANE", "error", lambda v, _: v not in ("", "cpu", "gpu"),
         "there is no such lane, and the scripts in launch/ stop", "write MEGASYNC_LANE=cpu or MEGASYNC_LANE=gpu, or unset it"),
    Rule("VLLM_PLUGINS", "error", lambda v, p: p.has_rollouts and "megasync" not in v.split(","),
         "vLLM loads these plug-ins alone, without ours", "unset it, or add megasync"),
    Rule("NCCL_SOCKET_IFNAME", "error", lambda v, p: p.has_gpus and _names_no_interface(v, p),
         "no such network interface", _INTERFACE),
    Rule("GLOO_SOCKET_IFNAME", "error", _names_no_interface, "no such network interface", _INTERFACE),
    Rule("CUDA_LAUNCH_BLOCKING", "warning", _is_on_with_gpus, "every kernel is waited for: several times slower", _UNSET),
    Rule("NCCL_P2P_DISABLE", "warning", _is_on_with_gpus, "GPUs talk through host memory", _UNSET),
    Rule("NCCL_SHM_DISABLE", "warning", _is_on_with_gpus, "GPUs without peer access talk through sockets", _UNSET),
    Rule("NCCL_DEBUG", "warning", lambda v, p: p.has_gpus and v.upper() in ("INFO", "TRACE"),
         "NCCL writes a page for each communicator", _UNSET),
    Rule("TORCHDYNAMO_DISABLE", "warning", _is_on_with_gpus,
         "neither vLLM nor the trainer compiles kernels: both are slower", _UNSET),
    Rule("PYTORCH_CUDA_ALLOC_CONF", "warning",
         lambda v, p: p.has_gpus and p.is_colocated and "expandable_segments:true" in v.lower(),
         "not tried with vLLM's sleep and with memory that processes share", "unset it for rollout.placement=colocated"),
    Rule("PYTORCH_NO_CUDA_MEMORY_CACHING", "warning", _is_on_with_gpus,
         "each tensor is allocated by the driver: many times slower", _UNSET),
    Rule("VLLM_ENABLE_V1_MULTIPROCESSING", "warning", lambda v, p: p.has_rollouts and not _is_on(v, p),
         "vLLM's core holds up the replica's answers", _UNSET),
    Rule("LD_LIBRARY_PATH", "warning", _has_library,
         "holds a libnccl that is loaded in the place of torch's own", "take that folder out"),
    Rule("PYTHONDONTWRITEBYTECODE", "warning", lambda v, p: v != "" and not p.has_compiled_torch,
         "torch was installed without its compiled files, which each process makes anew: some ten seconds a start",
         "unset it, or run python -m compileall over the folder that torch is in"),
    Rule("PYTHONOPTIMIZE", "warning", _is_on, "asserts are left out: mistakes of ours stay unseen", _UNSET),
)  # fmt: skip


def has_compiled(package: str) -> bool:
    """Whether Python finds the package's first file compiled, or the package not at all."""
    found = find_spec(package)
    return found is None or found.origin is None or Path(cache_from_source(found.origin)).is_file()


def check_environment(environment: Mapping[str, str], place: Place) -> list[Finding]:
    """Values are shown for variables of the table only."""
    found = [
        Finding("environment", rule.level, f"{rule.name}={value}: {rule.seen}", rule.remedy)
        for rule in RULES
        if (value := environment.get(rule.name)) is not None and rule.is_wrong(value, place)
    ]
    found += _check_launcher(environment)
    told = {finding.seen.partition("=")[0] for finding in found}
    rest = sorted(name for name in environment if name.startswith(FAMILIES) and name not in (*told, *OF_SCRIPTS))
    return found or ok("environment", f"set: {some(rest, 8)}" if rest else "nothing that changes a run")


def _check_launcher(environment: Mapping[str, str]) -> Sequence[Finding]:
    """A shell within a job of torchrun or Slurm hands these on: our launchers write their own, `megasync.train` believes them."""
    left = [name for name in LAUNCHER if name in environment]
    if not left or "TORCHELASTIC_RUN_ID" in environment:
        return []
    seen = f"{' '.join(f'{name}={environment[name]}' for name in left)}: of a launcher that is not ours"
    return [Finding("environment", "warning", seen, f"unset {' '.join(left)} before you start a run")]
