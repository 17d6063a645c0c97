"""Work of rank 0 that takes longer than a collective may, or fails.

python -m pytest tests/megasync/run/test_rank_zero.py
"""

from __future__ import annotations

import os
import time

from tests.support.ranks import run_ranks

TIMEOUT_SECONDS = 2.0


def wait_for_rank_zero() -> tuple[str, str]:
    """What rank 0 returned after twice the time that the default group's collectives have; what it raised then."""
    from engine.runtime import parallel
    from engine.config import ParallelConfig
    from megasync.run.rank_zero import RankZeroError, RankZero, on_rank_zero

    rank = parallel.initialize(ParallelConfig(), seed=0, timeout_seconds=TIMEOUT_SECONDS).rank

    def work() -> str:
        time.sleep(2 * TIMEOUT_SECONDS)
        return f"done by {os.getpid()}"

    def fail() -> None:
        raise ValueError("broken on purpose")

    done = on_rank_zero(work)
    numbers = RankZero(lambda: [rank])
    assert (numbers.here is None) == (rank > 0) and numbers.call(sum) == 0
    try:
        RankZero(fail)
    except RankZeroError as error:
        return done, str(error)
    return done, ""


def test_ranks_wait_for_rank_zero_longer_than_a_collective_may_take() -> None:
    first, second = run_ranks(2, "tests.megasync.run.test_rank_zero:wait_for_rank_zero", {}, alone=True)
    assert first == second
    assert first[0].startswith("done by ")
    assert first[1] == "broken on purpose"
