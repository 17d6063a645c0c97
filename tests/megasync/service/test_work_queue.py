"""Which request is next: order, versions in slots, passes that share, checkpoints."""

from __future__ import annotations

import threading
import json
from pathlib import Path
from typing import Any

import pytest
from tests.megasync.service.desks import client, model_body, passes_body, sample_body, session, start, step_body
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.generation import NO_ADAPTER
from megasync.service.desk import Desk, TooBusyError
from megasync.service.requests import Request, as_json


def test_samples_and_training_are_in_the_order_of_arrival(tmp_path: Path) -> None:
    desk = start(tmp_path, max_waiting=3)
    name = session(desk)
    body = json.dumps({"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {}, "base_model": "Tiny/Model"}).encode()
    desk.submit("create_model", model_body(name), "")
    desk.submit("asample", body, "")
    desk.submit("optim_step", step_body(f"{name}:train:0", 1), "")
    with pytest.raises(TooBusyError, match=r"service\.max_waiting"):
        desk.submit("asample", body, "")
    assert [desk.queue.next_work(lambda: {"x": 0}).kind, desk.queue.next_work(lambda: {"x": 0}).kind] == ["train", "sync"]
    assert desk.queue.next_work(lambda: {"": 0}).kind == "sample"
    assert desk.queue.next_work(lambda: {"": 0}).kind == "train"


def versions_sampled(desk: Desk, *names: str) -> list[Any]:
    """A sample of each is accepted."""
    own = [json.loads(sample_body(seed=number)) | {"base_model": None, "model_path": name} for number, name in enumerate(names)]
    return [desk.submit("asample", json.dumps(each).encode(), "") for each in own]


def test_samples_of_versions_in_slots_run_beside_each_other(tmp_path: Path) -> None:
    """A version comes into an empty slot, else into that of the one which was sampled least recently and is idle."""
    desk = start(tmp_path, num_slots=3)
    model = client(desk)
    desk.queue.next_work(dict)
    a, b, c, d = (f"tinker://{model}/sampler_weights/{name}" for name in "abcd")
    present: dict[str, int] = {"": NO_ADAPTER}

    def bring() -> str:
        work = desk.queue.next_work(lambda: present)
        assert work.kind == "sync"
        for version in [each for each, slot in present.items() if slot == work.slot]:
            del present[version]
        present[work.version] = work.slot
        return work.version

    requests = versions_sampled(desk, a, b, c)
    for request, version in zip(requests, (a, b, c), strict=True):
        assert bring() == version
        assert desk.queue.next_work(lambda: present).requests == [request]
    assert sorted(present.values()) == [NO_ADAPTER, 0, 1, 2]
    for request in (requests[1], requests[2]):
        desk.finish_all([(request, as_json({}))])
    versions_sampled(desk, d)
    assert bring() == d and b not in present and a in present, "a is older, but a sample of it runs"
    (again,) = versions_sampled(desk, c)
    desk.queue.next_work(lambda: present)
    desk.finish_all([(again, as_json({}))])
    desk.finish_all([(requests[0], as_json({}))])
    versions_sampled(desk, b)
    assert bring() == b and a not in present


@settings(max_examples=30, deadline=None)
@given(num_slots=st.integers(1, 4), versions=st.lists(st.integers(0, 6), min_size=1, max_size=30))
def test_no_two_versions_share_a_slot(tmp_path_factory: pytest.TempPathFactory, num_slots: int, versions: list[int]) -> None:
    desk = start(tmp_path_factory.mktemp("desk"), num_slots=num_slots)
    model = client(desk)
    desk.queue.next_work(dict)
    present: dict[str, int] = {}
    for version in versions:
        (request,) = versions_sampled(desk, f"tinker://{model}/sampler_weights/{version}")
        work = desk.queue.next_work(lambda present=present: present)
        if work.kind == "sync":
            assert request.call.version not in present and 0 <= work.slot < num_slots
            assert work.slot not in present.values() or len(present) == num_slots, "empty ones go first"
            present = {each: slot for each, slot in present.items() if slot != work.slot} | {work.version: work.slot}
            work = desk.queue.next_work(lambda present=present: present)
        assert work.requests == [request]
        desk.finish_all([(request, as_json({}))])


def passes_that_share(desk: Desk, *accepted: tuple[str, str]) -> list[list[int]]:
    """Of the requests, kind and model, those that are done at the same time, by their place in the list."""
    requests = []
    for number, (kind, model) in enumerate(accepted, 10 + desk._order):
        given = json.dumps({"model_id": model, "seq_id": number, "path": f"a{number}"}).encode()
        bodies = {"forward_backward": passes_body(model, number), "optim_step": step_body(model, number)}
        requests.append(desk.submit(kind, bodies.get(kind, given), ""))
    found = []
    while sum(map(len, found)) < len(requests):
        found.append([requests.index(each) for each in desk.queue.next_work(dict).requests])
    return found


def test_passes_of_clients_that_wait_share_one(tmp_path: Path) -> None:
    desk = start(tmp_path, checkpoint_every=0, shared_clients=3)
    a, b, c, d = (client(desk) for _ in range(4))
    for _ in range(4):
        desk.queue.next_work(dict)
    passes, step = "forward_backward", "optim_step"
    found = passes_that_share(desk, (passes, a), (step, a), (passes, b), (step, c), (passes, c), (passes, d), (passes, a))
    assert found == [[0, 2, 5], [1], [3], [4, 6]], "each client's own are in order"
    found = passes_that_share(desk, (passes, a), (passes, b), (passes, c), (passes, d))
    assert found == [[0, 1, 2], [3]], "as many as may"
    found = passes_that_share(desk, (passes, a), ("save_weights", b), (passes, c))
    assert found == [[0], [1], [2]], "it may overwrite weights"


def test_a_pass_waits_for_clients_that_had_one_lately(tmp_path: Path) -> None:
    """For an hour here, as long as one of them is missing. Samples do not wait."""
    desk = start(tmp_path, checkpoint_every=0, wait_seconds=3600.0)
    models = [client(desk) for _ in range(3)]
    for _ in models:
        desk.queue.next_work(dict)

    def submit(number: int, seq: int) -> Request:
        return desk.submit("forward_backward", passes_body(models[number], seq), "")

    first = submit(0, 10)
    assert desk.queue.next_work(dict).requests == [first], "nobody else was here"
    found, waiting = list[Any](), [submit(1, 11)]
    thread = threading.Thread(target=lambda: found.append(desk.queue.next_work(dict).requests))
    thread.start()
    waiting += [submit(2, 12), submit(0, 13)]
    thread.join(60)
    assert found == [waiting]
    submit(1, 14)
    sample = desk.submit("asample", sample_body(), "s")
    assert desk.queue.next_work(lambda: {"": 0}).requests == [sample]


def test_a_sample_that_comes_back_is_not_sent_to_the_replica_that_was_lost_meanwhile(tmp_path: Path) -> None:
    desk = start(tmp_path)
    present, found = {"": 0}, list[Any]()
    sample = desk.submit("asample", sample_body(), "s")
    assert desk.queue.next_work(lambda: present).requests == [sample]
    thread = threading.Thread(target=lambda: found.append(desk.queue.next_work(lambda: present)))
    thread.start()
    present.clear()  # as Sampling does before it gives the request back
    desk.queue.give_back(sample)
    thread.join(60)
    assert [work.kind for work in found] == ["sync"]


@settings(max_examples=50, deadline=None)
@given(every=st.integers(1, 7), kinds=st.lists(st.tuples(st.sampled_from(["forward_backward", "optim_step"]), st.integers(0, 3))))
def test_checkpoints_hold_the_first_requests(
    tmp_path_factory: pytest.TempPathFactory, every: int, kinds: list[tuple[str, int]]
) -> None:
    desk = start(tmp_path_factory.mktemp("desk"), checkpoint_every=every)
    models = [client(desk) for _ in range(4)]
    for _ in models:
        desk.queue.next_work(dict)
    found = passes_that_share(desk, *((kind, models[number]) for kind, number in kinds))
    done = list[int]()
    for group in found:
        done += group
        if (len(models) + len(done)) % every == 0:
            assert sorted(done) == list(range(len(done)))
    for model in range(4):
        own = [place for place in done if kinds[place][1] == model]
        assert own == sorted(own)
