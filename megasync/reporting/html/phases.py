"""Where a run's wall time went: shares by phase, from the steps' own phases, else from the timeline.

phases(record)           # [("train", 61.2), ("waiting for rollouts", 40.1), ...] in seconds
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from megasync.reporting.html.record import Record, Span

NAMES = {  # of a phase: in words
    "rollout": "waiting for rollouts",
    "wait for rollout": "waiting for rollouts",
    "wait": "waiting for rollouts",
    "log-probs": "log-probs",
    "log_probs": "log-probs",
    "evaluate": "evaluation",
}
ORDER = ("train", "log-probs", "waiting for rollouts", "sync", "evaluation", "checkpoint", "scatter", "other")
PREFIX, SUFFIX = "step/", "_seconds"


def phases(record: Record) -> list[tuple[str, float]]:
    """Seconds of each phase of the steps, the usual ones first; [] where nothing tells."""
    found = _of_metrics(record) or _of_timeline(record)
    names = [*ORDER, *(name for name in found if name not in ORDER)]
    return [(name, found[name]) for name in names if found.get(name, 0.0) > 0]


def _of_metrics(record: Record) -> dict[str, float]:
    seconds: defaultdict[str, float] = defaultdict(float)
    for key in record.keys:
        if key.startswith(PREFIX) and key.endswith(SUFFIX):
            name = key.removeprefix(PREFIX).removesuffix(SUFFIX)
            seconds[NAMES.get(name, name.replace("_", " "))] += sum(record.values(key))
    return dict(seconds)


def _of_timeline(record: Record) -> dict[str, float]:
    """From the first step's begin to the end of the last one; what no span covers is `other`."""
    trainer = [span for span in record.spans if span.lane.partition("/")[0] == "trainer"]
    if not trainer:
        return {}
    begin, end = trainer[0].begin, max(span.end for span in record.spans)
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in trainer:
        seconds[NAMES.get(span.name, span.name)] += span.end - span.begin
    beside = {"sync": [span for span in record.spans if span.lane.partition("/")[0] == "sync" and span.begin >= begin]}
    beside["evaluation"] = [span for span in record.spans if span.name == "evaluate" and span.begin >= begin]
    for name, spans in beside.items():
        seconds[name] += covered(spans)
    seconds["other"] = max(0.0, end - begin - sum(seconds.values()))
    return dict(seconds)


def covered(spans: Iterable[Span]) -> float:
    """Seconds that at least one of the spans covers; they come in the order of their begins."""
    total, until = 0.0, float("-inf")
    for span in spans:
        total += max(0.0, span.end - max(span.begin, until))
        until = max(until, span.end)
    return total
