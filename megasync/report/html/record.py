"""Reads the files of a run's folder for the report. Leaves out figures and charts (figures.py, curves.py).

record = read_record(Path("runs/quickstart/rl"))
record.held_out            # ("Held-out reward", [(0, 0.11), (100, 0.25)])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from megasync.config.errors import explain
from megasync.report.log import (
    CONFIG_FILE,
    TIMELINE_FILE,
    read_evaluations,
    read_metrics,
    read_object,
    read_samples,
    read_summary,
)
from megasync.report.registry import label

HELD_OUT = ("eval/reward", "eval/accuracy")
Points = list[tuple[int, float]]


@dataclass(frozen=True)
class Span:
    """One event of timeline.json; times are seconds. `track`: such as "trainer" or "replica 0/requests"."""

    name: str
    track: str
    begin: float
    end: float
    args: dict[str, Any]


@dataclass(frozen=True)
class Record:
    """A run's files. `name` is run.name, or its path if several runs with the same name are compared."""

    name: str
    folder: Path
    config: dict[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    summary: dict[str, Any]
    spans: list[Span]

    def points(self, key: str) -> Points:
        """(step, value) for each step where the metric is a number, sorted by step."""
        return self._columns.get(key, [])

    def values(self, key: str, last: int = 0) -> list[float]:
        """The metric's last `last` values, or all for 0."""
        return [value for _, value in self.points(key)][-last:]

    @property
    def keys(self) -> list[str]:
        """Names of all metrics, in the order of their first use."""
        return list(self._columns)

    @cached_property
    def _columns(self) -> dict[str, Points]:
        columns: dict[str, Points] = {}
        for line in (*self.evaluations, *self.steps):
            for key, value in line.items():
                if key != "step" and is_number(value):
                    columns.setdefault(key, []).append((line["step"], value))
        return {key: sorted(points) for key, points in columns.items()}

    @property
    def held_out(self) -> tuple[str, Points]:
        """Label and points of the main held-out metric; empty without one."""
        sets = [key for key in self.keys if key.startswith("eval/") and "avg@" in key]
        for key in (*HELD_OUT, *sets[:1]):
            if points := self.points(key):
                return label(key), points
        return "", []

    @property
    def num_steps(self) -> int:
        """run.steps of the config; 0 if it is unknown."""
        return int(self.get("run.steps") or 0)

    def get(self, key: str) -> Any:
        """The value of a config key such as `run.steps`; None if the config does not have it."""
        value: Any = self.config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_record(folder: Path) -> Record:
    """Reads a run's folder. Raises ValueError if it has no metrics.jsonl."""
    steps, config = read_metrics(folder), _config(folder / CONFIG_FILE)
    return Record(
        name=str((config.get("run") or {}).get("name") or folder.resolve().name),
        folder=folder,
        config=config,
        steps=steps,
        evaluations=read_evaluations(folder),
        samples=read_samples(folder),
        summary=read_summary(folder),
        spans=_spans(read_object(folder / TIMELINE_FILE)),
    )


def _config(path: Path) -> dict[str, Any]:
    """The config as it was written, also by older versions with other keys; {} if there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = yaml.safe_load(path.read_bytes())
    except yaml.YAMLError as error:
        raise ValueError(explain(f"{path}: not YAML: {error}", remedy="delete it: the report does without")) from error
    return found if isinstance(found, dict) else {}


def read_records(folders: Sequence[Path]) -> list[Record]:
    """Reads several runs; if some share a name, all are named by their folders."""
    records = [read_record(folder) for folder in folders]
    if len({record.name for record in records}) == len(records):
        return records
    return [replace(record, name=str(folder)) for record, folder in zip(records, folders, strict=True)]


def _spans(trace: dict[str, Any]) -> list[Span]:
    """Spans of a Chrome trace, sorted by begin."""
    tracks = {(pid, tid): track for track, (pid, tid) in trace.get("tracks", {}).items()}
    spans = [
        Span(
            name=event["name"],
            track=tracks.get((event["pid"], event["tid"]), str(event["pid"])),
            begin=event["ts"] / 1e6,
            end=(event["ts"] + event["dur"]) / 1e6,
            args=event.get("args", {}),
        )
        for event in trace.get("traceEvents", ())
        if event["ph"] == "X"
    ]
    return sorted(spans, key=lambda span: span.begin)
