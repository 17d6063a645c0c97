"""The table of broken machines and folders, filled by broken_machines.py and broken_inputs.py: what each check is handed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


from megasync.diagnosis import packages
from megasync.diagnosis.environment import Place
from megasync.diagnosis.finding import Finding
from megasync.diagnosis.gpus import GpuUse
from megasync.diagnosis.limits import Limits
from megasync.diagnosis.needs import Needs, needs_of
from tests.megasync.diagnosis import broken

ROOMY = Limits(20000, 20000)
MIB, GIB = 2**20, 2**30
REQUIRES = ["numpy>=2.1,<3", "torch>=2.13,<2.14; extra == 'cpu'", "vllm>=0.26,<0.27; extra == 'gpu'"]
PINS = packages.read_lock(packages.LOCKS / "cpu.txt")
ON_GPUS, COLOCATED = Place(has_gpus=True, interfaces=("lo", "eth0")), GpuUse(num_ranks=1, replica_share=0.85, is_colocated=True)
SEPARATE = GpuUse(num_ranks=1, replica_gpus=1, replica_share=0.85)
Check = Callable[[Path], list[Finding]]
CASES: list[tuple[str, Check, str, str, str]] = []


def case(level: str, seen: str, remedy: str) -> Callable[[Check], Check]:
    """A row of the table: the check finds this level, and says these words."""

    def add(check: Check) -> Check:
        CASES.append((check.__name__, check, level, seen, remedy))
        return check

    return add


def needs(folder: Path, *overrides: str, parameters: int = 10**9) -> Needs:
    """Of a sound config, on a machine without GPUs."""
    return needs_of(broken.config(folder, *overrides), parameters, 2, has_gpus=False)
