"""Samplers, sources and turns' rewards in whole runs that are killed with kill -9: all is as in a run that was not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megasync.report.log import read_samples
from tests.runs.train_cases import TORCHRUN, Run, endless_run, exact, launch, metrics, write_config

pytestmark = [pytest.mark.long, pytest.mark.vllm_on_cpu]

NUM_STEPS, BATCH, KILLED_AFTER = 8, 8, 4
SAMPLERS: list[dict[str, Any]] = [
    {"sampler": "difficulty", "sampler_arguments": {"visits": 1, "rest_steps": 2}, "sources": True},
    {"sampler": "tests.support.own_parts:Sampler", "sampler_arguments": {"stride": 97}, "turns": True},
]
OF_TURNS = {"episode": "tests.support.episodes:Parity", "episode_max_turns": 3, "max_model_len": 64}


def trained(folder: Path) -> list[tuple[int, str, int]]:
    """Step, source and line of each prompt, in their order."""
    lines = [line for line in read_samples(folder) if line["set"] == "train"]
    return [(line["step"], line.get("source", ""), line["line"]) for line in lines]


def run_of(folder: Path, keys: dict[str, Any]) -> Path:
    data = {name: value for name, value in keys.items() if name not in ("sources", "turns")}
    sections = {"rollout": OF_TURNS, "algorithm": {"credit": "turn"}} if keys.get("turns") else {}
    common = {"run": {"log_samples": BATCH}, "engine": {"wrap": "ddp"}, "checkpoint": {"every_steps": 3}}
    config = write_config(folder, data=data, **common, **sections)
    if keys.get("sources"):
        source = folder / "assets" / "train.jsonl"
        lines = source.read_text().splitlines(keepends=True)
        paths = [folder / "few.jsonl", folder / "many.jsonl"]
        for path, own in zip(paths, (lines[:13], lines[13:40]), strict=True):
            path.write_text("".join(own))
        values = {"few": {"path": str(paths[0])}, "many": {"path": str(paths[1]), "weight": 2}}
        config.write_text(config.read_text().replace(f"train: {source}", f"train: {json.dumps(values)}"))
    return config


def killed(run: Run) -> int:
    run.wait_for(KILLED_AFTER)
    run.ranks()[0].kill()
    assert run.process.wait(300) != 0
    return len(metrics(run.folder))


@pytest.mark.parametrize("keys", SAMPLERS, ids=["difficulty", "own"])
def test_a_run_that_was_killed_trains_the_prompts_of_one_that_was_not(tmp_path: Path, keys: dict[str, Any]) -> None:
    """More than one pass: each example once in a pass, and with `difficulty` those at rest left out."""
    whole = run_of(tmp_path / "whole", keys)
    done = launch(whole, f"run.steps={NUM_STEPS}", ranks=1)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = trained(tmp_path / "whole" / "runs" / "run")
    assert len(expected) == NUM_STEPS * BATCH
    config = run_of(tmp_path / "killed", keys)
    with endless_run(TORCHRUN, config, "--nproc", "1") as run:
        assert killed(run) >= KILLED_AFTER
    again = launch(config, f"run.steps={NUM_STEPS}", ranks=1)
    assert again.returncode == 0, again.stdout + again.stderr
    assert trained(run.folder) == expected and exact(run.folder) == exact(tmp_path / "whole" / "runs" / "run")
    for line in read_samples(run.folder) if keys.get("turns") else ():
        rewards = line["info"]["turn_rewards"]
        assert line["turns"] == len(rewards) == 3 and line["reward"] == pytest.approx(sum(rewards))
    shutil.rmtree(tmp_path)
