"""Who is silent, who watches whom, and what becomes of a rank that is stopped or left alone.

python -m pytest tests/megasync/run/test_heartbeat.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.transport.store import open_store
from megasync.run.heartbeat import Heartbeat, LastSeen, watched_ranks
from tests.support.ranks import ROOT, run_ranks


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 4.9), st.sets(st.integers(0, 3))), max_size=40))
def test_silent_is_who_has_not_counted_up_for_the_limit(looks) -> None:
    """The looker comes by at least every 4.9 of 10 seconds, and each time some of four have counted up."""
    seen, now = LastSeen(range(4), 10.0, 0.0), 0.0
    counts, last = dict.fromkeys(range(4), 0), dict.fromkeys(range(4), 0.0)
    for place, (seconds, active) in enumerate(looks):
        now += seconds
        for rank in active | (set(range(4)) if place == 0 else set()):
            counts[rank], last[rank] = counts[rank] + 1, now
        assert seen.look(dict(counts), now) == [rank for rank in range(4) if now - last[rank] > 10]


@pytest.mark.parametrize("seconds", [6.0, 11.0, 47.0])
def test_a_rank_that_was_held_up_blames_no_other(seconds: float) -> None:
    seen, back = LastSeen([1, 2], 10.0, 0.0), 13.0 + seconds
    assert seen.look({}, 4.0) == seen.look({}, 8.0) == seen.look({}, 12.0) == [], "they were never there"
    assert seen.look({1: 5, 2: 5}, 13.0) == []
    assert seen.look({1: 5, 2: 5}, back) == []
    assert seen.look({1: 6, 2: 5}, back + 4) == []
    assert seen.look({1: 7, 2: 5}, back + 8) == []
    seen.forget(1)
    assert seen.look({2: 5}, back + 11) == [2]


@pytest.mark.parametrize("world_size", [2, 3, 8, 9, 200])
def test_each_rank_is_watched_by_others(world_size) -> None:
    watched = [watched_ranks(rank, world_size) for rank in range(world_size)]
    assert all(rank not in own and len(own) <= 9 for rank, own in enumerate(watched))
    watchers = [sum(rank in own for own in watched) for rank in range(world_size)]
    assert min(watchers) >= min(7, world_size - 1)


def stop_rank_one() -> None:
    """Rank 1 stops in the midst of a step; rank 0 waits for it in a collective."""
    from engine.runtime import parallel
    from engine.config import ParallelConfig
    from megasync.run.heartbeat import Heartbeat
    from megasync.run.rank_zero import on_rank_zero

    rank = parallel.initialize(ParallelConfig(), seed=0).rank
    heartbeat = Heartbeat(rank, 2, limit_seconds=3.0)
    heartbeat.phase = "train, step 3" if rank else "rollout, step 3"
    heartbeat.start()
    on_rank_zero(lambda: None)
    time.sleep(5.0)  # until each has been seen, which takes 0.3 s
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait()


def test_a_stopped_rank_is_named_and_ends_all() -> None:
    said = r"rank 1 \(train, step 3\): no sign of life for 3 s .* seen from rank 0 \(rollout, step 3\); the run ends"
    with pytest.raises(AssertionError, match=f"failed:[\\s\\S]*{said}"):
        run_ranks(2, "tests.megasync.run.test_heartbeat:stop_rank_one", {}, alone=True)


def test_a_finished_rank_watches_the_others_until_they_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("127.0.0.1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    first, second = (Heartbeat(rank, 2, limit_seconds=300.0) for rank in range(2))
    first.start()
    second.start()
    leaving = threading.Thread(target=first.leave)
    leaving.start()
    leaving.join(0.5)
    assert leaving.is_alive()
    second.leave()
    leaving.join(60.0)
    assert not leaving.is_alive()


LONELY = """
import time
from megasync.run.heartbeat import Heartbeat
Heartbeat(1, 2, limit_seconds=3.0).start()
time.sleep(600)
"""


def test_a_rank_ends_when_the_process_that_has_the_store_is_gone() -> None:
    store = open_store("127.0.0.1")
    own = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    with subprocess.Popen([sys.executable, "-c", LONELY], env=own, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            while not store.check(["megasync/heartbeat/0/1"]):
                assert process.poll() is None
                time.sleep(0.1)
            del store
            _, said = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGTERM and "is gone, seen from rank 1 (start); the run ends" in said, said
