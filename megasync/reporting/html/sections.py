"""Sections of the report that are HTML alone: headline tiles, advisories, plan against actual, configuration.

Leaves out curves (curves.py), the timeline (lanes.py) and samples (samples.py).
"""

from __future__ import annotations

import html
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megasync.reporting.advisories import CONDITIONS, advisories
from megasync.reporting.html.curves import Group
from megasync.reporting.html.lanes import ORDER, phases
from megasync.reporting.html.record import Record, is_number
from megasync.reporting.learning import num_compared, verdict
from megasync.reporting.metric_names import label, metric
from megasync.reporting.signs import Series

RECENT = 10  # steps that a headline figure is of
KEYS = (  # the choices that make a run what it is
    "run.seed", "run.steps", "model.path", "model.dtype", "engine.wrap", "engine.parallel.tensor", "engine.parallel.pipeline",
    "engine.parallel.context", "engine.parallel.expert", "engine.lora.rank", "engine.optimizer.learning_rate",
    "engine.tokens_per_microbatch", "algorithm.name", "algorithm.num_minibatches", "algorithm.importance_correction",
    "algorithm.kl_coefficient", "rollout.placement", "rollout.replicas", "rollout.tensor_parallel", "rollout.max_staleness",
    "rollout.on_update", "rollout.group_size", "rollout.max_new_tokens", "rollout.temperature", "rollout.reward", "data.train",
    "data.batch_size", "sync.transport", "sync.bucket_bytes", "sync.verify",
)  # fmt: skip
EPSILON = 1e-12


def figures(record: Record) -> dict[str, tuple[str, str]]:
    """Headline figures by their names: value, and what else there is to say of it."""
    found: dict[str, tuple[str, str]] = {}
    name, points = record.held_out
    if points:
        first, last = points[0][1], points[-1][1]
        found[name] = (f"{first:.3f} → {last:.3f}", f"{last - first:+.3f} in {points[-1][0] - points[0][0]} steps")
    rewards = record.values("reward/mean")
    if rewards:
        number = num_compared(len(rewards))
        first, last = statistics.fmean(rewards[:number]), statistics.fmean(rewards[-number:])
        found["Sampled reward"] = (f"{first:.3f} → {last:.3f}", f"means of the first and the last {number} steps")
    found |= dict(_of_speed(record))
    if gaps := record.values("logprob_gap/mean", RECENT):
        most = record.values("logprob_gap/max", RECENT)
        found["Log-prob gap"] = (f"{statistics.fmean(gaps):.2g} nats", f"mean of tokens; {max(most, default=0.0):.2g} the worst")
    return found


def _of_speed(record: Record) -> Iterator[tuple[str, tuple[str, str]]]:
    trained, generated = record.values("train/tokens_per_second"), record.values("rollout/tokens_per_second")
    if trained:
        beside = f"of whole steps; {statistics.median(generated):,.0f} while generating" if generated else "of whole steps"
        yield "Tokens a second", (f"{statistics.median(trained):,.0f}", beside)
    if seconds := record.values("step/seconds"):
        total = record.summary.get("seconds_total")
        beside = f"median; {_duration(total)} in all" if total else f"median of {len(seconds)} steps"
        yield "Time of a step", (f"{statistics.median(seconds):.3g} s", beside)
    if syncs := record.values("sync/seconds"):
        sizes = record.values("sync/bytes", 1)
        beside = f"median; {sizes[0] / 1e6:,.4g} MB" if sizes else "median"
        beside += ", digests equal" if all(record.values("sync/verified")) and record.values("sync/verified") else ""
        yield "Weight sync", (f"{statistics.median(syncs) * 1e3:.3g} ms", beside)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 120 else f"{minutes} min" if minutes < 120 else f"{seconds / 3600:.1f} h"


def verdicts(records: Sequence[Record]) -> str:
    """Whether each run has learned: the first thing that a report says."""
    found = ((record, verdict(Series(record.steps, record.evaluations))) for record in records)
    named = (f"{record.name}: {words}" if len(records) > 1 else words for record, words in found if words)
    return "".join(f"<p class='verdict'>{html.escape(words)}</p>" for words in named)


def tiles(record: Record) -> str:
    cards = "".join(
        f"<div class='tile'><b>{html.escape(name)}</b><strong>{html.escape(value)}</strong>"
        f"<small>{html.escape(beside)}</small></div>"
        for name, (value, beside) in figures(record).items()
    )
    return f"<div class='tiles'>{cards}{_phase_tile(phases(record))}</div>"


def _phase_tile(parts: Sequence[tuple[str, float]]) -> str:
    if not parts:
        return ""
    bar = phase_bar(parts)
    total = sum(seconds for _, seconds in parts)
    legend = "".join(
        f"<li><i style='background:{_colour(name)}'></i>{name} {_percent(seconds / total)}</li>" for name, seconds in parts
    )
    return f"<div class='tile wide'><b>Share of wall time</b>{bar}<ul class='phases'>{legend}</ul></div>"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 else "&lt;1%"


def phase_bar(parts: Sequence[tuple[str, float]]) -> str:
    total = sum(seconds for _, seconds in parts) or EPSILON
    pieces = (
        f"<i style='width:{100 * seconds / total:.2f}%;background:{_colour(name)}' "
        f"title='{html.escape(name)} {seconds:.3g} s'></i>"
        for name, seconds in parts
    )
    return f"<div class='stack'>{''.join(pieces)}</div>"


def _colour(phase: str) -> str:
    colours = {"train": 0, "log-probs": 4, "waiting for rollouts": 7, "sync": 2, "evaluation": 3, "checkpoint": 5, "scatter": 6}
    return f"var(--c{colours[phase]})" if phase in colours else "var(--line)" if phase in ORDER else "var(--c8)"


def advice(records: Sequence[Record]) -> str:
    """The advisories of all runs, and what was looked at."""
    found = [(record, each) for record in records for each in advisories(record.steps, record.evaluations, record.get)]
    cards = "".join(
        f"<div class='advisory'><b>{html.escape(f'{record.name}: ' if len(records) > 1 else '')}{html.escape(each.title)}</b>"
        f"<p>{html.escape(each.evidence)}</p><p><em>Try</em> {html.escape(each.remedy)}</p></div>"
        for record, each in found
    )
    rows = "".join(f"<tr><td>{html.escape(each.title)}</td><td>{html.escape(each.threshold)}</td></tr>" for each in CONDITIONS)
    checked = f"advisories: {len(found)} of the {len(CONDITIONS)} conditions that are looked for"
    return (
        f"<div class='advisories'>{cards}<details><summary>{checked}</summary><div class='scroll'><table>"
        f"<tr><th>condition</th><th>holds where</th></tr>{rows}</table></div></details></div>"
    )


def numbers(group: Group, names: Sequence[str]) -> str:
    """Metrics of a group that do not vary, of each run."""
    if not group.numbers:
        return ""
    chips = []
    for row, key, values in group.numbers:
        shown = " · ".join("&ndash;" if value is None else quantity(value, row.unit) for value in values)
        told = row.meaning + (f" ({', '.join(names)})" if len(names) > 1 else "")
        chips.append(f"<li title='{html.escape(told, quote=True)}'>{html.escape(row.named(key))} <b>{shown}</b></li>")
    return f"<ul class='numbers'><li class='head'>does not vary</li>{''.join(chips)}</ul>"


def quantity(value: float, unit: str) -> str:
    """A metric's value with its unit, as one says it."""
    if unit == "bytes":
        return f"{value / 2**30:.3g} GiB" if value >= 2**30 else f"{value / 2**20:.3g} MiB"
    if unit == "share":
        return f"{value:.3g}" if 0 < value < 1e-3 else f"{100 * value:.3g} %"
    if unit == "s" and 0 < abs(value) < 1:
        return f"{value * 1e3:.3g} ms"
    number = f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e9 else f"{value:.4g}"
    return f"{number} {unit}".strip() if unit != "0 or 1" else ("yes" if value else "no")


def plan(record: Record) -> str:
    """What plan.json had said of the run's metrics, beside what they came to; and all else that it says."""
    rows = []
    for name, said, was in _compared(record):
        actual, ratio = ("&ndash;", "&ndash;") if was is None else (_planned(name, was), f"{said / was:.2f}")
        title = label(name) if metric(name) else name.replace("_", " ")
        rows.append(f"<tr><td>{html.escape(title)}</td><td>{_planned(name, said)}</td><td>{actual}</td><td>{ratio}</td></tr>")
    head = "<tr><th></th><th>planned</th><th>actual</th><th>planned / actual</th></tr>"
    table = f"<div class='scroll'><table>{head}{''.join(rows)}</table></div>" if rows else ""
    others = [(name, value) for name, value in _leaves(record.plan) if not name.startswith("predicted ") and value is not None]
    cells = [[name.replace("_", " "), _planned(name, value) if is_number(value) else _shown(value)] for name, value in others]
    all_else = f"<details><summary>the whole plan</summary>{_table(['', 'planned'], cells)}</details>" if cells else ""
    return table + all_else


def _compared(record: Record) -> Iterator[tuple[str, float, float | None]]:
    """Name, planned and actual: by the ratio in summary.json, and before there is one by the metrics so far."""
    predicted = record.plan.get("predicted")
    for name, said in predicted.items() if isinstance(predicted, Mapping) else ():
        ratio = record.summary.get(f"predicted/actual {name}")
        if is_number(said) and said:
            yield name, said, said / ratio if is_number(ratio) and ratio else _so_far(record, name)


def _so_far(record: Record, name: str) -> float | None:
    """The peak of a memory, the median of a time; the first step compiles and allocates."""
    values = record.values(name)
    if not values:
        return None
    return max(values) if name.endswith("bytes") else statistics.median(values[1:] or values)


def _leaves(found: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(found, Mapping):
        for name, inner in found.items():
            yield from _leaves(inner, f"{path} {name}".strip())
    else:
        yield path, found


def _planned(name: str, value: float) -> str:
    unit = next((unit for unit in ("bytes", "seconds", "share") if unit in name), "seconds" if name == "train" else "")
    return quantity(float(value), {"seconds": "s"}.get(unit, unit))


def configuration(records: Sequence[Record]) -> str:
    """The choices of one run; of several, all keys in which they differ."""
    if len(records) == 1:
        pairs = [(key, records[0].get(key)) for key in KEYS]
        rows = [[key, _shown(value)] for key, value in pairs if value is not None]
        return _table(["key", "value"], rows)
    flat = [dict(_leaves(record.config)) for record in records]
    keys = dict.fromkeys(key for each in flat for key in each)
    differing = [key for key in keys if len({_shown(each.get(key)) for each in flat}) > 1 and key not in ("run name", "run dir")]
    rows = [[key.replace(" ", "."), *(_shown(each.get(key)) for each in flat)] for key in differing]
    return _table(["key", *(record.name for record in records)], rows) if rows else "<p>All keys are the same.</p>"


def comparison(records: Sequence[Record]) -> str:
    """The headline figures side by side."""
    columns = [figures(record) for record in records]
    names = dict.fromkeys(name for column in columns for name in column)
    dots = [f"<i class='dot' style='background:var(--c{number % 8})'></i>" for number in range(len(records))]
    head = "".join(f"<th>{dot}{html.escape(record.name)}</th>" for dot, record in zip(dots, records, strict=True))
    rows = [
        f"<tr><th>{html.escape(name)}</th>"
        + "".join(f"<td><strong>{html.escape(c[name][0])}</strong><small>{html.escape(c[name][1])}</small></td>" if name in c
                  else "<td>&ndash;</td>" for c in columns)
        + "</tr>"
        for name in names
    ]  # fmt: skip
    bars = "".join(f"<td>{phase_bar(phases(record))}</td>" for record in records)
    parts = dict.fromkeys(name for record in records for name, _ in phases(record))
    legend = "".join(f"<li><i style='background:{_colour(name)}'></i>{name}</li>" for name in parts)
    rows.append(f"<tr><th>Share of wall time</th>{bars}</tr>")
    table = f"<div class='scroll'><table class='compare'><tr><th></th>{head}</tr>{''.join(rows)}</table></div>"
    return f"<div class='panel'>{table}<ul class='phases'>{legend}</ul></div>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class='scroll'><table><tr>{top}</tr>{body}</table></div>"


def _shown(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return "-" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
