"""The plan of lanes: each host gets every bucket once, senders hold what they send, lanes are even. Pure.

python -m pytest tests/bridge/layout/test_lanes.py
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from bridge.layout.lanes import MIN_LANES, Holder, LanePlan, lane_bucket_bytes, plan_lanes


@st.composite
def clusters(draw) -> tuple[list[Holder], list[str], int | None]:
    """Trainer ranks that hold stages, on any hosts, and the hosts of readers, which may be the same ones."""
    num_stages = draw(st.integers(1, 5))
    stages = list(range(num_stages)) + draw(st.lists(st.integers(0, num_stages - 1), max_size=40))
    order = draw(st.permutations(stages))
    holders = [Holder(rank, stage, draw(st.sampled_from("abcdef"))) for rank, stage in enumerate(order)]
    return holders, draw(st.lists(st.sampled_from("efghi"), min_size=1, max_size=20)), draw(st.none() | st.integers(1, 3))


def plan_of(cluster: tuple[list[Holder], list[str], int | None]) -> LanePlan:
    holders, hosts, links = cluster
    return plan_lanes(holders, hosts, [f"reader {reader}" for reader in range(len(hosts))], links)


@given(clusters(), st.lists(st.integers(0, 60), min_size=5, max_size=5))
def test_each_host_gets_every_bucket_once(cluster, num_buckets) -> None:
    holders, hosts, _ = cluster
    plan, stages = plan_of(cluster), {holder.stage for holder in holders}
    sent = Counter((lane.stage, bucket) for lane in plan.lanes for bucket in lane.buckets(num_buckets[lane.stage]))
    assert sent == Counter((stage, bucket) for stage in stages for bucket in range(num_buckets[stage]))
    assert sorted(reader for readers in plan.hosts for reader in readers) == list(range(len(hosts)))
    for readers in plan.hosts:
        assert len({hosts[reader] for reader in readers}) == 1
    for lane in plan.lanes:  # and so each of them arrives at one reader of every host, from which the others have it
        assert sorted(hosts[first] for first in lane.route) == sorted(set(hosts))
        assert all(plan.first_of(lane, reader) in lane.route for reader in range(len(hosts)))


@given(clusters(), st.integers(0, 60))
def test_lanes_of_a_stage_differ_by_one_bucket_and_keep_their_order(cluster, num_buckets) -> None:
    plan = plan_of(cluster)
    for stage in {lane.stage for lane in plan.lanes}:
        shares = [list(lane.buckets(num_buckets)) for _, lane in plan.of_stage(stage)]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert all(share == sorted(share) for share in shares)


@given(clusters())
def test_senders_hold_what_they_send_and_have_links_for_it(cluster) -> None:
    holders, hosts, links = cluster
    plan, by_rank = plan_of(cluster), {holder.rank: holder for holder in holders}
    assert all(by_rank[lane.sender].stage == lane.stage for lane in plan.lanes)
    assert len({lane.sender for lane in plan.lanes}) == len(plan.lanes)
    num_stages = len({holder.stage for holder in holders})
    assert len(plan.lanes) <= max(MIN_LANES, *Counter(hosts).values(), num_stages)
    for stage in range(num_stages):
        of_host = Counter(by_rank[lane.sender].host for _, lane in plan.of_stage(stage))
        able = Counter(holder.host for holder in holders if holder.stage == stage)
        assert links is None or max(of_host.values()) <= links
        assert all(of_host[a] - of_host[b] <= 1 or of_host[b] == able[b] for a in able for b in able)


@given(clusters())
def test_what_arrives_is_spread_over_the_readers_of_a_host(cluster) -> None:
    plan = plan_of(cluster)
    for readers in plan.hosts:
        firsts = Counter(first for lane in plan.lanes for first in lane.route if first in readers)
        assert max(firsts.values()) - min(firsts[reader] for reader in readers) <= 1


@given(clusters())
def test_the_same_cluster_has_the_same_plan_and_it_travels(cluster) -> None:
    plan = plan_of(cluster)
    assert plan == plan_of(cluster) == LanePlan.from_json(plan.to_json())


def test_a_sender_begins_with_its_host_identity() -> None:
    plan = plan_lanes([Holder(0, 0, "a"), Holder(1, 0, "b")], ["b", "c", "a"], ["x", "y", "z"])
    assert [lane.route for lane in plan.lanes] == [(2, 0, 1), (0, 1, 2)]


@given(clusters(), st.integers(4096, 2**40), st.integers(4096, 2**30), st.sampled_from([2**20, 2**24]))
def test_a_readers_buffers_are_no_larger_than_those_of_one_bucket(cluster, total_bytes, bucket_bytes, least) -> None:
    plan = plan_of(cluster)
    size = lane_bucket_bytes(plan, total_bytes, bucket_bytes, least)
    brought = 1 if any(len(readers) > 1 for readers in plan.hosts) else 0  # by a neighbour
    assert 4096 <= size <= bucket_bytes and (size <= least or size * (plan.most_lanes + brought) <= bucket_bytes)
