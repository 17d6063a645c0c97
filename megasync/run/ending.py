"""How a run ends: summary.json, the last two lines on the terminal, and a report in any case. Rank 0 does it.

Leaves out the last checkpoint and evaluation (session.py), and what a launcher says of a run that failed (launch/last_words.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megasync.config.files import METRICS_FILE, newest_checkpoint
from megasync.config.schema import Config
from megasync.reporting.log import SUMMARY_FILE, read_evaluations
from megasync.reporting.page import REPORT_FILE, write_report

HELD_OUT = {"eval/reward": "held-out reward", "eval/accuracy": "held-out accuracy"}  # metrics of one file, and in words


def summary(config: Config, steps: int, syncs: Sequence[Mapping[str, float]], seconds: Mapping[str, float]) -> dict[str, Any]:
    """Of a run that has done so many `steps`; `seconds`: where this process's time went (clock.py)."""
    folder = config.run.folder
    lines = read_evaluations(folder)
    return {
        "name": config.run.name,
        "steps": steps,
        **_held_out(lines),
        **({key: value for key, value in lines[-1].items() if "@" in key} if lines else {}),
        "num_syncs": len(syncs),
        "sync_seconds_median": statistics.median(sync["sync/seconds"] for sync in syncs) if syncs else None,
        "sync_bytes": int(syncs[-1]["sync/bytes"]) if syncs else None,
        **seconds,
        "hf_folder": str(folder / "hf") if config.run.export_hf else None,
        "report": str(folder / REPORT_FILE),
    }


def _held_out(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """eval_reward_before and _after, by the first and the last evaluation; of supervised steps eval_accuracy_...; or {}."""
    found: dict[str, float] = {}
    for metric in HELD_OUT:
        values = {line["step"]: line[metric] for line in lines if metric in line}
        if values:
            name = metric.replace("/", "_")
            found |= {f"{name}_before": values[min(values)], f"{name}_after": values[max(values)]}
    return found


def closing_lines(config: Config, found: Mapping[str, Any]) -> str:
    """Two lines: what came out, and where it lies. `found`: the summary."""
    steps, folder = found["steps"], config.run.folder
    told = [f"done: {steps} step{'' if steps == 1 else 's'}, {found['seconds_total']:.0f} s"]
    for metric, words in HELD_OUT.items():
        name = metric.replace("/", "_")
        if f"{name}_after" in found:
            told.append(f"{words} {found[f'{name}_before']:.3f} -> {found[f'{name}_after']:.3f}")
    checkpoint = newest_checkpoint(folder)
    places = [f"report: {folder / REPORT_FILE}", f"figures: {folder / SUMMARY_FILE}"]
    places += [f"checkpoint: {checkpoint}"] if checkpoint else []
    places += [f"weights: {folder / 'hf'}"] if config.run.export_hf else []
    return f"{'; '.join(told)}\n{'; '.join(places)}"


def write_unfinished_report(folder: Path) -> None:
    """Of a run that failed, where it has done steps."""
    if (folder / METRICS_FILE).is_file():
        write_report(folder)
