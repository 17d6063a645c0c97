"""`megasync plan --compare RUN`: the plan of a run's config beside its metrics.

Leaves out the plan (make.py).
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from megasync.report.log import (
    TIMELINE_FILE,
    TRAINING_DEVICE,
    WORKER_DEVICE,
    read_metrics,
    read_summary,
)
from megasync.tools.plan.hardware import GIB
from megasync.tools.plan.make import Plan

PEAKS = ("memory/tensors_peak_bytes", "memory/device_bytes", TRAINING_DEVICE, "memory/host_peak_bytes")
MEDIANS = ("step/seconds", "rollout/seconds", "sync/seconds")
TRAIN = "train"  # the timeline's span


def compare(plan: Plan, folder: Path) -> str:
    """A table of all that the plan predicts and the run in `folder` has measured."""
    lines, found = [f"{'':<30} {'planned':>12} {'measured':>12} {'ratio':>7}"], measured_of(folder)
    for name, planned in plan.predicted.items():
        if planned and (measured := found.get(name)):
            is_size = name.endswith("bytes")
            texts = (f"{value / GIB:.2f} GiB" if is_size else f"{value:.3f} s" for value in (planned, measured))
            lines.append(f"{name:<30} {next(texts):>12} {next(texts):>12} {planned / measured:>7.2f}")
    return "\n".join(lines)


def measured_of(folder: Path) -> dict[str, float]:
    """Measured values of a run, by the names of the plan. Seconds are medians without the first step, which compiles kernels."""
    steps, summary = read_metrics(folder), read_summary(folder)
    columns = {name: [float(step[name]) for step in steps if step.get(name) is not None] for name in (*PEAKS, *MEDIANS)}
    found = {name: max(columns[name]) for name in PEAKS if columns[name]}
    found |= {WORKER_DEVICE: float(size)} if (size := summary.get(WORKER_DEVICE)) else {}
    found |= {name: statistics.median(columns[name][1:] or columns[name]) for name in MEDIANS if columns[name]}
    timeline = folder / TIMELINE_FILE
    if timeline.is_file():
        events = json.loads(timeline.read_text(encoding="utf-8"))["traceEvents"]
        spans = [event["dur"] / 1e6 for event in events if event["ph"] == "X" and event["name"] == TRAIN]
        if spans:
            found[TRAIN] = statistics.median(spans[1:] or spans)
    return found
