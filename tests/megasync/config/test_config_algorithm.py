"""Which keys of `algorithm` go together, and which the config check refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megasync.checks.check import check_config
from megasync.config.errors import ConfigError
from megasync.config.load import load_config
from tests.support.config_files import ROOT, cannot_run


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.name=sft", "algorithm.loss_aggregation=constant_length"], "choices: token_mean, sequence_mean"),
        (["algorithm.load_balancing=0.1"], "qwen3 has no experts"),
        (["algorithm.router_replay=rollout"], "leave algorithm.router_replay out"),
        (["algorithm.importance_correction=mask", "algorithm.importance_cap=0.9"], "allowed: at least 1"),
        (["algorithm.truncated=penalise", "algorithm.overlong_buffer=0"], "write for example algorithm.overlong_buffer=204"),
        (["algorithm.truncated=penalise", "algorithm.overlong_buffer=1024"], "below rollout.max_new_tokens = 1024"),
        (["algorithm.support_replay=true", "rollout.top_k=0"], "allowed: 1 to 256"),
        (["algorithm.support_replay=true", "rollout.top_k=257"], "write for example rollout.top_k=64"),
        (["rollout.max_staleness=1", "rollout.oversample=1.5"], "rollout.max_staleness = 1: prompts are aborted"),
        (["rollout.episode=examples.calculator:episode", "rollout.oversample=2"], "needs:  rollout.max_staleness=0, and no"),
    ],
)  # fmt: skip
def test_objectives_that_make_no_sense_are_refused(runnable: Path, overrides: list[str], words: str) -> None:
    message = cannot_run(runnable, *overrides)
    assert words in message
    assert message.startswith(overrides[-1].partition("=")[0])
    assert "remedy:" in message


def test_values_of_objectives_are_bounded(runnable: Path) -> None:
    for override, words in {
        "algorithm.dual_clip=1": "above 1",
        "algorithm.importance_floor=1": "below 1",
        "algorithm.importance_level=response": "token, sequence, geometric",
        "algorithm.overlong_buffer=-1": "at least 0",
    }.items():
        with pytest.raises(ConfigError, match=f"{override.partition('=')[0]} = [\\s\\S]*{words}"):
            load_config(runnable, [override])


def test_objectives_of_the_field_can_run(runnable: Path) -> None:
    """The rows of the table in docs/how_a_step_works.md."""
    page = (ROOT / "docs/how_a_step_works.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S[^|]*?) \| `(\{.*?\})` \|", page, flags=re.MULTILINE)
    assert {name for name, _ in rows} >= {"GRPO", "DAPO", "Dr. GRPO", "GSPO", "RLOO", "TIS", "IcePop"}
    for name, keys in rows:
        print(name)
        check_config(load_config(runnable, [f"algorithm={keys}"]), 2)
