"""A run's metrics as data for charts, in groups, with labels; metrics that do not vary are numbers. report.js draws the charts.

Leaves out names, units and meanings (registry.py).

    for group in charts(records):
        group.name, group.charts, group.numbers
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megasync.report.html.record import Points, Record
from megasync.report.registry import CHARTS, GROUPS, Chart, Metric, label, metric

MAX_POINTS, MAX_OF_RUNS = 500, 1500  # of one curve, and of all runs for one metric
MIN_SPREAD = 1e-3  # of a metric's values, relative to the largest; below it the metric is shown as a number
PREFIX = "eval/"
TWINS = {"loss/total": "loss/policy"}  # left out if a run has equal values of both
SCORES = "Over several samples a prompt: their mean reward (avg), and the chance that one of K passes (pass)."
RETURNED = "Mean of the values that episodes return in `metrics` under this name."


@dataclass
class Group:
    """Charts as report.js draws them; `numbers`: metrics that do not vary, with their value in each run."""

    name: str
    sentence: str
    charts: list[dict[str, Any]] = field(default_factory=list)
    numbers: list[tuple[Metric, str, list[float | None]]] = field(default_factory=list)


def charts(records: Sequence[Record]) -> list[Group]:
    """Groups that are not empty; with several runs each chart has one curve per metric and run."""
    keys = list(dict.fromkeys(key for record in records for key in record.keys))
    flat = {key for key in keys if _is_flat(records, key)}
    groups, drawn = {name: Group(name, sentence) for name, sentence in GROUPS.items()}, set[str]()
    for chart in (*CHARTS, *_set_charts(keys), *_episode_charts(keys)):
        curves = []
        for key in _keys_of(chart, keys, drawn):
            drawn.add(key)
            for number, record in enumerate(records):
                points = _thin(record.points(key), len(records))
                is_twin = key in TWINS and record.points(key) == record.points(TWINS[key])
                if points and key not in flat and not is_twin:
                    curves.append(_curve(key, points, chart.scale, number, record.name if len(records) > 1 else ""))
        if curves:
            chosen = {"title": chart.title, "sentence": chart.sentence, "unit": chart.unit, "log": chart.log_scale}
            groups[chart.group].charts.append({**chosen, "curves": curves})
    for key in keys:
        found = metric(key)
        if found is not None and key in flat:
            values = [record.points(key)[-1:] for record in records]
            groups[found.group].numbers.append((found, key, [point[0][1] if point else None for point in values]))
    return [group for group in groups.values() if group.charts or group.numbers]


def _set_charts(keys: Iterable[str]) -> list[Chart]:
    """One chart for each evaluation set."""
    names = dict.fromkeys(key.split("/")[1] for key in keys if key.startswith(PREFIX) and key.count("/") == 2)
    return [Chart("learning", f"Evaluation set {n}", SCORES, (f"{PREFIX}{n}/avg@*", f"{PREFIX}{n}/pass@*")) for n in names]


def _episode_charts(keys: Iterable[str]) -> list[Chart]:
    """One chart for each metric that episodes return, since their scales differ."""
    own = [(key, label(key)) for key in keys if (row := metric(key)) is not None and row.key == "episode/NAME"]
    return [Chart("rollouts", name[:1].upper() + name[1:], RETURNED, (key,)) for key, name in own]


def _keys_of(chart: Chart, keys: Sequence[str], drawn: set[str]) -> list[str]:
    """The run's keys that the chart names; a * matches keys without an exact row in the registry."""
    found = [wanted for wanted in chart.keys if wanted in keys]
    for begin, _, end in (wanted.partition("*") for wanted in chart.keys if "*" in wanted):
        alike = [key for key in keys if key.startswith(begin) and key.endswith(end) and key not in (*drawn, *found)]
        alike = [key for key in alike if "/" not in key[len(begin) : len(key) - len(end)]]
        found += [key for key in alike if (row := metric(key)) is not None and row.key != key]
    return found


def _is_flat(records: Sequence[Record], key: str) -> bool:
    values = [value for record in records for _, value in record.points(key)]
    most = max(abs(value) for value in values) if values else 0.0
    return len(values) < 2 or max(values) - min(values) <= MIN_SPREAD * most


def _curve(key: str, points: Points, scale: float, run: int, name: str) -> dict[str, Any]:
    shown = label(key).replace("_", " ") if key.startswith("step/") else label(key)
    return {
        "key": key,
        "label": shown[:1].upper() + shown[1:],
        "run": run,
        "name": name,
        "evaluated": key.startswith(PREFIX),
        "x": [step for step, _ in points],
        "y": [_short(value / scale) for _, value in points],
    }


def _thin(points: Points, num_runs: int) -> Points:
    """Evenly spaced points, with the last one, at most as many as MAX_POINTS and MAX_OF_RUNS allow."""
    most = max(20, min(MAX_POINTS, MAX_OF_RUNS // num_runs))
    if len(points) <= most:
        return points
    return [points[round(place * (len(points) - 1) / (most - 1))] for place in range(most)]


def _short(value: float) -> float:
    """Rounded to five digits; 0 for a number that is not finite."""
    return float(f"{value:.5g}") if math.isfinite(value) else 0.0
