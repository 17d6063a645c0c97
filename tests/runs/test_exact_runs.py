"""Runs under `model.exact`: trainer and vLLM agree to the last bit about every token, and equal runs write equal numbers.

Sequences of several pages of a cache that has no room for all of them: some are preempted and computed anew, and prompts share
their first page.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megasync.reporting.metric_names import metric
from tests.runs.train_cases import metrics, train, write_config
from tests.support.tiny_models import write_tiny_model

PAGE, PAGES = 32, 40
# measurements of this machine
UNITS = {"s", "bytes", "tokens/s", "GB/s"}


def exact_config(folder: Path, family: str, **rollout: Any) -> Path:
    """Groups of four on prompts of more than a page; the cache holds a third of what generates at a time."""
    model = write_tiny_model(folder / "model", family, tied=family == "qwen3", num_hidden_layers=2, max_position_embeddings=256)
    fields = json.loads((model / "config.json").read_text())
    head = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    token_bytes = 2 * 4 * fields["num_hidden_layers"] * fields["num_key_value_heads"] * head
    config = write_config(
        folder,
        run={"steps": 4, "deterministic": not rollout},
        model={"path": str(model), "exact": True},
        engine={"wrap": "ddp", "tokens_per_microbatch": 2000},
        rollout={
            "max_new_tokens": 96,
            "max_model_len": 192,
            "kv_cache_bytes": PAGES * PAGE * token_bytes,
            "engine_arguments": {"block_size": PAGE},
            **rollout,
        },
        algorithm={"num_minibatches": 1},
        checkpoint={"every_steps": 0},
    )
    data = folder / "assets" / "train.jsonl"
    lines = [{"question": f"{'1+2+3+' * 8}{left}+{right}=", "answer": str(left)} for left in range(8) for right in range(10)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return config


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
    code, said = train(exact_config(folder, "qwen3"))
    assert code == 0, said
    return folder


def test_no_token_differs(first: Path) -> None:
    tokens, differing = compared(first, 4)
    assert tokens > 4 * 32 * 20 and differing == 0
    for line in metrics(first / "runs" / "run"):
        assert line["logprob_gap/max"] == line["logprob_gap/mean"] == 0.0
        assert line["importance/mean"] == line["importance/ess"] == 1.0
        assert line["grad_norm"] > 0


def test_two_runs_of_one_seed_write_the_same_numbers(first: Path, tmp_path: Path) -> None:
    code, said = train(exact_config(tmp_path, "qwen3"))
    assert code == 0, said
    for one, other in zip(*(metrics(folder / "runs" / "run") for folder in (first, tmp_path)), strict=True):
        assert one.keys() == other.keys()
        named = [key for key in one if (found := metric(key)) and found.unit not in UNITS]
        assert len(named) > 20 and not [key for key in named if one[key] != other[key]]
