"""What the canary scores, and what it says. That it finds a damaged weight is in tests/runs/test_sync_trainer.py.

python -m pytest tests/megasync/run/test_canary.py
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megasync.config.schema import Config
from megasync.run.canary import Canary, CanaryError, bisect_remedy, largest_gap, mean_gap, probe_sequences, read_back_difference
from tests.support.ranks import run_ranks

PROMPTS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=6)


@given(PROMPTS, st.integers(1, 5), st.integers(2, 20))
def test_sequences_are_cut_from_the_prompts_in_their_order(prompts: list[list[int]], number: int, length: int) -> None:
    tokens = [token for ids in prompts for token in ids]
    found = probe_sequences(prompts, number, length)
    assert [len(ids) for ids in found] == [length] * number
    assert [token for ids in found for token in ids] == [tokens[place % len(tokens)] for place in range(number * length)]


def test_one_token_has_nothing_to_score() -> None:
    assert probe_sequences([[5]], 4, 1) == []


def test_the_gap_is_over_tokens_and_is_no_number_where_a_score_is_none() -> None:
    own = [np.array([-1.0, -2.0], np.float32), np.array([-3.0], np.float32)]
    others = [np.array([-1.5, -2.0], np.float32), np.array([-4.0], np.float32)]
    assert mean_gap(own, others) == 0.5
    assert math.isnan(mean_gap(own, [others[0], np.array([np.nan], np.float32)]))


def test_bisect_is_advised_where_it_follows_the_modules(tmp_path: Path) -> None:
    for family, is_advised in (("qwen3", True), ("gpt_oss", False), ("qwen3_5_text", False), ("seed_oss", False)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        assert ("megasync bisect" in bisect_remedy(Config(model={"path": str(tmp_path)}), 3)) == is_advised


def compare(scores: list[float], decoded: float = -1.0) -> dict[str, float] | str:
    """Metrics of a replica that gives these log-probs where the trainer's are -1 and -2, or why it stops the run.

    `decoded`: the log-prob of each token that it decodes.
    """
    from engine.config import ParallelConfig
    from engine.runtime import parallel

    parallel.initialize(ParallelConfig(), seed=0)
    trainer = SimpleNamespace(score=lambda samples: [torch.tensor([-1.0, -2.0])])
    completion = SimpleNamespace(token_ids=[7, 8], log_probs=np.array([decoded, -2.0], np.float32))
    replica = SimpleNamespace(
        members=[3], score=lambda *_: [np.array(scores, np.float32)], generate_by=lambda *_: [[completion]]
    )
    canary = Canary([(1, 2, 3)], [(1,)], 0.2, 60.0, print)
    canary.score_by_trainer(trainer)
    try:
        return canary.compare(7, replica, SimpleNamespace(diff_with_replica=lambda replica: ([], "")))
    except CanaryError as error:
        return str(error)
    finally:
        parallel.shutdown()


def test_a_gap_above_the_tolerance_or_of_no_number_stops_the_run() -> None:
    (near,) = run_ranks(1, "tests.megasync.run.test_canary:compare", {"scores": [-1.0, -2.25]})
    assert near["sync/canary_gap"] == 0.125 and near["sync/canary_decoding_gap"] == 0.125
    (why,) = run_ranks(1, "tests.megasync.run.test_canary:compare", {"scores": [-1.0, -2.0], "decoded": -1.5})
    assert "version 7: replica 3 decodes" in why
    for wrong in ([-1.0, -2.5], [-1.0, math.nan]):
        (why,) = run_ranks(1, "tests.megasync.run.test_canary:compare", {"scores": wrong})
        assert "version 7: replica 3" in why and "decodes" not in why


def test_the_first_layer_is_named() -> None:
    names = ["model.layers.11.mlp.experts.3.up_proj.weight", "model.layers.12.mlp.gate.weight"]
    assert "is model.layers.11, in model.layers.11.mlp.experts.3" in read_back_difference(names, "")
    adapter = "base_model.model.model.layers.2.mlp.up_proj.lora_A.weight"
    assert "is base_model.model.model.layers.2, in" in read_back_difference([adapter], "")
    assert "is model.embed_tokens, in" in read_back_difference(["model.embed_tokens.weight"], "")
    assert "it holds what was sent" in read_back_difference([], "")
    assert "could not be read back: dead" in read_back_difference([], "dead")


def test_quantised_replicas_may_be_further_away() -> None:
    given = {"sync": {"canary_tolerance": 0.1}, "rollout": {"dtype": "fp8"}}
    assert largest_gap(Config.model_validate(given)) == 5 * largest_gap(Config.model_validate({"sync": given["sync"]})) == 0.5
    assert largest_gap(Config.model_validate({"model": {"exact": True}})) == 0
