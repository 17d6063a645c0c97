"""examples/grpo_by_four_calls.py as its first lines say: from assets to an adapter whose reward rises, on the CPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megasync.tools.assets.command import write_assets

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS = 12


@pytest.mark.long
@pytest.mark.vllm_on_cpu
def test_the_reward_rises(tmp_path: Path) -> None:
    write_assets(tmp_path / "assets", seed=0)
    command = [sys.executable, "-m", "examples.grpo_by_four_calls", str(tmp_path / "assets"), "--steps", str(STEPS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [float(each) for each in re.findall(r"^step .* reward (\S+)", done.stdout, flags=re.MULTILINE)]
    assert len(rewards) == STEPS
    assert sum(rewards[-6:]) / 6 > 1.4 * sum(rewards[:2]) / 2
    assert list((tmp_path / "assets/by_four_calls/service/models").rglob("end/adapter/adapter_model.safetensors"))
