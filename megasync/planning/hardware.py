"""What a GPU can do: data sheets, and the shares of them that were measured (measured.json says in which file each was).

Leaves out what follows from them (seconds.py). No torch in here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil

KINDS = ("h100", "h200", "a100", "b200", "cpu")
GIB = 2**30
MEASURED = Path(__file__).with_name("measured.json")


@dataclass(frozen=True)
class Hardware:
    """One device of a rank. On CPUs the device is the host, and its memory is all ranks' together."""

    kind: str
    memory_bytes: int
    product_flops: float  # FLOP/s of large matrix products in 16 bits; not of a CPU
    float32_flops: float  # of the data sheet, without tensor cores
    bandwidth: float  # of its memory, bytes/s, as much of it as kernels reach
    link: float  # to another device, bytes/s one way
    host_link: float  # to host memory

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    def flops(self, dtype: str, name: str = "dense") -> float:
        """FLOP/s of a model's passes. `name`: the share of the speed of large products, in 16 bits, that they reach."""
        dense = self.float32_flops * share("dense_float32") if dtype == "float32" else self.product_flops * share("dense")
        return dense * share(name) / share("dense")


@cache
def measured() -> dict[str, Any]:
    """measured.json."""
    content: dict[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return content


def share(name: str) -> float:
    return float(measured()["shares"][name]["value"])


def seconds(name: str) -> float:
    return float(measured()["seconds"][name]["value"])


def launches(name: str) -> float:
    """How many times as many launches a layer has with it."""
    return float(measured()["launches"][name]["value"])


def units(name: str) -> float:
    """Of a CPU: see measured.json."""
    return float(measured()["units"][name]["value"])


def num_bytes(name: str) -> int:
    return int(measured()["bytes"][name]["value"])


def hardware(kind: str) -> Hardware:
    """One of KINDS."""
    if kind == "cpu":
        return this_cpu()
    gpu = measured()["gpus"][kind]
    return Hardware(
        kind,
        int(gpu["memory_gib"] * GIB),
        gpu["peak_tflops"] * 1e12 * gpu["products"],
        gpu["float32_tflops"] * 1e12,
        gpu["bandwidth_gb"] * 1e9 * share("bandwidth"),
        gpu["link_gb"] * 1e9,
        gpu["host_gb"] * 1e9,
    )


@cache
def this_cpu() -> Hardware:
    """This machine; how fast its products are is timed as they are needed (cpu/)."""
    return Hardware("cpu", psutil.virtual_memory().total, 0.0, 0.0, 8e9, 0.7e9, 5e9)


def kind_of(name: str) -> str | None:
    """One of KINDS by what nvidia-smi or torch calls a GPU; None: another one."""
    return next((kind for kind in KINDS[:-1] if kind in name.lower()), None)


def with_memory(known: Hardware, total_bytes: int) -> Hardware:
    """Of a device whose memory is known."""
    return replace(known, memory_bytes=total_bytes)


def overlapped(device: float, host: float, power: int) -> float:
    """Seconds of both at once; each waits for the other now and then, so that it takes more than the longer one."""
    return float((device**power + host**power) ** (1 / power))
