"""One run, or several side by side, as one HTML file that works offline.

Leaves out its parts (html/) and serving it (watch.py).

    write_report("runs/quickstart/rl")                            # runs/quickstart/rl/report.html
    write_comparison(["runs/a", "runs/b"], "comparison.html")
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from megasync.config.files import METRICS_FILE, write_atomically
from megasync.report.advisories import CONDITIONS, advisories, console_lines
from megasync.report.html.curves import charts
from megasync.report.html.figures import configuration, figures, quantity
from megasync.report.html.phases import phase_colour, phases, span_colour, timeline
from megasync.report.html.record import Record, read_record, read_records
from megasync.report.html.samples import samples
from megasync.report.learning import verdict
from megasync.report.signs import Series

REPORT_FILE = "report.html"
HTML = Path(__file__).with_name("html")


def write_report(run_folder: str | Path) -> Path:
    """Writes report.html from metrics.jsonl and the run's other files, if there are any. Returns its path.

    Raises ValueError if the folder has no metrics.jsonl.
    """
    folder = Path(run_folder)
    write_atomically(folder / REPORT_FILE, page([read_record(folder)]))
    return folder / REPORT_FILE


def write_unfinished_report(folder: Path) -> None:
    """Writes the report of a run that failed or was stopped, if it has finished steps."""
    if (folder / METRICS_FILE).is_file():
        write_report(folder)


def write_comparison(run_folders: Sequence[str | Path], path: str | Path) -> Path:
    """Writes one page of several runs. Raises as `write_report` does."""
    write_atomically(Path(path), page(read_records([Path(folder) for folder in run_folders])))
    return Path(path)


def advice_lines(run_folder: str | Path) -> list[str]:
    """Lines for the terminal: whether the run has learned, and its advisories."""
    record = read_record(Path(run_folder))
    words = verdict(Series(record.steps, record.evaluations))
    found = console_lines(advisories(record.steps, record.evaluations, record.get))
    return [f"result: {words}", *found] if words else found


def page(records: Sequence[Record], state: str = "") -> str:
    """The report as HTML. `state`: for a watched run, a text that changes with its files."""
    groups, tokens = charts(records), list[dict[str, Any]]()
    columns, parts = [figures(record) for record in records], [phases(record) for record in records]
    is_compared = len(records) > 1
    shown_samples = [samples(record, tokens, is_compared=is_compared) for record in records]
    pictures = [timeline(record) for record in records]
    has_config = any(record.config for record in records)
    sections = {"timeline": any(pictures), "samples": any(shown_samples), "configuration": has_config}
    keys = [*(group.name for group in groups), *(name for name, is_there in sections.items() if is_there)]
    verdicts = [(record.name, verdict(Series(record.steps, record.evaluations))) for record in records]
    text: str = _template().render(
        records=records,
        state=state,
        model="" if is_compared else "/".join(Path(str(records[0].get("model.path") or "")).parts[-2:]),
        subtitle=f"{len(records)} runs side by side" if is_compared else _subtitle(records[0]),
        links=[(key, key.capitalize()) for key in keys],
        is_empty=not any(record.steps or record.evaluations for record in records),
        verdicts=[f"{name}: {words}" if is_compared else words for name, words in verdicts if words],
        figures=columns,
        figure_names=list(dict.fromkeys(name for column in columns for name in column)),
        phases=parts,
        phase_names=list(dict.fromkeys(name for own in parts for name, _ in own)),
        advisories=[(record, each) for record in records for each in advisories(record.steps, record.evaluations, record.get)],
        conditions=CONDITIONS,
        groups=groups,
        pictures=pictures,
        samples=shown_samples,
        has_config=has_config,
        configuration=configuration(records),
        css=_file("report.css"),
        plotly=_plotly() if any(group.charts for group in groups) else "",
        curves=_json({group.name: group.charts for group in groups}),
        tokens=_json(tokens),
        script=_file("report.js"),
    )
    return text


def _template() -> Any:
    environment = Environment(loader=FileSystemLoader(HTML), autoescape=True)
    environment.filters |= {
        "phase_colour": phase_colour,
        "span_colour": span_colour,
        "quantity": quantity,
        "percent": lambda share: f"{share:.0%}" if share >= 0.005 else "<1%",
    }
    return environment.get_template("page.html")


def _subtitle(record: Record) -> str:
    parallel = {name: record.get(f"engine.parallel.{name}") for name in ("tensor", "pipeline", "context", "expert")}
    done, wanted = len(record.steps), record.num_steps
    parts = [
        f"{record.get('algorithm.name') or ''} {record.get('engine.wrap') or ''}".strip(),
        ", ".join(f"{name} {size}" for name, size in parallel.items() if size and size > 1),
        f"max staleness {staleness}" if (staleness := record.get("rollout.max_staleness")) else "",
        f"{done} of {wanted} steps" if wanted and wanted != done else f"{done} steps",
    ]
    return " · ".join(each for each in parts if each)


def _file(name: str) -> Markup:
    return Markup((HTML / name).read_text(encoding="utf-8"))  # noqa: S704 - ours


def _plotly() -> Markup:
    from plotly.offline import get_plotlyjs

    return Markup(get_plotlyjs())  # noqa: S704 - plotly's


def _json(value: object) -> Markup:
    """JSON for a script element, with < escaped so that no text can end the element."""
    return Markup(json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))  # noqa: S704
