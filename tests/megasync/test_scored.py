"""Which tokens of a record are compared with the trainer's, and what is counted. With a run: tests/runs/test_exact_runs.py.

python -m pytest tests/megasync/test_scored.py
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.generation import Completion, GenerationRequest
from megasync.episodes.segments import Branch
from megasync.episodes.task import Played
from megasync.rollouts.records import RecordedGroup
from megasync.serving import scored

REQUEST = GenerationRequest(prompt_ids=(5, 6, 7))


def of_response(versions: list[int], *, recomputes: bool) -> list[scored.Recorded]:
    size = len(versions)
    done = Completion(np.arange(size, dtype=np.int32), np.full(size, -0.5, np.float32), np.array(versions, np.int32), "stop")
    group = RecordedGroup(4, REQUEST, {1: done}, {1: 0.0})
    return scored.sequences_of({(4, 1): group}, recomputes=recomputes)


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=20).map(sorted), st.booleans(), st.sets(st.integers(0, 3)))
def test_every_sampled_token_is_compared_once_or_left_out(versions: list[int], recomputes: bool, there: set[int]) -> None:
    sequences = of_response(versions, recomputes=recomputes)
    found = scored.begun(1, 1, sequences, there)
    for version in sorted(there):
        for each in sequences:
            found.add(version, each, np.full(len(versions), -0.5, np.float32))
    assert found.compared_tokens + found.later_tokens + sum(found.without_weights.values()) == found.tokens == len(versions)
    assert found.differing_tokens == 0 == found.largest_gap and not (recomputes and found.later_tokens)
    assert recomputes or found.later_tokens == sum(version != versions[0] for version in versions)


def test_a_token_that_differs_is_named() -> None:
    (sequence,) = of_response([2, 2, 3, 3], recomputes=True)
    found = scored.begun(7, 1, [sequence], [2, 3])
    found.add(2, sequence, np.array([-0.5, -0.5, -9.0, -9.0], np.float32))
    assert (found.compared_tokens, found.differing_tokens) == (2, 0), "tokens of other versions are not this one's"
    found.add(3, sequence, np.array([-9.0, -9.0, -0.5, np.nextafter(np.float32(-0.5), np.float32(0))], np.float32))
    assert (found.compared_tokens, found.differing_tokens) == (4, 1) and 0 < found.largest_gap < 1e-7
    assert found.first == "episode 4/1, token 4: replica -0.5, trainer -0.49999997"
    assert scored.total([found]).startswith("all: 4 tokens compared, 1 differ;")


def test_where_nothing_was_compared_no_gap_is_told() -> None:
    found = scored.begun(7, 1, of_response([2, 2], recomputes=False), [3])
    assert scored.lines(found) == [
        "step 7: 1 episodes, 0 of 2 tokens compared",
        "  not compared: 2 tokens of version 2, whose weights are not there",
    ]


def test_given_tokens_of_an_episode_are_not_compared() -> None:
    mask = np.array([False, False, True, False, True])
    branch = Branch(np.arange(5), 2, mask, np.where(mask, -1.0, 0.0), np.full(5, 3))
    group = RecordedGroup(0, REQUEST, {0: Played((branch,), 1.0)}, {0: 1.0})
    (sequence,) = scored.sequences_of({(0, 0): group}, recomputes=False)
    assert sequence.of(3).tolist() == [True, False, True] and scored.versions_of([sequence]) == {3}
    found = scored.begun(1, 1, [sequence], [3])
    found.add(3, sequence, np.array([-1.0, -7.0, -1.0], np.float32))
    assert (found.tokens, found.compared_tokens, found.differing_tokens) == (2, 2, 0)
