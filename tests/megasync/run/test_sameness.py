"""Which tokens count under `model.exact`, and which of them differ.

    python -m pytest tests/megasync/run/test_sameness.py
"""

from __future__ import annotations

import numpy as np
import pytest

from engine.sample import Sample
from megasync.run.step_log import compare


def sample(log_probs: list[float], versions: list[int]) -> Sample:
    ids = np.arange(len(versions), dtype=np.int32)
    return Sample(ids[:1], ids, np.array(log_probs, np.float32), weight_versions=np.array(versions, np.int32))


@pytest.mark.parametrize(("recomputes", "tokens", "differing"), [(False, 3, 1), (True, 5, 2)])
def test_tokens_of_the_weights_that_are_trained_count(recomputes: bool, tokens: int, differing: int) -> None:
    samples = [sample([-1.0, -2.0, -3.0], [4, 4, 4]), sample([-1.0, -2.0, -3.0], [3, 4, 4]), sample([-1.0], [3])]
    last = np.nextafter(np.float32(-3.0), np.float32(0))
    trained = [np.array([-1.0, -2.0, last]), np.array([-5.0, -2.0, last]), np.array([-7.0])]
    found = compare(samples, [each.astype(np.float32) for each in trained], 4, recomputes=recomputes)
    assert found == {"exact/compared_tokens": tokens, "exact/differing_tokens": differing}


@pytest.mark.parametrize("versions", [[4, 4, 4], [4, -1, 4]])
def test_tokens_that_were_given_do_not_count(versions: list[int]) -> None:
    """What an episode's tools said has log-probs and versions without a meaning."""
    ids = np.arange(3, dtype=np.int32)
    theirs, mask = np.array([-1.0, 0.0, -3.0], np.float32), np.array([True, False, True])
    one = Sample(ids[:1], ids, theirs, weight_versions=np.array(versions, np.int32), is_sampled=mask)
    found = compare([one], [np.array([-1.0, -2.0, -3.0], np.float32)], 4, recomputes=False)
    assert found == {"exact/compared_tokens": 2, "exact/differing_tokens": 0}
