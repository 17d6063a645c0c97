"""Writes the generated pages: all keys (reference.md), all metrics and advisories (metrics.md), and the JSON schemas, by which
editors complete and check YAML.

    python -m docs.generate
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.config import BenchRoot
from megasync.config.files import write_atomically
from megasync.config.schema import Config
from megasync.report.advisories import CONDITIONS
from megasync.report.registry import GROUPS, METRICS

FOLDER = Path(__file__).parent
KEYS_HEAD = """# All keys

Written by `python -m docs.generate` from the config's classes. A key is
written `section.key=value` on the command line.
"""
METRICS_HEAD = """# Metrics

Written by `python -m docs.generate` from the tables in `megasync/report/`.

Each line of `metrics.jsonl` has the metrics of one step that apply to the run; metrics that begin with `eval/` are in
`evaluations.jsonl`. A word in capitals is a placeholder for the name of a reward, an evaluation set or a phase, or for a number.
All loggers of `run.loggers` get the same names and values. A *nat* is the unit of natural logarithms.
"""
ADVISORIES = """
## Advisories

The end of a run and its report show an advisory if its condition holds. Conditions read only the metrics; they do not hold if a
metric is missing or the run is too short.

| name | condition | threshold | what to try |
|---|---|---|---|"""


def pages() -> dict[str, str]:
    """The text of each file."""
    return {
        "reference.md": keys_page(),
        "metrics.md": metrics_page(),
        "config.schema.json": json_schema(Config),
        "bench.schema.json": json_schema(BenchRoot),
    }


def json_schema(root: Any) -> str:
    """The JSON schema of `root`, a pydantic model, with the key `base`, which megasync/config/load.py resolves."""
    schema = root.model_json_schema()
    schema["properties"]["base"] = {"type": "string", "description": "Another YAML file, which this one refines."}
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def metrics_page() -> str:
    """One table per group of metrics, and one of advisories."""
    lines = [METRICS_HEAD]
    for group, sentence in GROUPS.items():
        lines += [f"\n## {group.capitalize()}\n", f"{sentence}\n", "| metric | name | unit | meaning |", "|---|---|---|---|"]
        rows = [each for each in METRICS if each.group == group]
        lines += [f"| `{each.key}` | {each.label} | {each.unit} | {each.meaning} |" for each in rows]
    lines += [ADVISORIES, *(f"| `{each.name}` | {each.title} | {each.threshold} | {each.remedy} |" for each in CONDITIONS)]
    return "\n".join(lines) + "\n"


def keys_page() -> str:
    """One table per section, in the order of the schema."""
    schema = Config.model_json_schema()
    lines = [KEYS_HEAD]
    for path, section in _sections("", schema, schema["$defs"]):
        lines += [f"\n## {path}\n", f"{_cell(section['description'])}\n"]
        lines += ["| key | values | default | meaning |", "|---|---|---|---|"]
        for name, field in section["properties"].items():
            if _section_of(field, schema["$defs"]) is None:
                cells = (f"`{name}`", _values(field, schema["$defs"]), _default(field), _cell(field.get("description", "")))
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _sections(path: str, schema: dict[str, Any], known: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, field in schema["properties"].items():
        if (section := _section_of(field, known)) is not None:
            inner = f"{path}.{name}" if path else name
            yield inner, section
            yield from _sections(inner, section, known)
        for each in (field, *field.get("anyOf", ()), *field.get("oneOf", ())):
            if (named := _section_of(each.get("additionalProperties") or {}, known)) is not None:
                yield f"{path}.{name}.NAME".removeprefix("."), named


def _section_of(field: Any, known: dict[str, Any]) -> dict[str, Any] | None:
    reference = field.get("$ref", "") if isinstance(field, dict) else ""
    return known.get(str(reference).rpartition("/")[2])


def _values(field: dict[str, Any], known: dict[str, Any]) -> str:
    """Type, choices and bounds as text."""
    if "$ref" in field:
        return _cell(str(field["$ref"]).rpartition("/")[2])
    if "enum" in field or "const" in field:
        return ", ".join(f"`{choice}`" for choice in field.get("enum", [field.get("const")]))
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_values(each, known) for each in field["anyOf"]))
    if field.get("type") == "array":
        item = field.get("items") or field.get("prefixItems", [{}])[0]
        return f"list of {_values(item, known)}"
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    bounds = [f"{word} {field[key]}" for key, word in words.items() if key in field]
    kind = {"object": "mapping", "string": "text", "null": "`null`"}.get(field.get("type", ""), field.get("type", "any"))
    return ", ".join([kind, *bounds])


def _default(field: dict[str, Any]) -> str:
    return f"`{json.dumps(field['default'])}`".replace("|", "\\|") if "default" in field else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    for name, text in pages().items():
        write_atomically(FOLDER / name, text)
