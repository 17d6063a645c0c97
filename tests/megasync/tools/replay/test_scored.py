"""Which tokens of a record are compared with the trainer's, and what is counted. With a run: tests/runs/test_exact_runs.py.

python -m pytest tests/megasync/tools/replay/test_scored.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.generation import Completion, GenerationRequest
from megasync.config.schema import Config
from megasync.episodes.segments import Branch
from megasync.episodes.task import EpisodeResult
from megasync.rollouts.records import RecordedGroup
from megasync.tools.replay import scored
from tests.support.ranks import run_ranks
from tests.support.tiny_models import load_model, write_tiny_model

REQUEST = GenerationRequest(prompt_ids=(5, 6, 7))


def of_response(versions: list[int], *, recomputes: bool) -> list[scored.Recorded]:
    size = len(versions)
    done = Completion(np.arange(size, dtype=np.int32), np.full(size, -0.5, np.float32), np.array(versions, np.int32), "stop")
    group = RecordedGroup(4, REQUEST, {1: done}, {1: 0.0})
    return scored.pieces_of({(4, 1): group}, config_of(recomputes=recomputes))


def config_of(*, recomputes: bool) -> Config:
    return Config.model_validate({"rollout": {"cache_on_update": "recompute" if recomputes else "keep"}})


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=20).map(sorted), st.booleans(), st.sets(st.integers(0, 3)))
def test_every_sampled_token_is_verified_once_or_left_out(versions: list[int], recomputes: bool, there: set[int]) -> None:
    sequences = of_response(versions, recomputes=recomputes)
    found = scored.result_of(1, 1, sequences)
    for version in sorted(there):
        for each in sequences:
            found.add(version, each, np.full(len(versions), -0.5, np.float32))
    found.leave_out(there)
    assert found.compared_tokens + found.later_tokens + sum(found.without_weights.values()) == found.tokens == len(versions)
    assert found.differing_tokens == 0 == found.largest_gap and not (recomputes and found.later_tokens)
    assert recomputes or found.later_tokens == sum(version != versions[0] for version in versions)


def test_a_token_that_differs_is_named() -> None:
    (sequence,) = of_response([2, 2, 3, 3], recomputes=True)
    found = scored.result_of(7, 1, [sequence])
    found.add(2, sequence, np.array([-0.5, -0.5, -9.0, -9.0], np.float32))
    assert (found.compared_tokens, found.differing_tokens) == (2, 0), "tokens of other versions are not this one's"
    found.add(3, sequence, np.array([-9.0, -9.0, -0.5, np.nextafter(np.float32(-0.5), np.float32(0))], np.float32))
    assert (found.compared_tokens, found.differing_tokens) == (4, 1) and 0 < found.largest_gap < 1e-7
    assert found.first == "episode 4/1, token 4: replica -0.5, trainer -0.49999997"
    (line,) = scored.total([found], Config())
    assert line.startswith("all: 4 tokens compared: 1 differ;")
    replays = Config.model_validate({"algorithm": {"router_replay": "rollout"}})
    assert "routers" in scored.total([found], replays)[1], "the gap is not the one that was trained with"


def test_tokens_are_scored_among_those_that_the_rollout_kept() -> None:
    ids, kept = np.arange(2, dtype=np.int32), np.array([2, 1, 0, 5, 1], np.int32)  # two at the first token, one at the second
    versions, log_probs = np.full(2, 3, np.int32), np.full(2, -0.5, np.float32)
    response = Completion(ids, log_probs, versions, support=kept)
    whole = [np.concatenate([np.zeros(1, each.dtype), each]) for each in (ids, np.ones(2, np.bool_), log_probs, versions)]
    branch = Branch(whole[0], 1, *whole[1:], support=np.concatenate([np.zeros(1, np.int32), kept]))
    group = RecordedGroup(4, REQUEST, {0: response, 1: EpisodeResult((branch,), 1.0)}, {0: 0.0, 1: 0.0})
    for each in scored.pieces_of({(4, 0): group, (4, 1): group}, config_of(recomputes=True)):
        assert each.sample.support.tolist() == kept.tolist()


def test_each_sequence_has_the_temperature_of_its_own_request() -> None:
    """A run may be resumed with another one; log-probs of a greedy sample are plain."""
    done = Completion(*(np.full(2, value) for value in (5, -0.5, 3)))
    request = replace(REQUEST, num_samples=2, first_is_greedy=True, temperature=0.7)
    group = RecordedGroup(4, request, {0: done, 1: done}, {0: 0.0, 1: 0.0})
    sequences = scored.pieces_of({(4, 0): group, (4, 1): group}, config_of(recomputes=True))
    assert [each.temperature for each in sequences] == [1.0, 0.7]


@pytest.mark.long
def test_log_probs_are_compared_at_the_temperature_that_was_sampled_at(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "qwen3")
    (found,) = run_ranks(
        1, "tests.megasync.tools.replay.scored_cases:at_temperatures", {"folder": folder, "temperatures": [1.0, 0.5]}
    )
    model, ids = load_model(folder), torch.arange(3, 13)[None]
    logits = model(ids).logits[0, 2:-1].double()
    for temperature, scores in zip([1.0, 0.5], found, strict=True):
        expected = (logits / temperature).log_softmax(-1).gather(1, ids[0, 3:, None])[:, 0]
        assert np.allclose(scores, expected.detach().numpy(), atol=1e-4)


def test_where_nothing_was_compared_there_is_no_gap() -> None:
    found = scored.result_of(7, 1, of_response([2, 2], recomputes=False))
    found.leave_out([3])
    assert found.lines(str) == ["step 7: 1 episodes, 0 of 2 tokens compared"] and found.without_weights == {2: 2}


def test_given_tokens_of_an_episode_are_not_compared() -> None:
    mask = np.array([False, False, True, False, True])
    branch = Branch(np.arange(5), 2, mask, np.where(mask, -1.0, 0.0), np.full(5, 3))
    group = RecordedGroup(0, REQUEST, {0: EpisodeResult((branch,), 1.0)}, {0: 1.0})
    (sequence,) = scored.pieces_of({(0, 0): group}, config_of(recomputes=False))
    assert sequence.of(3).tolist() == [True, False, True]
    found = scored.result_of(1, 1, [sequence])
    assert found.tokens_by_version == {3: 2}
    found.add(3, sequence, np.array([-1.0, -7.0, -1.0], np.float32))
    assert (found.tokens, found.compared_tokens, found.differing_tokens) == (2, 2, 0)
