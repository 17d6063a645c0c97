"""examples/grpo_by_hand.py as its first lines say: from assets to a model whose reward rises, on the CPU."""

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
def test_the_reward_rises_and_both_sides_agree(tmp_path: Path) -> None:
    write_assets(tmp_path / "assets", seed=0)
    command = [sys.executable, "-m", "examples.grpo_by_hand", "--assets", str(tmp_path / "assets"), "--steps", str(STEPS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = re.findall(r"^step +(\d+)  reward (\S+) .* gap to vLLM (\S+)  sync", done.stdout, flags=re.MULTILINE)
    assert [int(step) for step, _, _ in steps] == list(range(1, STEPS + 1))
    rewards, gaps = [float(reward) for _, reward, _ in steps], [float(gap) for _, _, gap in steps]
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3])
    assert max(gaps) < 1e-4
