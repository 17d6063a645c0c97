"""Lines of docs/bench/plan.jsonl: configs that GPUs have trained, and the memory and seconds that they took."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from megasync.config.load import with_changes
from megasync.config.schema import Config
from megasync.models.model_shape import SHAPES
from megasync.tools.plan.hardware import hardware
from megasync.tools.plan.layout import Request
from megasync.tools.plan.make import Plan, make_plan

RECORDED = Path(__file__).resolve().parents[4] / "docs" / "bench" / "plan.jsonl"


def lines() -> dict[str, dict[str, Any]]:
    """By case."""
    return {line["case"]: line for line in map(json.loads, RECORDED.read_text(encoding="utf-8").splitlines())}


def plan_of(line: dict[str, Any], folder: Path) -> Plan:
    """`folder` gets the model's config.json."""
    fields = dict(line["model"])
    if "shapes" in fields:
        fields = {**SHAPES[fields.pop("shapes")].hf_config(32768), **fields}
    (folder / "config.json").write_text(json.dumps({**fields, "torch_dtype": "bfloat16"}))
    config = with_changes(Config(), {**line["keys"], "model.path": str(folder)})
    known, response = hardware(line["gpu"]), line["response_tokens"]
    known = replace(known, memory_bytes=line.get("memory_bytes", known.memory_bytes))
    lengths = (response,) if config.algorithm.name == "sft" else ()  # of rollouts only the mean is known
    return make_plan(config, Request(line["num_ranks"], known, response, line["prompt_tokens"], lengths))
