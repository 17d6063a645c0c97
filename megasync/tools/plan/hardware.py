"""GPUs by their data sheets, and measured constants: measured.json has each with its source. No torch in here.

Leaves out memory and seconds (memory.py, replicas.py, seconds.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

KINDS = ("h100", "h200", "a100", "b200")
GIB = 2**30
MEASURED = Path(__file__).with_name("measured.json")


@dataclass(frozen=True)
class Hardware:
    """The GPU of a rank."""

    kind: str
    memory_bytes: int
    flops: float  # of matrix products in 16 bits, data sheet
    float32_flops: float  # without tensor cores, data sheet
    bandwidth: float  # bytes/s of its memory that kernels reach
    link: float  # bytes/s to another device, one way
    host_link: float  # bytes/s to host memory


@cache
def measured() -> dict[str, Any]:
    """measured.json."""
    content: dict[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return content


def constant(name: str) -> float:
    return float(measured()["constants"][name]["value"])


def num_bytes(name: str) -> int:
    return int(measured()["bytes"][name]["value"])


def hardware(kind: str) -> Hardware:
    """One of KINDS."""
    gpu = measured()["gpus"][kind]
    return Hardware(
        kind,
        int(gpu["memory_gib"] * GIB),
        gpu["tflops"] * 1e12,
        gpu["float32_tflops"] * 1e12,
        gpu["bandwidth_gb"] * 1e9 * constant("bandwidth"),
        gpu["link_gb"] * 1e9,
        gpu["host_gb"] * 1e9,
    )


def kind_of(name: str) -> str | None:
    """One of KINDS by the name that nvidia-smi or torch gives a GPU; None: an unknown GPU."""
    return next((kind for kind in KINDS if kind in name.lower()), None)
