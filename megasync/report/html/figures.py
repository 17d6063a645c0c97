"""Headline figures of a run, and its configuration, as texts.

Leaves out curves (curves.py), phases (phases.py), samples (samples.py) and HTML (page.html).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megasync.report.html.record import Record
from megasync.report.learning import num_compared

RECENT = 10  # last steps that headline figures are computed from
KEYS = (  # shown in the table of one run's configuration
    "run.seed", "run.steps", "model.path", "model.dtype", "engine.wrap", "engine.parallel.tensor", "engine.parallel.pipeline",
    "engine.parallel.context", "engine.parallel.expert", "engine.lora.rank", "engine.optimizer.learning_rate",
    "engine.tokens_per_microbatch", "algorithm.name", "algorithm.num_minibatches", "algorithm.importance_correction",
    "algorithm.kl_coefficient", "rollout.placement", "rollout.replicas", "rollout.tensor_parallel", "rollout.max_staleness",
    "rollout.on_update", "rollout.group_size", "rollout.max_new_tokens", "rollout.temperature", "rollout.reward", "data.train",
    "data.batch_size", "sync.transport", "sync.bucket_bytes", "sync.verify",
)  # fmt: skip


def figures(record: Record) -> dict[str, tuple[str, str]]:
    """Headline figures by name: (value, remark)."""
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


def quantity(value: float, unit: str) -> str:
    """A metric's value with its unit, as text."""
    if unit == "bytes":
        return f"{value / 2**30:.3g} GiB" if value >= 2**30 else f"{value / 2**20:.3g} MiB"
    if unit == "share":
        return f"{value:.3g}" if 0 < value < 1e-3 else f"{100 * value:.3g} %"
    if unit == "s" and 0 < abs(value) < 1:
        return f"{value * 1e3:.3g} ms"
    number = f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e9 else f"{value:.4g}"
    return f"{number} {unit}".strip() if unit != "0 or 1" else ("yes" if value else "no")


def configuration(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table: the main keys of one run, or all keys in which several runs differ."""
    if len(records) == 1:
        pairs = [(key, records[0].get(key)) for key in KEYS]
        return ["key", "value"], [[key, _shown(value)] for key, value in pairs if value is not None]
    flat = [dict(_leaves(record.config)) for record in records]
    keys = dict.fromkeys(key for each in flat for key in each)
    differing = [key for key in keys if len({_shown(each.get(key)) for each in flat}) > 1 and key not in ("run.name", "run.dir")]
    rows = [[key, *(_shown(each.get(key)) for each in flat)] for key in differing]
    return ["key", *(record.name for record in records)], rows


def _leaves(found: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(found, Mapping):
        for name, inner in found.items():
            yield from _leaves(inner, f"{path}.{name}".strip("."))
    else:
        yield path, found


def _shown(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return "-" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
