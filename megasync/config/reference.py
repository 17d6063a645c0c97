"""Writes docs/reference.md, a table of all keys of a config, from the JSON schema. No torch in here.

python -m megasync.config.reference --to docs/reference.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megasync.config.files import write_atomically
from megasync.config.schema import Config

HEAD = """# All keys

Written by `python -m megasync.config.reference` from the config's classes. A key is
written `section.key=value` on the command line.
"""


def reference() -> str:
    """The page in Markdown, with one table per section, in the order of the schema."""
    schema = Config.model_json_schema()
    lines = [HEAD]
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m megasync.config.reference", description=__doc__.splitlines()[0])
    parser.add_argument("--to", required=True, type=Path, metavar="FILE", help="where to write it")
    write_atomically(parser.parse_args().to, reference())


if __name__ == "__main__":
    main()
