"""A run, or several side by side, as one HTML file that opens without a network.

Leaves out its parts (html/) and serving it (watch.py).

    write_report("runs/quickstart/rl")                            # runs/quickstart/rl/report.html
    write_comparison(["runs/a", "runs/b"], "comparison.html")
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megasync.config.files import METRICS_FILE, write_atomically
from megasync.reporting.advisories import advisories, console_lines
from megasync.reporting.html import lanes, sections
from megasync.reporting.html.curves import Group, charts
from megasync.reporting.html.record import Record, read_record, read_records
from megasync.reporting.html.samples import samples
from megasync.reporting.html.script import SCRIPT, WATCH
from megasync.reporting.html.style import STYLE
from megasync.reporting.learning import verdict
from megasync.reporting.signs import Series

REPORT_FILE = "report.html"
TITLES = {"samples": "Samples", "timeline": "Timeline", "plan": "Planned and actual", "configuration": "Configuration"}


def write_report(run_folder: str | Path) -> Path:
    """Writes report.html from metrics.jsonl and, where they are there, the other files of the run. Returns its path.

    Raises ValueError where the folder has no metrics.jsonl.
    """
    folder = Path(run_folder)
    write_atomically(folder / REPORT_FILE, page([read_record(folder)]))
    return folder / REPORT_FILE


def write_unfinished_report(folder: Path) -> None:
    """Of a run that failed or was stopped, where it has done steps."""
    if (folder / METRICS_FILE).is_file():
        write_report(folder)


def write_comparison(run_folders: Sequence[str | Path], path: str | Path) -> Path:
    """Writes one page of several runs. Raises as `write_report` does."""
    write_atomically(Path(path), page(read_records([Path(folder) for folder in run_folders])))
    return Path(path)


def advice_lines(run_folder: str | Path) -> list[str]:
    """Whether the run has learned, for the terminal, and what its metrics advise: two lines each."""
    record = read_record(Path(run_folder))
    words = verdict(Series(record.steps, record.evaluations))
    found = console_lines(advisories(record.steps, record.evaluations, record.get))
    return [f"result: {words}", *found] if words else found


def page(records: Sequence[Record], state: str = "") -> str:
    """The whole file. `state`: of a run that is watched, what a newer page would have another of."""
    groups = charts(records)
    name = " · ".join(record.name for record in records)
    parts, tokens = _parts(records, groups)
    links = "".join(f'<a href="#{key}">{TITLES.get(key, key.capitalize())}</a>' for key, _ in parts)
    body = "".join(f'<section id="{key}"><h2>{TITLES.get(key, key)}</h2>{text}</section>' for key, text in parts)
    head = sections.verdicts(records)
    head += sections.comparison(records) if len(records) > 1 else sections.tiles(records[0])
    is_empty = not any(record.steps or record.evaluations for record in records)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(name)}</title><style>{STYLE}</style></head><body data-state="{html.escape(state, quote=True)}">
<div class="top"><h1>{html.escape(name)}</h1><p class="sub">{_subtitle(records)}</p></div>
<nav><div>{links}</div></nav>
<main>{"<p>No step has been logged yet.</p>" if is_empty else head + sections.advice(records)}{body}
<p class="foot">Written by megasync. Thick lines are moving averages of the thin ones.
docs/metrics.md says what each metric means.</p></main>
<script>{_plotly() if any(group.charts for group in groups) else ""}</script>
{_data("curves", {group.name: group.charts for group in groups})}
{_data("tokens", tokens)}
<script>{SCRIPT}{WATCH if state else ""}</script></body></html>
"""


def _parts(records: Sequence[Record], groups: Sequence[Group]) -> tuple[list[tuple[str, str]], list[dict[str, Any]]]:
    """Sections in their order, those with something in them, and the data of the samples' tokens."""
    names = [record.name for record in records]
    parts = [
        (
            group.name,
            f'<p>{group.sentence}</p><div class="charts" id="charts-{group.name}"></div>{sections.numbers(group, names)}',
        )
        for group in groups
    ]
    timelines = [(record, text) for record in records if (text := lanes.timeline(record))]
    parts += [("timeline", "".join(_of(record, records) + text for record, text in timelines))] if timelines else []
    tokens: list[dict[str, Any]] = []
    shown = [(record, text) for record in records if (text := samples(record, tokens, is_compared=len(records) > 1))]
    parts += [("samples", "".join(_of(record, records) + text for record, text in shown))] if shown else []
    plans = [(record, text) for record in records if (text := sections.plan(record))]
    parts += (
        [("plan", "".join(f'{_of(record, records)}<div class="panel">{text}</div>' for record, text in plans))] if plans else []
    )
    if any(record.config for record in records):
        parts.append(("configuration", f'<div class="panel">{sections.configuration(records)}</div>'))
    return parts, tokens


def _of(record: Record, records: Sequence[Record]) -> str:
    return f"<h3>{html.escape(record.name)}</h3>" if len(records) > 1 else ""


def _subtitle(records: Sequence[Record]) -> str:
    if len(records) > 1:
        return f"{len(records)} runs side by side"
    record = records[0]
    model = "/".join(Path(str(record.get("model.path") or "")).parts[-2:])  # such as models/NAME
    parallel = {name: record.get(f"engine.parallel.{name}") for name in ("tensor", "pipeline", "context", "expert")}
    done, wanted = len(record.steps), record.num_steps
    told = [
        f"<b>{html.escape(model)}</b>" if model else "",
        html.escape(f"{record.get('algorithm.name') or ''} {record.get('engine.wrap') or ''}".strip()),
        ", ".join(f"{name} {size}" for name, size in parallel.items() if size and size > 1),
        f"max staleness {staleness}" if (staleness := record.get("rollout.max_staleness")) else "",
        f"{done} of {wanted} steps" if wanted and wanted != done else f"{done} steps",
    ]
    return " · ".join(each for each in told if each)


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _data(name: str, value: object) -> str:
    """JSON within HTML: no text in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'
