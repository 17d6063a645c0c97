"""docs/your_own.md: its files, config and commands as a reader would take them over, up to where vLLM would start."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megasync.config.keys import all_keys, nearest_key
from megasync.config.schema import Config
from megasync.rewards.functions import RewardInput
from megasync.rewards.resolve import resolve_rewards

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "your_own.md").read_text(encoding="utf-8")
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
STARTS_VLLM = ("megasync train mine.yaml\n", "megasync export")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all blocks were carried out, in order."""
    here = tmp_path_factory.mktemp("your own")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    for language, text in BLOCKS:
        if language != "bash":
            name = re.match(r"# (\S+)\n", text)
            assert name, text
            (here / name[1]).write_text(text)
            continue
        for line in text.splitlines(keepends=True):
            if not line.startswith(STARTS_VLLM) or "--check" in line:
                program, *rest = line.split()
                command = [sys.executable, *(["-m", "megasync"] if program == "megasync" else []), *rest]
                done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stdout + done.stderr
                (here / "said").write_text(done.stdout)
    return here


def test_the_check_says_what_would_start(folder: Path) -> None:
    said = (folder / "said").read_text()
    for words in (
        "data.train has 500 examples; data.eval.sums has 50 examples",
        "my_rewards:close, 0.1 x my_rewards:brevity",
        "runs/mine",
        "steps 1 to 30; evaluation before the first, every 10 steps, after the last; checkpoint every 10 steps",
    ):
        assert words in said, said
    assert not (folder / "runs").exists()


def test_the_rewards_are_worth_what_the_page_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    samples = [RewardInput("40+9=", text, "49", len(text) + 1, 8, {"largest": 40}) for text in ("49", "51", "x" * 7)]
    reward = yaml.safe_load((folder / "mine.yaml").read_text())["rollout"]["reward"]
    close, brevity = resolve_rewards(reward)
    assert [close.function(sample) for sample in samples] == [1.0, 1 / 3, 0.0]
    assert brevity.takes_list and brevity.function(samples) == [0.625, 0.625, 0.0]
    (trl,), (verl,) = resolve_rewards("trl_rewards:accuracy"), resolve_rewards("verl_rewards:score")
    assert trl.function(samples) == [verl.function(sample) for sample in samples] == [1.0, 0.0, 0.0]


def test_the_names_in_the_tables_are_known(folder: Path) -> None:
    keys, tables = all_keys(Config), PAGE.partition("## Coming from TRL")[2]
    rows = re.findall(r"^\| `(.*?)` \| (.*) \|$", tables, flags=re.MULTILINE)
    assert len(rows) > 30
    for theirs, ours in rows:
        found = [name for name in re.findall(r"`([a-z_.]+)", ours) if "." in name]
        assert all(name in keys for name in found) and (found or "megasync" in ours), ours
        for name in theirs.split("`, `"):
            name = name.partition(":")[0].removesuffix(".enable")
            nearest, advice = nearest_key(keys, name)
            assert nearest in (*found, "algorithm.name") or (not nearest and advice), (name, nearest)
