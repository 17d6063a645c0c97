"""What `model.exact` refuses, by name and with a remedy.

    python -m pytest tests/megasync/checks/test_exact_check.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megasync.assets import write_assets
from megasync.checks.check import check_config
from megasync.config.errors import ConfigError
from megasync.config.load import load_config
from megasync.planning.make import check

RUNS = ("model.exact=true", "model.dtype=float32")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exact")
    assets = write_assets(folder, seed=0)
    path = folder / "config.yaml"
    lines = [f"run: {{dir: {folder}}}", f"model: {{path: {assets.model}}}", f"data: {{train: {assets.train}, batch_size: 4}}"]
    path.write_text("\n".join([*lines, "rollout: {max_new_tokens: 8, reward: token_count}", ""]))
    return path


def refused(config: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        check_config(load_config(config, [*RUNS, *overrides]), 2)
    return str(error.value)


def test_an_exact_run_can_start(config: Path) -> None:
    for more in ([], ["engine.lora.rank=4"], ["engine.wrap=ddp", "rollout.max_staleness=2", "rollout.on_update=continue"]):
        check_config(load_config(config, [*RUNS, *more]), 2)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.dtype=bfloat16"], "model.dtype = bfloat16: is not exact"),
        (["model.dtype=float16"], "write model.dtype=float32, or model.exact=false"),
        (["engine.parallel.tensor=2"], "engine.parallel.tensor = 2: is not exact"),
        (["engine.parallel.context=2"], "engine.parallel.context = 2: is not exact"),
        (["rollout.tensor_parallel=2"], "rollout.tensor_parallel = 2: is not exact"),
        (["rollout.top_p=0.9"], "rollout.top_p = 0.9: is not exact"),
        (["rollout.top_k=5"], "write rollout.top_k=0"),
        (["rollout.min_p=0.1"], "write rollout.min_p=0.0"),
        (["engine.lora.rank=4", "engine.lora.dropout=0.1"], "engine.lora.dropout = 0.1: is not exact"),
        (["engine.lora.rank=4", "engine.lora.sync=adapter"], "write engine.lora.sync=merged"),
        (["engine.fusions=all"], "fused kernels are not exact"),
        (["rollout.engine_arguments={kv_cache_dtype: fp8}"], "rollout.engine_arguments.kv_cache_dtype"),
    ],
)
def test_what_is_not_exact_is_refused(config: Path, overrides: list[str], words: str) -> None:
    assert words in refused(config, *overrides)


def test_on_gpus_it_is_bfloat16(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    check_config(load_config(config, [*RUNS, "model.dtype=bfloat16"]), 1)
    assert "write model.dtype=bfloat16, or model.exact=false" in refused(config)
    assert "engine.head_dtype = float32: is not exact" in refused(config, "model.dtype=bfloat16", "engine.head_dtype=float32")


def test_a_plan_asks_for_the_dtype_of_what_is_planned_for(config: Path) -> None:
    given = load_config(config, [*RUNS, "model.dtype=bfloat16"])
    check(given, 1, on_gpus=True)
    with pytest.raises(ConfigError, match=r"write model\.dtype=float32, or model\.exact=false"):
        check(given, 1, on_gpus=False)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "a sliding window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope_type = yarn is not exact"),
    ],
)
def test_models_that_are_not_exact_are_refused(config: Path, fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    source = Path(load_config(config, []).model.path)
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    known = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**known, **fields}))
    assert words in refused(config, f"model.path={tmp_path}")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.max_staleness=1", "rollout.max_staleness = 1: which samples a batch has depends on time"),
        ("rollout.replicas=2", "rollout.replicas = 2: who generates what depends on time"),
        ("rollout.stop=[x]", "vLLM hears of the end of a response"),
        ("algorithm.filter_groups=true", "which groups come first depends on time"),
    ],
)
def test_what_is_not_deterministic_is_refused(config: Path, override: str, words: str) -> None:
    check_config(load_config(config, ["run.deterministic=true"]), 2)
    with pytest.raises(ConfigError) as error:
        check_config(load_config(config, ["run.deterministic=true", override]), 2)
    assert words in str(error.value) and "write run.deterministic=false" in str(error.value)
