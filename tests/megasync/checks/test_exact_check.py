"""What `model.exact` refuses, by name and with a remedy.

python -m pytest tests/megasync/checks/test_exact_check.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megasync.checks.check import check_config
from megasync.config.errors import ConfigError
from megasync.config.load import load_config
from megasync.tools.plan.make import check
from tests.support.gpus import pretend_gpus
from tests.support.config_files import refusal

RUNS = ("model.exact=true", "model.dtype=float32")


def test_an_exact_run_can_start(config: Path) -> None:
    for more in ([], ["engine.lora.rank=4"], ["engine.wrap=ddp", "rollout.max_staleness=2", "rollout.on_update=continue"]):
        check_config(load_config(config, [*RUNS, *more]), 2)


def keeps_all(group: Any) -> bool:
    return True


@pytest.mark.parametrize(
    ("overrides", "key", "remedy"),
    [
        (["model.dtype=bfloat16"], "model.dtype", "write model.dtype=float32, or model.exact=false"),
        (["model.dtype=float16"], "model.dtype", "write model.dtype=float32, or model.exact=false"),
        (["engine.parallel.tensor=2"], "engine.parallel.tensor", "write engine.parallel.tensor=1"),
        (["engine.parallel.context=2"], "engine.parallel.context", "write engine.parallel.context=1"),
        (["rollout.tensor_parallel=2"], "rollout.tensor_parallel", "write rollout.tensor_parallel=1"),
        (["rollout.top_p=0.9"], "rollout.top_p", "write rollout.top_p=1.0"),
        (["rollout.top_k=5"], "rollout.top_k", "write rollout.top_k=0"),
        (["rollout.min_p=0.1"], "rollout.min_p", "write rollout.min_p=0.0"),
        (["engine.lora.rank=4", "engine.lora.dropout=0.1"], "engine.lora.dropout", "write engine.lora.dropout=0.0"),
        (["engine.lora.rank=4", "engine.lora.sync=adapter"], "engine.lora.sync", "write engine.lora.sync=merged"),
        (["engine.fusions=all"], "engine.fusions", "write engine.fusions=auto"),
        (["rollout.engine_arguments={kv_cache_dtype: fp8}"], "rollout.engine_arguments.kv_cache_dtype", "leave"),
    ],
)
def test_keys_that_are_not_exact(config: Path, overrides: list[str], key: str, remedy: str) -> None:
    error = refusal(config, *RUNS, *overrides)
    assert error.key == key and error.remedy.startswith(remedy)


def test_on_gpus_it_is_bfloat16(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, config.parent, 2)
    check_config(load_config(config, [*RUNS, "model.dtype=bfloat16"]), 1)
    assert refusal(config, *RUNS).remedy == "write model.dtype=bfloat16, or model.exact=false"
    assert refusal(config, *RUNS, "model.dtype=bfloat16", "engine.head_dtype=float32").key == "engine.head_dtype"


def test_a_plan_asks_for_the_dtype_of_what_is_planned_for(config: Path) -> None:
    check(load_config(config, [*RUNS, "model.dtype=bfloat16"]), 1)
    with pytest.raises(ConfigError, match=r"write model\.dtype=bfloat16, or model\.exact=false"):
        check(load_config(config, RUNS), 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
    ],
)
def test_models_that_are_not_exact_are_refused(config: Path, fields: dict[str, Any], tmp_path: Path) -> None:
    source = Path(load_config(config, []).model.path)
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    known = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**known, **fields}))
    error = refusal(config, *RUNS, f"model.path={tmp_path}")
    assert (error.key, error.value, error.remedy) == ("model.exact", "true", "write model.exact=false")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rollout.max_staleness", "1"),
        ("rollout.replicas", "2"),
        ("rollout.stop", "[x]"),
        ("algorithm.filter_groups", "true"),
        ("rollout.filter", f"{__name__}:keeps_all"),
    ],
)
def test_keys_that_are_not_deterministic(config: Path, key: str, value: str) -> None:
    check_config(load_config(config, ["run.deterministic=true"]), 2)
    error = refusal(config, "run.deterministic=true", f"{key}={value}")
    assert (
        error.key == key
        and "write run.deterministic=false" in f"write {error.remedy.rpartition('or ')[2].removeprefix('write ')}"
    )
