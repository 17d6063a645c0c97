"""The plan of micro-batches: which samples are packed together, by tokens and by what attention costs.

python -m pytest tests/engine/batch/test_costs.py
"""

from __future__ import annotations

from itertools import chain

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from engine.batch.plan import Balance, balance, plan_microbatches
from engine.batch.costs import attention_costs

FAST = settings(derandomize=True, database=None, deadline=None, max_examples=60)

LENGTHS = st.lists(st.integers(2, 60), min_size=1, max_size=40)


@FAST
@given(LENGTHS, st.integers(1, 8))
def test_balance_puts_the_longest_into_the_emptiest_bin(lengths: list[int], num_bins: int) -> None:
    expected: list[list[int]] = [[] for _ in range(num_bins)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        emptiest = min(expected, key=lambda members: (sum(lengths[i] for i in members), len(members)))
        emptiest.append(index)
    assert balance(lengths, num_bins) == [sorted(members) for members in expected]


@FAST
@given(LENGTHS, st.integers(1, 5), st.integers(10, 130))
def test_the_plan_has_as_few_microbatches_as_fit(lengths: list[int], data_size: int, limit: int) -> None:
    plan = plan_microbatches(lengths, data_size, limit)
    (count,) = {len(bins) for bins in plan}
    least, most = max(1, -(-sum(lengths) // (data_size * limit))), max(1, -(-len(lengths) // data_size))

    def fits(num_bins: int) -> bool:
        return all(sum(lengths[i] for i in b) <= limit or len(b) == 1 for b in balance(lengths, num_bins))

    assert count == next(c for c in range(least, len(lengths) + least + 1) if c >= most or fits(data_size * c))
    assert sorted(chain.from_iterable(chain.from_iterable(plan))) == list(range(len(lengths)))
    assert [plan[rank][i] for i in range(count) for rank in range(data_size)] == balance(lengths, data_size * count)


@FAST
@given(LENGTHS, st.integers(1, 5), st.integers(10, 130), st.integers(1, 4), st.floats(1, 100))
def test_a_plan_by_cost_is_even_in_cost(
    lengths: list[int], data_size: int, limit: int, multiple: int, attention_length: float
) -> None:
    """No rank, and of a rank no micro-batch, costs more than another by more than the costliest sample; the limit holds."""
    wanted = Balance(multiple, attention_length)
    plan = plan_microbatches(lengths, data_size, limit, wanted)
    bins = list(chain.from_iterable(plan))
    costs = wanted.costs(np.array(lengths)).tolist()
    assert {len(own) for own in plan} == {len(bins) // data_size} and len(bins) // data_size % multiple == 0
    assert sorted(chain.from_iterable(bins)) == list(range(len(lengths)))
    assert all(len(members) <= 1 or sum(lengths[i] for i in members) <= limit for members in bins)
    totals = [[sum(costs[i] for i in members) for members in own] for own in plan]
    for some in (*totals, [sum(own) for own in totals]):
        assert max(some) - min(some) <= max(costs)
    assert all(own == sorted(own, reverse=True) for own in totals), "the ranks' costliest at the same time"


@FAST
@given(LENGTHS, st.lists(st.integers(0, 60), min_size=1, max_size=4))
def test_attention_costs_as_many_tokens_as_are_attended_to(lengths: list[int], windows: list[int]) -> None:
    found = attention_costs(np.array(lengths), windows)
    for length, cost in zip(lengths, found.tolist(), strict=True):
        seen = [sum(min(token, window or length) for token in range(1, length + 1)) for window in windows]
        exact = sum(2 * each - min(length, window or length) for each, window in zip(seen, windows, strict=True)) / len(windows)
        assert 0 <= exact - cost < len(windows)


def test_with_windows_a_long_sample_counts_for_less() -> None:
    lengths = np.array([100, 10_000])
    short, long = Balance(1, 5000, (0, 500)).costs(lengths).tolist()
    assert (short, long) == (100 * 5100, 10_000 * 5000 + 10_000**2 // 2 + 500 * 19_500 // 2)


def test_a_long_sample_counts_for_more_than_its_tokens() -> None:
    """16 384 tokens cost as much as 126 samples of 256, where attention costs as much as all else at that length."""
    lengths = [16384] + [256] * 192
    tokens, costs = (plan_microbatches(lengths, 2, 65536, wanted) for wanted in (Balance(), Balance(1, 16384)))
    assert [[sum(lengths[i] for i in members) for members in own] for own in tokens] == [[32768], [32768]]
    assert [[len(members) for members in own] for own in costs] == [[1 + 33], [126 + 33]]


def test_by_cost_ranks_of_long_tailed_lengths_end_together() -> None:
    """Log-normal lengths, a model of 3 B: the slowest of 8 ranks has as much to do as the mean, in place of 21 % more."""
    lengths = np.minimum(np.random.default_rng(0).lognormal(np.log(8192 / 3), 1.0, 512).astype(np.int64) + 256, 131072)
    by_cost = Balance(attention_length=41852)
    ends = []
    for wanted in (Balance(), by_cost):
        plan = plan_microbatches(lengths, 8, 32768, wanted)
        totals = [sum(int(by_cost.costs(lengths)[members].sum()) for members in own) for own in plan]
        ends.append(max(totals) * 8 / sum(totals))
    assert ends[0] > 1.1 and ends[1] < 1.02, ends


def test_samples_longer_than_an_int32_holds_are_counted_right() -> None:
    (plan,) = plan_microbatches([2**31 + 5, 2**31, 3], 1, 2**32, Balance(1, 2.0**20))
    assert plan == [[0], [1, 2]]
