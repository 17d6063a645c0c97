"""A run's wall time by phase, and the timeline of the last steps and of the last sync as rows of bars.

Phases come from the metrics. Leaves out recording spans (report/timeline.py) and HTML (page.html).

    phases(record)           # [("train", 61.2), ("waiting for rollouts", 40.1), ...] in seconds
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from megasync.report.html.record import Record, Span

LAST_STEPS = 4
MAX_SPANS = 400
MIN_TEXT_WIDTH = 4  # percent of the picture's width; narrower bars have no text
TRAINER, SYNC = "trainer", "sync"
TRACKS = {TRAINER: "trainer", "rollout": "replicas", SYNC: "weight sync"}
COLOURS = {  # span or phase -> number of a colour in report.css
    "train": 0, "log-probs": 4, "wait for rollout": 7, "waiting for rollouts": 7, "scatter": 6, "checkpoint": 5, "rollout": 1,
    "evaluate": 3, "evaluation": 3, "sync": 2, "gather": 0, "pack": 4, "wait": 7, "load": 1, "commit": 3, "resume": 6, "begin": 5,
    "pause": 2,
}  # fmt: skip
NAMES = {  # phase in metrics -> name in the report
    "rollout": "waiting for rollouts",
    "log_probs": "log-probs",
}
ORDER = ("train", "log-probs", "waiting for rollouts", "sync", "evaluation", "checkpoint", "scatter", "other")
PREFIX, SUFFIX = "step/", "_seconds"


def phase_colour(phase: str) -> str:
    """A CSS colour."""
    return "var(--line)" if phase == "other" else f"var(--c{COLOURS.get(phase, 8)})"


def span_colour(name: str) -> str:
    """A CSS colour."""
    return f"var(--c{COLOURS.get(name, 5)})"


@dataclass
class Bar:
    """One span; `left` and `width` in percent of the picture's width, `level`: its position among overlapping bars of a row."""

    left: float
    width: float
    level: int
    colour: str
    title: str
    text: str


@dataclass
class Row:
    name: str
    bars: list[Bar] = field(default_factory=list)
    num_levels: int = 0


@dataclass
class Picture:
    """`ticks`: (left in percent, text); `names`: of spans, for a legend."""

    title: str
    rows: list[Row]
    ticks: list[tuple[float, str]]
    end: str
    names: list[str]


def timeline(record: Record) -> list[Picture]:
    """Two pictures: the last steps, and the last sync. Empty if no step was trained."""
    steps = [span for span in record.spans if span.track == TRAINER and span.name == "train"]
    if not steps:
        return []
    first = steps[-LAST_STEPS:][0].args.get("step")
    begin = next(span.begin for span in record.spans if span.track == TRAINER and span.args.get("step") == first)
    end = max(span.end for span in record.spans)
    shown = [span for span in record.spans if span.end > begin and span.begin < end]
    rows = {track: [span for span in shown if span.track == track] for track in dict.fromkeys(span.track for span in shown)}
    if SYNC in rows:
        rows[SYNC] = _whole_syncs(rows[SYNC])
    order = sorted(rows, key=lambda track: list(TRACKS).index(track) if track in TRACKS else len(TRACKS))
    title = f"The last steps, {first} to {steps[-1].args.get('step')}"
    pictures = [_picture(title, {TRACKS.get(track, track): rows[track] for track in order}, begin, end, has_legend=True)]
    syncs = [span for span in record.spans if span.track == SYNC]
    if syncs:
        last = [span for span in syncs if span.args.get("version") == syncs[-1].args.get("version")]
        by_name = {name: [span for span in last if span.name == name] for name in dict.fromkeys(span.name for span in last)}
        pictures.append(_picture("The last sync", by_name, last[0].begin, max(span.end for span in last), has_legend=False))
    return pictures


def _whole_syncs(spans: Sequence[Span]) -> list[Span]:
    """One span for each version."""
    by_version: dict[object, list[Span]] = {}
    for span in spans:
        by_version.setdefault(span.args.get("version"), []).append(span)
    return [
        Span("sync", SYNC, own[0].begin, max(span.end for span in own), {"version": version})
        for version, own in by_version.items()
    ]


def _picture(title: str, rows: dict[str, list[Span]], begin: float, end: float, *, has_legend: bool) -> Picture:
    """A picture of the last MAX_SPANS spans of `rows`; each row is sorted by begin."""
    length = max(end - begin, 1e-9)
    first = sorted(span.begin for spans in rows.values() for span in spans)[-MAX_SPANS:][0]
    unit, scale = ("ms", 1e3) if length < 1 else ("s", 1.0)
    return Picture(
        title,
        [_row(name, [span for span in spans if span.begin >= first], begin, length) for name, spans in rows.items()],
        [(25 * part, f"{length * scale * part / 4:.3g}") for part in range(4)],
        f"{length * scale:.3g} {unit}",
        list(dict.fromkeys(span.name for spans in rows.values() for span in spans)) if has_legend else [],
    )


def _row(name: str, spans: Sequence[Span], begin: float, length: float) -> Row:
    """A row of bars; overlapping spans get different levels."""
    row, ends = Row(name), list[float]()  # of each level
    for span in spans:
        level = next((number for number, end in enumerate(ends) if end <= span.begin + 1e-9), len(ends))
        ends[level:] = [span.end, *ends[level + 1 :]]
        row.bars.append(_bar(span, level, begin, length))
    row.num_levels = len(ends)
    return row


def _bar(span: Span, level: int, begin: float, length: float) -> Bar:
    left, right = (100 * min(max((time - begin) / length, 0.0), 1.0) for time in (span.begin, span.end))
    seconds = span.end - span.begin
    numbers = "".join(f" {key} {value}" for key, value in span.args.items() if key in ("step", "version", "set"))
    title = f"{span.name}{numbers}: {f'{seconds * 1e3:.3g} ms' if seconds < 1 else f'{seconds:.3g} s'}"
    text = f"{span.name} {span.args['step']}" if span.name == "rollout" and "step" in span.args else span.name
    return Bar(left, right - left, level, span_colour(span.name), title, text if right - left > MIN_TEXT_WIDTH else "")


def phases(record: Record) -> list[tuple[str, float]]:
    """(phase, seconds) over all steps, the usual phases first; empty if the metrics have none."""
    found: defaultdict[str, float] = defaultdict(float)
    for key in record.keys:
        if key.startswith(PREFIX) and key.endswith(SUFFIX):
            name = key.removeprefix(PREFIX).removesuffix(SUFFIX)
            found[NAMES.get(name, name.replace("_", " "))] += sum(record.values(key))
    names = [*ORDER, *(name for name in found if name not in ORDER)]
    return [(name, found[name]) for name in names if found.get(name, 0.0) > 0]
