"""The log of versions as ranks write it: in stages, from shards, after a resume; and what is said where one cannot write.

python -m pytest tests/megasync/run/test_run_versions.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bridge.versions.file import there
from bridge.versions.reader import VersionReader
from bridge.versions.writer import VersionWriter
from megasync.config.files import VERSIONS
from tests.support.config_files import write_runnable
from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny_model

CASES = "tests.megasync.run.version_cases"
LOGGED = ["run.name=rl", "sync.log=deltas", "sync.log_full_every=3"]


def union(ranks: list[dict[str, Any]], version: int) -> dict[str, torch.Tensor]:
    return {name: tensor for rank in ranks for name, tensor in rank["weights"].get(version, {}).items()}


@pytest.mark.parametrize("layout", [{"wrap": "ddp", "pipeline": 2}, {"wrap": "megatron_fsdp"}])
def test_every_version_is_what_the_ranks_had(tmp_path: Path, layout: dict[str, object]) -> None:
    model, config = write_tiny_model(tmp_path / "tiny", "qwen3", dtype=torch.bfloat16), write_runnable(tmp_path)
    folder = tmp_path / "runs" / "rl" / VERSIONS
    left = VersionWriter(folder, stage=5, num_stages=9, keeps_weights=True, full_every=3)  # by a run of another layout
    for version in range(2):
        left.write(version, iter([("x", torch.zeros(2))]))
    arguments = {"path": str(model), "config": str(config), "overrides": LOGGED, "layout": layout, "versions": 5}
    ranks = run_ranks(2, f"{CASES}:train_and_log", arguments)
    log, stages = VersionReader(folder), 2 if "pipeline" in layout else 1
    assert log.versions == [1, 2, 3, 4, 5] and list(there(folder)[0]) == [5], "what was before the checkpoint stays"
    assert [len(log.chain(version, stages - 1)) for version in log.versions] == [1, 2, 3, 1, 2]
    for version in log.versions:
        own, expected = dict(log.tensors(version)), union(ranks, version)
        assert own.keys() == expected.keys() and all(torch.equal(own[name], expected[name]) for name in own)
    assert not torch.equal(union(ranks, 1)["model.embed_tokens.weight"], union(ranks, 5)["model.embed_tokens.weight"])
    first, others = ranks[0], ranks[1]
    assert [rank["again"] for rank in ranks] == [{}, {}], "a version is written once"
    assert first["metrics"] == others["metrics"] and len(first["metrics"]) == 5
    whole = sum(tensor.nbytes for tensor in union(ranks, 1).values())
    sizes = [one["sync/log_bytes"] for one in first["metrics"]]
    assert min(sizes[0], sizes[3]) > whole > max(sizes[1], sizes[2], sizes[4])
    shares = [one.get("sync/changed_fraction") for one in first["metrics"]]
    assert [share is None for share in shares] == [True, False, False, True, False] and all(0 < s <= 1 for s in shares if s)


def test_a_stage_that_cannot_write_fails_on_every_rank(tmp_path: Path) -> None:
    model, config = write_tiny_model(tmp_path / "tiny", "qwen3"), write_runnable(tmp_path)
    arguments = {"path": str(model), "config": str(config), "overrides": LOGGED, "folder": str(tmp_path)}
    errors = run_ranks(2, f"{CASES}:fail_to_log", arguments)
    assert errors[0] == errors[1] and errors[0].startswith("sync.log: version 1 cannot be written: ")


def test_old_versions_go_while_a_run_goes_on(tmp_path: Path) -> None:
    model, config = write_tiny_model(tmp_path / "tiny", "qwen3", dtype=torch.bfloat16), write_runnable(tmp_path)
    kept, layout = [*LOGGED, "sync.log_keep=2"], {"wrap": "ddp", "pipeline": 2}
    arguments = {"path": str(model), "config": str(config), "overrides": kept, "layout": layout, "versions": 6}
    ranks = run_ranks(2, f"{CASES}:train_and_log", arguments)
    log = VersionReader(tmp_path / "runs" / "rl" / VERSIONS)
    assert log.versions == [4, 5, 6], "4 is whole, 5 and 6 are made of it"
    assert all(torch.equal(tensor, union(ranks, 6)[name]) for name, tensor in log.tensors(6))
