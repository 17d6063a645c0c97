"""Stages of the pipeline that differ, and that are split into chunks, against one rank. Real ranks over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny_model

NARROW = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
WRAPS = ("ddp", "megatron_fsdp")
CHUNKED = {"virtual_pipeline": 2}
LORA = {"rank": 4, "alpha": 8.0}


def test_stages_that_differ_and_chunks_do_as_one_rank(tmp_path: Path) -> None:
    """Unclipped steps of four micro-batches to 1e-5, log-probs likewise, an export that is the folder, a resumed step that is the
    uninterrupted one's: embeddings tied across the stages and not, whole and adapted, under both wraps.
    """
    tied = str(write_tiny_model(tmp_path / "tied", "qwen3", True, num_hidden_layers=5, **NARROW))
    untied = str(write_tiny_model(tmp_path / "untied", "llama", False, **NARROW))
    adapted: dict[str, Any] = {"path": tied, "lora": LORA}
    alone: list[dict[str, Any]] = [{"path": tied}, {"path": untied}, adapted]
    layouts: list[tuple[int, dict[str, Any], list[list[int]]]] = [
        *((0, {"wrap": wrap}, [[0, 1, 2]]) for wrap in WRAPS),
        (0, {"stages": {"pipeline_layers": (1, 4)}, "fusions": "all", "resumes": True}, [[0]]),
        *((0, {"wrap": wrap, "stages": CHUNKED, "resumes": True}, [[0], [2, 3]]) for wrap in WRAPS),
        *((1, {"wrap": wrap, "stages": CHUNKED, "tokens": 200}, [[0], [2]]) for wrap in WRAPS),
        *((2, {"wrap": wrap, "stages": CHUNKED, "recompute": "full", "resumes": True}, [[0], [2, 3]]) for wrap in WRAPS),
    ]
    cases = [{**alone[number], "pipeline": 2, **layout} for number, layout, _ in layouts]
    target, arguments = "tests.engine.pipeline_cases:stages", {"root": str(tmp_path)}
    references = run_ranks(1, target, {**arguments, "cases": alone})[0]
    ranks = run_ranks(2, target, {**arguments, "cases": cases})
    for case, (number, layout, layers), first, last in zip(cases, layouts, *ranks, strict=True):
        print(case)
        reference = references[number]
        assert first["layers"] == layers
        assert min(reference["num_microbatches"]) >= 4
        assert all(count % 2 == 0 for count in first["num_microbatches"]) or "stages" not in layout
        for name in ("history", "log_probs"):
            assert first[name] == last[name] and last[name] == pytest.approx(reference[name], rel=1e-5, abs=1e-5)
        assert sorted(first["names"] + last["names"]) == reference["disk"], "each tensor once, over all stages"
        assert first["differing"] == last["differing"] == []
        assert last["resumed"] == last["history"][-2:]
