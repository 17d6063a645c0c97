"""Writes the JSON schema of a config, so that editors can complete and check its YAML. No torch in here.

python -m megasync.config.json_schema --to docs/config.schema.json
python -m megasync.config.json_schema --root bench.config:BenchRoot --to docs/bench.schema.json
"""

from __future__ import annotations

import argparse
import json
import pkgutil
from pathlib import Path
from typing import Any

from megasync.config.files import write_atomically


def json_schema(root: Any) -> str:
    """The JSON schema of `root`, a pydantic model, with the key `base`, which load.py resolves."""
    schema = root.model_json_schema()
    schema["properties"]["base"] = {"type": "string", "description": "Another YAML file, which this one refines."}
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m megasync.config.json_schema", description=__doc__.splitlines()[0])
    parser.add_argument("--root", default="megasync.config.schema:Config", help="module:model (default: %(default)s)")
    parser.add_argument("--to", required=True, type=Path, metavar="FILE", help="where to write it")
    given = parser.parse_args()
    write_atomically(given.to, json_schema(pkgutil.resolve_name(given.root)))


if __name__ == "__main__":
    main()
