"""The base of every program of worker.py: it measures, and keeps its results so far.

Leaves out trainer ranks with replicas (rank.py).
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.config import BenchRoot
from megasync.config.files import write_atomically

Measured = dict[str, Any]


class Program(ABC):
    """`ends` stops everything that was started. Of several ranks only the first writes and prints."""

    def __init__(self, config: BenchRoot, results_path: Path, ends: ExitStack) -> None:
        self.config, self.results_path, self.ends = config, results_path, ends
        self.is_first = os.environ.get("RANK", "0") == "0"

    def start(self) -> None:  # noqa: B027 # many start with nothing
        """Start what `run` measures with: ranks, replicas."""

    @abstractmethod
    def run(self) -> Measured:
        """Measure; on the first rank what report.py takes."""

    def keep(self, results: Measured, *, is_complete: bool) -> None:
        """Write what was measured so far."""
        if self.is_first:
            write_atomically(self.results_path, json.dumps({**results, "is_complete": is_complete}))

    def say(self, text: str) -> None:
        """A line of progress."""
        if self.is_first:
            print(text, flush=True)

    def random_weights(self) -> dict[str, object]:
        """vLLM's arguments for a model that has no others."""
        return {} if self.config.bench.shapes is None else {"load_format": "dummy"}
