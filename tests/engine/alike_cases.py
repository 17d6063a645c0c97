"""What test_alike.py runs on its ranks (see ranks.py)."""

from __future__ import annotations

import os
from typing import Any

from bench.equivalence.measure import leave_groups
from tests.engine.engine_cases import engine


def messages(cases: list[dict[str, Any]]) -> list[str]:
    """Why the ranks of each case do not start; empty where they do. Each rank has its own of `paths` and of `adapters`."""
    rank, found = int(os.environ["RANK"]), []
    for case in cases:
        options = {"name": "sft", **case}
        path, adapters = options.pop("paths")[rank], options.pop("adapters", None)
        if adapters:
            options["lora"] = {**options["lora"], "adapter_path": adapters[rank]}
        try:
            with engine(path, **options):
                found.append("")
        except ValueError as error:
            found.append(str(error))
            leave_groups()
    return found
