"""Runs under `model.exact`: trainer and vLLM agree to the last bit about every token, and equal runs write equal numbers.

Sequences of several pages of a cache that has no room for all of them: some are preempted and computed again, and prompts share
their first page.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megasync.report.registry import metric
from tests.runs.exact_cases import ASYNCHRONOUS, KEPT, exact_config, scored
from tests.runs.train_cases import metrics, train

pytestmark = [pytest.mark.long, pytest.mark.vllm_on_cpu]

# measurements of this machine
UNITS = {"s", "bytes", "tokens/s", "GB/s"}


def config_of(folder: Path) -> Path:
    """Prompts of more than a page; the cache holds a third of what generates at a time."""
    return exact_config(folder, "qwen3", lengths=(60, 64), tokens=48, pages=28, run={"steps": 3, "deterministic": True})


def compared(folder: Path, steps: int) -> tuple[int, int]:
    lines = metrics(folder / "runs" / "run")
    assert len(lines) == steps
    for line in lines:
        assert line["ratio/first_minibatch_mean"] == 1.0 and line["sync/canary_gap"] == 0.0
    tokens, differing = (int(sum(line[f"exact/{name}_tokens"] for line in lines)) for name in ("compared", "differing"))
    return tokens, differing


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    code, said = train(config_of(folder))
    assert code == 0, said
    return folder


def test_no_token_differs(first: Path) -> None:
    tokens, differing = compared(first, 3)
    assert tokens > 3 * 32 * 20 and differing == 0
    for line in metrics(first / "runs" / "run"):
        assert line["logprob_gap/max"] == line["logprob_gap/mean"] == 0.0
        assert line["importance/mean"] == line["importance/ess"] == 1.0
        assert line["grad_norm"] > 0


def test_two_runs_of_one_seed_write_the_same_numbers(first: Path, tmp_path: Path) -> None:
    """As far as the second goes: its last step has weights of its own."""
    code, said = train(config_of(tmp_path), "run.steps=2")
    assert code == 0, said
    others = metrics(tmp_path / "runs" / "run")
    assert len(others) == 2
    for one, other in zip(metrics(first / "runs" / "run"), others, strict=False):
        assert one.keys() == other.keys()
        named = [key for key in one if (found := metric(key)) and found.unit not in UNITS]
        assert len(named) > 20 and not [key for key in named if one[key] != other[key]]


def test_no_token_differs_of_those_that_older_versions_sampled(tmp_path: Path) -> None:
    """Each is compared by the weights that sampled it, out of the log of versions; updates find sequences in their midst."""
    config = exact_config(
        tmp_path, "llama", lengths=(1, 500), tokens=64, pages=60,
        run={"steps": 4}, rollout=KEPT["rollout"] | ASYNCHRONOUS, sync=KEPT["sync"],
    )  # fmt: skip
    code, said = train(config)
    assert code == 0, said
    lines, found = metrics(tmp_path / "runs" / "run"), scored(tmp_path / "runs" / "run")
    assert max(line["staleness/max"] for line in lines) > 0 and sum(line["exact/differing_tokens"] for line in lines) == 0
    assert found["steps"] == 4 and found["tokens"] == sum(line["train/response_tokens"] for line in lines) > 4 * 32 * 20
    assert (found["compared_tokens"], found["differing_tokens"]) == (found["tokens"], 0)
