"""Requests are accepted once, in order, and survive a kill: Desk, Journal and Reader without an engine."""

from __future__ import annotations

import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor
import asyncio
import json
from pathlib import Path
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from tests.megasync.service.desks import (
    LENGTH,
    client,
    model_body,
    passes_body,
    result_of,
    sample_body,
    session,
    start,
    step_body,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.service.calls import SAMPLE, TRAINING, Reader
from megasync.service.requests import Result, as_json, error
from megasync.service.journal import Journal, Place
from megasync.service.bodies import BadRequestError


def test_clients_of_all_parameters_get_no_adapter() -> None:
    reader = Reader(("Tiny/Model",), vocabulary_size=128, max_tokens=64, frozen_unembed=False, is_full=True, sessions={"s"})
    call = reader.read("create_model", model_body("s", rank=32, train_unembed=True))
    assert call.arguments["spec"]["rank"] == 0
    for flag in ("train_attn", "train_mlp", "train_unembed"):
        with pytest.raises(BadRequestError, match=rf"^lora_config\.{flag} = "):
            reader.read("create_model", model_body("s", **{"train_unembed": True, flag: False}))


def test_a_repeated_request_is_the_same_one(tmp_path: Path) -> None:
    desk = start(tmp_path)
    name = session(desk)
    assert session(desk) == name and session(desk, "other") != name
    first = desk.submit("create_model", model_body(name), "a")
    assert desk.submit("create_model", model_body(name), "a") is first  # by its key
    assert desk.submit("create_model", model_body(name), "b") is first  # by its place
    with pytest.raises(BadRequestError, match="seq_id"):
        desk.submit("create_model", model_body(name, rank=5), "c")
    assert desk.queue.next_work(dict).requests == [first]
    step = desk.submit("optim_step", step_body(f"{name}:train:0", 1), "d")
    assert desk.queue.next_work(dict).requests == [step]


def test_a_killed_service_goes_on_where_its_log_ends(tmp_path: Path) -> None:
    desk = start(tmp_path)
    name = session(desk)
    model = f"{name}:train:0"
    bodies = [("create_model", model_body(name)), *(("optim_step", step_body(model, seq)) for seq in range(1, 5))]
    requests = [desk.submit(kind, body, str(number)) for number, (kind, body) in enumerate(bodies)]
    for request in requests[:3]:
        desk.queue.next_work(dict)
        assert not desk.finish_all([(request, as_json({"number": request.order}))])
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(b'{"request": "cut o')  # the process was killed in the middle of a line
    again = start(tmp_path, done=2)  # the state holds the first two
    repeated = [again.submit(kind, body, str(number)).name for number, (kind, body) in enumerate(bodies)]
    assert repeated == [each.name for each in requests]
    assert json.loads(result_of(again, requests[0].name)) == {"number": 0}
    assert not asyncio.run(again.wait(requests[4].name, 0.1))
    orders = [again.queue.next_work(dict).requests[0] for _ in range(3)]
    assert [each.order for each in orders] == [2, 3, 4]
    assert not again.finish_all([(orders[0], as_json({"number": 2}))])  # done again, to the same result
    (problem,) = again.finish_all([(orders[0], as_json({"number": 7}))])
    assert requests[2].name in problem
    new = again.submit("optim_step", step_body(model, 5), "new")
    assert new.name not in {each.name for each in requests}


def test_a_finished_session_gets_no_models(tmp_path: Path) -> None:
    """They could not be freed: a session is finished once. What it asked for before is done, also after a restart."""
    desk = start(tmp_path)
    model = client(desk)
    name = model.partition(":")[0]
    saved = {"model_id": model, "seq_id": 1, "path": "a", "sampling_session_seq_id": 0}
    desk.submit("save_weights_for_sampler", json.dumps(saved).encode(), "")
    finish = json.dumps({"session_id": name}).encode()
    number = desk.submit("finish_session", finish, "").number
    new = {"session_id": name, "model_seq_id": 1}
    load = {**new, "path": f"tinker://{model}/weights/a", "optimizer": True}
    sample = {**json.loads(sample_body()), "base_model": None, "sampling_session_id": f"{name}:sample:0", "seq_id": 0}
    for each in (desk, start(tmp_path)):
        for kind, body in (
            ("create_model", json.dumps(json.loads(model_body(name)) | new).encode()),
            ("load_weights", json.dumps(load).encode()),
            ("optim_step", step_body(model, 2)),
        ):
            with pytest.raises(BadRequestError, match=rf"^session_id = '{name}': it is finished"):
                each.submit(kind, body, "")
        assert each.submit("finish_session", finish, "").number == number
        assert each.submit("create_model", model_body(name), "").order == 0
        kinds = [each.queue.next_work(dict).requests[0].call.kind for _ in range(3)]
        assert kinds == ["create_model", "save_weights_for_sampler", "finish_session"]
        assert each.submit("asample", json.dumps(sample).encode(), "").call.version == f"tinker://{model}/sampler_weights/a"


def test_an_error_of_the_server_is_not_logged(tmp_path: Path) -> None:
    desk = start(tmp_path)
    name = session(desk)
    given = {"tokens": [1, 2]}
    body = {"prompt": {"chunks": [given]}, "sampling_params": {}, "base_model": "Tiny/Model"}
    sample = desk.submit("asample", json.dumps(body).encode(), "s")
    assert desk.queue.next_work(dict).version == "" and desk.queue.next_work(lambda: {"": 0}).requests == [sample]
    desk.finish_all([(sample, error("the replica died", "server"))])
    assert start(tmp_path).queue.next_work(lambda: {"": 0}).requests[0].name == sample.name
    assert name


WHOLE = {
    "create_model": model_body("S"),
    "forward_backward": passes_body("S:train:0", 1, "gspo", weights=None, logprobs=np.ones(LENGTH), advantages=np.ones(LENGTH)),
    "optim_step": step_body("S:train:0", 1),
    "save_weights": b'{"model_id": "S:train:0", "seq_id": 1, "path": "x"}',
    "load_weights": b'{"model_id": "S:train:0", "seq_id": 1, "path": "tinker://S:train:0/weights/y", "optimizer": true}',
    "delete_checkpoint": b'{"path": "tinker://S:train:0/weights/x"}',
    "asample": sample_body(stop=["a"], seed=3, temperature=0.5),
}
BAD_ARRAYS: dict[str, dict[str, Any]] = {
    "target_tokens": {"target_tokens": np.arange(LENGTH - 1)},
    "weights": {"weights": np.full(LENGTH, np.nan)},
    "advantages": {"advantages": np.ones(LENGTH)},
    "shape": {"target_tokens": np.zeros((LENGTH, 2), np.int64)},
    "vocabulary": {"tokens": [0, 1, 2, 3, 128]},
    "tokens": {"tokens": []},
    "this server has": {"loss": "stable_reinforce"},
    "sequence_ratio_mask": {"loss": "gspo", "logprobs": np.ones(LENGTH), "advantages": np.ones(LENGTH), "weights": None},
    "int64": {"target_tokens": np.arange(LENGTH) + 0.5},
    "loss_fn_inputs.target_tokens has token": {"target_tokens": np.full(LENGTH, 128)},
    "logprobs": {"loss": "ppo"},
}


@pytest.mark.parametrize("named", BAD_ARRAYS)
def test_passes_are_refused_by_name(tmp_path: Path, named: str) -> None:
    desk = start(tmp_path)
    model = client(desk)
    with pytest.raises(BadRequestError, match=named):
        desk.submit("forward_backward", passes_body(model, 1, **BAD_ARRAYS[named]), "")
    assert desk.submit("forward_backward", passes_body(model, 1), "").order == 1


@pytest.mark.parametrize(
    ("kind", "body", "named"),
    [
        ("create_model", b'{"session_id": "x"}', "model_seq_id"),
        ("create_model", model_body("nobody"), "session_id"),
        ("optim_step", step_body("nobody:train:0", 1), "model_id"),
        ("optim_step", step_body("M", -1), "seq_id"),
        ("optim_step", step_body("M", 2**63), "seq_id"),
        ("optim_step", step_body("M", 1, eps=0.0), "eps"),
        ("optim_step", step_body("M", 1, learning_rate=float("nan")), "learning_rate"),
        ("optim_step", step_body("M", 1).replace(b'"seq_id": 1', b'"seq_id": "1"'), "seq_id"),
        ("optim_step", b"\x80\x04.", "body"),  # a pickle
        ("forward_backward", b"\xff\xff", "protobuf"),
        ("save_weights", b'{"model_id": "S:train:0", "seq_id": 1, "path": "../x"}', "path"),
        ("save_weights", b'{"model_id": "M", "seq_id": 1, "path": "' + 101 * b"a" + b'"}', "path"),
        ("save_weights", b'{"model_id": "S:train:0/../../x", "seq_id": 1}', "model_id"),
        ("delete_checkpoint", b'{"path": "tinker://M/weights/.."}', "path"),
        ("delete_checkpoint", b'{"path": "tinker://../weights/x"}', "path"),
        ("load_weights", b'{"model_id": "S:train:0", "seq_id": 1, "path": "tinker://S:train:0/x/y", "optimizer": true}', "path"),
        ("asample", b'{"prompt": {"chunks": []}, "sampling_params": {}, "topk_prompt_logprobs": 30}', "topk_prompt_logprobs"),
        ("asample", b'{"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {}, "base_model": "Other"}', "base_model"),
        ("asample", sample_body(seed=-1), "seed"),
        ("asample", sample_body(seed=2**63), "seed"),
        ("asample", sample_body(stop=[128]), "stop"),
        ("asample", sample_body(stop=""), "stop"),
        ("asample", sample_body(stop=65 * ["a"]), "stop"),
        ("asample", sample_body(top_k=2**31), "top_k"),
        ("asample", sample_body(max_tokens=64), "max_tokens"),
        ("asample", sample_body(temperature=2.5), "temperature"),
        ("asample", 10_000 * b"[", "body"),
    ],
)
def test_bodies_are_refused_by_name(tmp_path: Path, kind: str, body: bytes, named: str) -> None:
    desk = start(tmp_path)
    model = client(desk).encode()
    with pytest.raises(BadRequestError, match=named):
        desk.submit(
            kind, body.replace(b'"M"', b'"' + model + b'"').replace(b"/M/", b"/" + model + b"/").replace(b"S:train:0", model), ""
        )
    assert desk.submit("optim_step", step_body(model.decode(), 1), "").order == 1


def test_the_output_layer_has_no_adapter_unless_the_server_says_so(tmp_path: Path) -> None:
    desk = start(tmp_path)
    name = session(desk)
    with pytest.raises(BadRequestError, match=r"service\.frozen_unembed"):
        desk.submit("create_model", model_body(name, train_unembed=True), "")
    desk.reader.frozen_unembed = True
    desk.submit("create_model", model_body(name, train_unembed=True), "")
    assert desk.queue.next_work(dict).requests[0].call.arguments["spec"]["rank"] == 4


def test_a_client_s_requests_come_in_order(tmp_path: Path) -> None:
    desk = start(tmp_path)
    model, other = client(desk), client(desk)
    requests = [desk.submit("optim_step", step_body(model, seq), "") for seq in (1, 2, 7)]  # numbers may be left out
    with pytest.raises(BadRequestError, match="seq_id = 5"):
        desk.submit("optim_step", step_body(model, 5), "")
    assert desk.submit("optim_step", step_body(model, 2), "") is requests[1]
    assert desk.submit("optim_step", step_body(other, 5), "").order == 5


def test_weights_are_not_deleted_while_they_are_sampled(tmp_path: Path) -> None:
    desk = start(tmp_path)
    path = f"tinker://{client(desk)}/sampler_weights/a"
    body = json.loads(sample_body()) | {"base_model": None, "model_path": path}
    sample = desk.submit("asample", json.dumps(body).encode(), "")
    delete = json.dumps({"path": path}).encode()
    for _ in range(2):  # while it waits, and while it runs
        with pytest.raises(BadRequestError, match="samples of it"):
            desk.submit("delete_checkpoint", delete, "")
        desk.queue.next_work(lambda: {path: 0})
    desk.finish_all([(sample, as_json({}))])
    assert desk.submit("delete_checkpoint", delete, "").order == 1


def test_a_sample_of_a_replica_that_died_waits_again(tmp_path: Path) -> None:
    desk = start(tmp_path)
    first, second = (desk.submit("asample", sample_body(seed=seed), "") for seed in range(2))
    assert desk.queue.next_work(lambda: {"": 0}).requests == [first, second]
    desk.submit("asample", sample_body(seed=2), "")
    desk.queue.give_back(first)
    assert (desk.queue.next_work(dict).kind, desk.queue.next_work(dict).version) == ("sync", "")
    assert [each.number for each in desk.queue.next_work(lambda: {"": 0}).requests] == [2, 0]


def test_what_waits_and_what_was_done_is_in_the_log_alone(tmp_path: Path) -> None:
    desk = start(tmp_path)
    model = client(desk)
    requests = [desk.submit("forward_backward", passes_body(model, seq), "") for seq in range(1, 50)]
    desk.queue.next_work(dict)
    assert all(not each.call.arguments for each in requests)
    for request in requests:
        (taken,) = desk.queue.next_work(dict).requests
        assert len(taken.call.arguments["data"][0].tokens) == LENGTH
        desk.finish_all([(request, as_json({"number": request.number}))])
    assert all(not each.call.arguments and isinstance(each.result, Place) for each in requests)
    found = [result_of(desk, each.name) for each in requests]
    assert [json.loads(each)["number"] for each in found] == [each.number for each in requests]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 49151, 49152, 49153, 200_000])
def test_a_result_is_read_in_pieces(tmp_path: Path, size: int) -> None:
    desk = start(tmp_path)
    (request,) = (desk.submit("create_model", model_body(session(desk)), "") for _ in range(1))
    body = np.random.default_rng(size).bytes(size)
    desk.finish_all([(request, Result("protobuf", body))])
    assert desk.result(request.name)[0] == "protobuf"
    assert result_of(desk, request.name) == body


@settings(max_examples=300, deadline=None)
@given(kind=st.sampled_from((*TRAINING, SAMPLE)), data=st.data())
def test_any_bytes_are_refused_or_accepted(kind: str, data: st.DataObject) -> None:
    """Whole bodies with some bytes changed, cut out or put in, and bytes that are none."""
    reader = Reader(("Tiny/Model",), vocabulary_size=128, max_tokens=64, frozen_unembed=True)
    reader.sessions.add("S")
    reader.models.add("S:train:0")
    body = bytearray(WHOLE.get(kind, b"{}"))
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(body)))
        body[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    with suppress(BadRequestError):
        reader.read(kind, bytes(body))


def test_an_error_of_a_thread_ends_the_main_one(tmp_path: Path) -> None:
    desk = start(tmp_path)
    desk.queue.fail(OSError("no space is left"))
    with pytest.raises(OSError, match="no space"):
        desk.queue.next_work(dict)


class FullDisk:
    """A file that takes some bytes and then none."""

    def __init__(self, file: Any) -> None:
        self._file, self._is_full = file, False

    def write(self, data: memoryview) -> int:
        if self._is_full:
            raise OSError(errno.ENOSPC, "no space")
        self._is_full = True
        return int(self._file.write(data[:20]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_a_line_that_the_disk_did_not_take_leaves_the_log_whole(tmp_path: Path) -> None:
    desk = start(tmp_path)
    model = desk.submit("create_model", model_body(session(desk)), "").call.scope
    journal = desk._journal
    file, journal._file = journal._file, FullDisk(journal._file)
    with pytest.raises(OSError, match="no space"):
        desk.submit("optim_step", step_body(model, 1), "a")
    journal._file = file
    accepted = desk.submit("optim_step", step_body(model, 1), "a")  # the client tries again
    desk.sync(accepted)
    journal.close()
    again = start(tmp_path)
    assert again.submit("optim_step", step_body(model, 1), "a").name == accepted.name


def test_threads_share_writes_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is written, others wait; the next write is of all of them."""
    journal, begun, counts = Journal(tmp_path / "log.jsonl"), threading.Event(), list[int]()

    def slow(_: int) -> None:
        counts.append(1)
        begun.set()
        time.sleep(0.2)

    monkeypatch.setattr("megasync.service.journal.os.fsync", slow)
    places = [journal.append({"request": "0"})]
    with ThreadPoolExecutor(9) as threads:
        first = threads.submit(journal.sync, places[0])
        begun.wait()
        places += [journal.append({"request": str(number)}) for number in range(1, 9)]
        list(threads.map(journal.sync, places[1:]))
        first.result()
    assert len(counts) == 2
