"""What the scheduler decides, as properties: nothing too old, nothing lost, nobody waits for what is not needed."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.rollouts.scheduler import Candidate, Load, PrefetchController, choose_batch, choose_replica, num_admissible
from megasync.rollouts.scheduler import trainable


@settings(deadline=None, max_examples=200)
@given(
    staleness=st.integers(0, 4),
    batch_size=st.integers(1, 5),
    num_steps=st.integers(1, 12),
    slots=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_group_is_trained_once_and_none_is_too_old(
    staleness: int, batch_size: int, num_steps: int, slots: int, seed: int
) -> None:
    """A run with one replica whose groups end in any order, some of them very late; some begin while a step is trained."""
    source = random.Random(seed)
    begun: dict[int, int] = {}  # by ordinal the version it begins with
    waiting: list[int] = []
    done: set[int] = set()
    trained: list[int] = []
    num_admitted, lead = 0, PrefetchController(staleness + 1, patience=1)

    def admit(step: int, version: int) -> None:
        nonlocal num_admitted
        room = num_admissible(len(begun) + len(waiting), step, version, lead.batches * batch_size, batch_size, num_steps)
        waiting.extend(range(num_admitted, num_admitted + room))
        num_admitted += room

    for step in range(num_steps):
        assert min(2, staleness + 1) <= lead.batches <= staleness + 1
        admit(step, step)
        while True:
            running = [ordinal for ordinal in begun if ordinal not in done]
            while waiting and len(running) < slots:
                begun[waiting[0]] = step
                running.append(waiting.pop(0))
            candidates = [Candidate(o, begun.get(o, step), o in done) for o in [*begun, *waiting]]
            assert trainable(candidates, step, staleness, batch_size, num_steps) == {one.ordinal for one in candidates}
            batch = choose_batch(candidates, step, staleness, batch_size)
            if batch is not None:
                break
            assert running, "someone is waited for"
            done.add(source.choice(running))
        assert len(batch) == batch_size and batch == sorted(batch)
        for ordinal in batch:
            assert ordinal in done and begun.pop(ordinal) >= step - staleness
        trained += batch
        lead.observe(source.choice((0.0, 0.5)), sum(ordinal in done for ordinal in begun) / batch_size)
        if begun and source.random() < 0.3:  # it is discarded, and another takes its place before the next publish
            discarded = source.choice(list(begun))
            del begun[discarded]
            trained.append(discarded)
            admit(step + 1, step)
            while waiting and sum(ordinal not in done for ordinal in begun) < slots:
                begun[waiting.pop(0)] = step
    assert sorted(trained) == list(range(num_admitted))
    assert not begun and not waiting


def test_replicas_run_ahead_as_far_as_the_trainer_needs() -> None:
    """Further after a wait that counts; less far once whole batches are ready, tried more seldom each time that was wrong."""
    lead = PrefetchController(4, patience=2)
    for wait, ready, expected in ((0.2, 0, 4), (0, 1, 4), (0.01, 1, 3), (0.01, 0, 3), (0.06, 0, 4), (0.2, 0, 4)):
        lead.observe(wait, ready)
        assert lead.batches == expected
    assert lead.patience == 4
    for _ in range(3):
        lead.observe(0, 1)
    assert lead.batches == 4
    for _ in range(50):
        lead.observe(0, 1)
    assert lead.batches == 2
    assert PrefetchController(1).batches == 1


def test_without_staleness_batches_are_those_of_the_data() -> None:
    candidates = [Candidate(ordinal, 3, ordinal != 7) for ordinal in range(6, 9)]
    assert choose_batch(candidates, 3, 0, 3) is None
    assert choose_batch([Candidate(ordinal, 3, True) for ordinal in (8, 6, 7)], 3, 0, 3) == [6, 7, 8]


@given(
    oldest=st.lists(st.integers(0, 6), max_size=20),
    staleness=st.integers(0, 4),
    batch_size=st.integers(1, 4),
    num_steps=st.integers(6, 9),
)
def test_of_a_checkpoint_goes_on_what_can_be_trained_in_time(
    oldest: list[int], staleness: int, batch_size: int, num_steps: int
) -> None:
    """From step 5 on; with any other group beside them one would be late."""

    def in_time(ordinals: set[int]) -> bool:
        last_steps = [min(oldest[ordinal] + staleness, num_steps - 1) for ordinal in ordinals]
        return all(sum(last <= step for last in last_steps) <= max(0, step - 4) * batch_size for step in range(num_steps))

    candidates = [Candidate(ordinal, version, True) for ordinal, version in enumerate(oldest)]
    kept = trainable(candidates, 5, staleness, batch_size, num_steps)
    assert in_time(kept)
    assert not any(in_time(kept | {ordinal}) for ordinal in range(len(oldest)) if ordinal not in kept)


def test_nobody_waits_for_a_group_that_is_not_needed() -> None:
    """It waits for what the next step may not take, or could not take beside the others; and not for younger ones."""
    candidates = [Candidate(0, 4, False), Candidate(1, 5, True), Candidate(2, 6, False), Candidate(3, 6, True)]
    assert choose_batch(candidates, 6, 4, 2) == [1, 3]
    assert choose_batch(candidates, 6, 2, 2) is None
    assert choose_batch([Candidate(0, 4, True), *candidates[1:]], 6, 2, 2) == [0, 1]
    old = [Candidate(0, 5, False), Candidate(1, 5, False), Candidate(2, 6, True)]
    assert choose_batch(old, 6, 2, 1) is None  # the next step could take one of both alone
    assert choose_batch(old, 6, 3, 1) == [2]


def test_a_batch_is_what_there_is_where_nothing_can_be_added() -> None:
    candidates = [Candidate(0, 0, True)]
    assert choose_batch(candidates, 0, 0, 2) is None
    assert choose_batch(candidates, 0, 0, 2, may_grow=False) == [0]
    assert choose_batch([], 0, 0, 2, may_grow=False) == []


@given(
    loads=st.dictionaries(st.integers(0, 7), st.builds(Load, st.integers(0, 20), st.floats(0, 1e6)), max_size=6),
    samples=st.integers(1, 20),
    limit=st.none() | st.integers(1, 30),
)
def test_a_group_goes_to_the_replica_with_the_fewest_tokens_that_has_room(
    loads: dict[int, Load], samples: int, limit: int | None
) -> None:
    chosen = choose_replica(loads, samples, limit)
    able = {r: load for r, load in loads.items() if limit is None or not load.samples or load.samples + samples <= limit}
    if chosen is None:
        assert not able
    else:
        assert all(load.tokens >= able[chosen].tokens for load in able.values())
