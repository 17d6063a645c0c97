"""The registry of metrics: name, unit, meaning and chart of each, read from metrics.yaml.

The report, docs/metrics.md and error messages name metrics by it. Leaves out how metrics are computed
(engine/objective/metrics.py, megasync/rollouts/, megasync/run/) and signs of trouble (signs.py). No torch in here.

    metric("reward/mean").label            # "Sampled reward"
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml  # type: ignore[import-untyped]

FILE = Path(__file__).with_name("metrics.yaml")


@dataclass(frozen=True)
class Metric:
    """`key` as in metrics.jsonl and evaluations.jsonl; a word in capitals is a placeholder. `unit`: empty for none."""

    key: str
    label: str
    unit: str
    meaning: str
    group: str

    def named(self, key: str) -> str:
        """The label for a key that matches this row, with the key's text for each placeholder."""
        match = _pattern(self.key).fullmatch(key)
        values = match.groupdict() if match else {}
        return re.sub("|".join(values), lambda name: values[name[0]], self.label) if values else self.label


@dataclass(frozen=True)
class Chart:
    """One chart and its metrics; a * in a key matches any text without /. `scale`: the chart's unit in units of the metric."""

    group: str
    title: str
    sentence: str
    keys: tuple[str, ...]
    unit: str = ""
    log_scale: bool = False
    scale: float = 1.0


_CONTENT = yaml.load(FILE.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 # a SafeLoader in C
GROUPS: dict[str, str] = {group: part["sentence"] for group, part in _CONTENT.items()}
METRICS = tuple(Metric(**row, group=group) for group, part in _CONTENT.items() for row in part["metrics"])
CHARTS = tuple(
    Chart(group=group, **{**row, "keys": tuple(row["keys"])}) for group, part in _CONTENT.items() for row in part["charts"]
)


def metric(key: str) -> Metric | None:
    """The row for `key`, an exact one before one with placeholders; None if the registry has none."""
    return next((each for each in METRICS if _pattern(each.key).fullmatch(key)), None)


def label(key: str) -> str:
    found = metric(key)
    return found.named(key) if found else key


@lru_cache(maxsize=1000)
def _pattern(key: str) -> re.Pattern[str]:
    """A name at the key's end, such as of an episode's own metric, may contain slashes."""
    escaped = re.escape(key)
    return re.compile(re.sub("[A-Z]+", lambda name: rf"(?P<{name[0]}>{'.' if name.end() == len(escaped) else '[^/]'}+)", escaped))
