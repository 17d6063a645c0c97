"""Where a run's wall time went: shares by phase, and the timeline of the last steps and the last sync as lanes, without a script.

Shares come from the steps' own phases, else from the timeline. Leaves out how spans are taken (timeline.py).

    phases(record)           # [("train", 61.2), ("waiting for rollouts", 40.1), ...] in seconds
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterable, Sequence

from megasync.reporting.html.record import Record, Span

LAST_STEPS = 4
MAX_SPANS = 400
TRAINER, ROLLOUT, SYNC = "trainer", "rollout", "sync"
LANES = {TRAINER: "trainer", ROLLOUT: "replicas", SYNC: "weight sync"}
COLOURS = {  # of a span: a colour of style.py's
    "train": 0, "log-probs": 4, "wait for rollout": 7, "scatter": 6, "checkpoint": 5, "rollout": 1, "evaluate": 3, "sync": 2,
    "gather": 0, "pack": 4, "wait": 7, "load": 1, "commit": 3, "resume": 6, "begin": 5, "pause": 2,
}  # fmt: skip
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


def timeline(record: Record) -> str:
    """Two pictures: the last steps, and within them the last sync."""
    steps = [span for span in record.spans if span.lane == TRAINER and span.name == "train"]
    if not steps:
        return ""
    first = steps[-LAST_STEPS:][0].args.get("step")
    own = [span for span in record.spans if span.lane == TRAINER and span.args.get("step") == first]
    begin, end = own[0].begin, max(span.end for span in record.spans)
    last = [span for span in record.spans if span.end > begin and span.begin < end]
    numbers = f"{first} to {steps[-1].args.get('step')}"
    syncs = [span for span in record.spans if span.lane == SYNC]
    beside = [span for span in last if span.lane != SYNC]
    pictures = [_picture(f"The last steps, {numbers}", [*beside, *_whole_syncs(last)], begin, end)]
    if syncs:
        of_last = [span for span in syncs if span.args.get("version") == syncs[-1].args.get("version")]
        pictures.append(_picture("The last sync", of_last, of_last[0].begin, max(span.end for span in of_last), by_name=True))
    return "".join(pictures)


def _whole_syncs(spans: Sequence[Span]) -> list[Span]:
    """One span for each version."""
    by_version: dict[object, list[Span]] = {}
    for span in spans:
        if span.lane == SYNC:
            by_version.setdefault(span.args.get("version"), []).append(span)
    return [
        Span("sync", SYNC, own[0].begin, max(span.end for span in own), {"version": version})
        for version, own in by_version.items()
    ]


def _picture(title: str, spans: Sequence[Span], begin: float, end: float, *, by_name: bool = False) -> str:
    """`by_name`: a lane a kind of span, else a lane a track; within a lane spans that overlap get rows of their own."""
    length = max(end - begin, 1e-9)
    lanes: dict[str, list[Span]] = {}
    for span in spans[-MAX_SPANS:]:
        lanes.setdefault(span.name if by_name else span.lane, []).append(span)
    ordered = sorted(lanes, key=lambda lane: list(LANES).index(lane) if lane in LANES else len(LANES)) if not by_name else lanes
    rows = "".join(_lane(LANES.get(lane, lane), lanes[lane], begin, length) for lane in ordered)
    unit, scale = ("ms", 1e3) if length < 1 else ("s", 1.0)
    ticks = "".join(f'<i style="left:{100 * part / 4:g}%">{length * scale * part / 4:.3g}</i>' for part in range(4))
    ticks += f'<i class="end">{length * scale:.3g} {unit}</i>'
    names = {} if by_name else dict.fromkeys(span.name for lane in ordered for span in lanes[lane])
    legend = "".join(f"<li><i style='background:{_colour(name)}'></i>{html.escape(name)}</li>" for name in names)
    return (
        f"<figure class='lanes'><figcaption>{html.escape(title)}</figcaption>"
        f"<div class='scroll'><div class='inner'>{rows}<div class='lane axis'><b></b><div class='track'>{ticks}</div></div>"
        f"</div></div><ul class='phases'>{legend}</ul></figure>"
    )


def _colour(name: str) -> str:
    return f"var(--c{COLOURS.get(name, 5)})"


def _lane(name: str, spans: Sequence[Span], begin: float, length: float) -> str:
    ends: list[float] = []  # of each row
    bars = []
    for span in spans:
        row = next((number for number, end in enumerate(ends) if end <= span.begin + 1e-9), len(ends))
        ends[row:] = [span.end] if row == len(ends) else [span.end, *ends[row + 1 :]]
        bars.append(_bar(span, row, begin, length))
    height = f"calc({len(ends)} * var(--row))"
    return f"<div class='lane'><b>{html.escape(name)}</b><div class='track' style='height:{height}'>{''.join(bars)}</div></div>"


def _bar(span: Span, row: int, begin: float, length: float) -> str:
    left, right = (100 * min(max((time - begin) / length, 0.0), 1.0) for time in (span.begin, span.end))
    seconds = span.end - span.begin
    number = "".join(f" {key} {value}" for key, value in span.args.items() if key in ("step", "version", "set"))
    told = f"{span.name}{number}: {f'{seconds * 1e3:.3g} ms' if seconds < 1 else f'{seconds:.3g} s'}"
    shown = html.escape(f"{span.name} {span.args['step']}" if span.name == "rollout" and "step" in span.args else span.name)
    style = (
        f"left:{left:.3f}%;width:{right - left:.3f}%;top:calc({row} * var(--row));background:{_colour(span.name)}"
    )
    return f'<span style="{style}" title="{html.escape(told)}">{shown if right - left > 4 else ""}</span>'


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
