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
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.generation import NO_ADAPTER
from megasync.config.service_section import ServiceConfig
from megasync.service import wire
from megasync.service.calls import SAMPLE, TRAINING, Reader
from megasync.service.desk import Desk, TooBusyError
from megasync.service.requests import Request, Result, as_json, error
from megasync.service.journal import Journal, Place
from megasync.service.bodies import BadRequestError

LENGTH = 5


def start(folder: Path, done: int = 0, num_slots: int = 1, gather_seconds: float = 0.0, **config: Any) -> Desk:
    reader = Reader(("Tiny/Model",), vocabulary_size=128, max_tokens=64, frozen_unembed=False)
    return Desk(ServiceConfig(**config), Journal(folder / "log.jsonl"), reader, done, num_slots, gather_seconds)


def test_clients_of_all_parameters_get_no_adapter() -> None:
    reader = Reader(("Tiny/Model",), vocabulary_size=128, max_tokens=64, frozen_unembed=False, is_full=True, sessions={"s"})
    call = reader.read("create_model", model_body("s", rank=32, train_unembed=True))
    assert call.arguments["spec"]["rank"] == 0
    for flag in ("train_attn", "train_mlp", "train_unembed"):
        with pytest.raises(BadRequestError, match=rf"^lora_config\.{flag} = "):
            reader.read("create_model", model_body("s", **{"train_unembed": True, flag: False}))


def result_of(desk: Desk, name: str) -> bytes:
    _, num_bytes, pieces = desk.result(name)
    body = b"".join(pieces)
    assert len(body) == num_bytes
    return body


def session(desk: Desk, key: str = "k") -> str:
    return desk.submit("create_session", b"{}", key).name


def model_body(name: str, **lora: Any) -> bytes:
    given = {"rank": 4, "train_unembed": False, **lora}
    return json.dumps({"session_id": name, "model_seq_id": 0, "base_model": "Tiny/Model", "lora_config": given}).encode()


def step_body(model: str, seq: int, **adam: float) -> bytes:
    return json.dumps({"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 0.1, **adam}}).encode()


def sample_body(**params: Any) -> bytes:
    body = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": params, "base_model": "Tiny/Model"}
    return json.dumps(body).encode()


def passes_body(model: str, seq: int, loss: str = "cross_entropy", **arrays: Any) -> bytes:
    message = wire.MESSAGES["ForwardBackwardRequest"](model_id=model, seq_id=seq, loss_fn=loss)
    tokens = arrays.pop("tokens", np.arange(LENGTH))
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray(tokens, np.int32).tobytes()
    arrays = {"target_tokens": np.arange(LENGTH), "weights": np.ones(LENGTH), **arrays}
    for name, values in arrays.items():
        if values is None:
            continue
        array = np.asarray(values)
        array = array.astype(np.int64 if array.dtype.kind == "i" else np.float32)
        tensor = datum.loss_fn_inputs[name]
        tensor.dense, tensor.dtype = array.tobytes(), wire.INT64 if array.dtype.kind == "i" else wire.FLOAT32
        tensor.shape.extend(array.shape)
    return bytes(message.SerializeToString())


def test_a_repeated_request_is_the_same_one(tmp_path: Path) -> None:
    desk = start(tmp_path)
    name = session(desk)
    assert session(desk) == name and session(desk, "other") != name
    first = desk.submit("create_model", model_body(name), "a")
    assert desk.submit("create_model", model_body(name), "a") is first  # by its key
    assert desk.submit("create_model", model_body(name), "b") is first  # by its place
    with pytest.raises(BadRequestError, match="seq_id"):
        desk.submit("create_model", model_body(name, rank=5), "c")
    assert desk.queue.next_work({}).requests == [first]
    step = desk.submit("optim_step", step_body(f"{name}:train:0", 1), "d")
    assert desk.queue.next_work({}).requests == [step]


def test_a_killed_service_goes_on_where_its_log_ends(tmp_path: Path) -> None:
    desk = start(tmp_path)
    name = session(desk)
    model = f"{name}:train:0"
    bodies = [("create_model", model_body(name)), *(("optim_step", step_body(model, seq)) for seq in range(1, 5))]
    requests = [desk.submit(kind, body, str(number)) for number, (kind, body) in enumerate(bodies)]
    for request in requests[:3]:
        desk.queue.next_work({})
        assert not desk.finish_all([(request, as_json({"number": request.order}))])
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(b'{"request": "cut o')  # the process was killed in the middle of a line
    again = start(tmp_path, done=2)  # the state holds the first two
    repeated = [again.submit(kind, body, str(number)).name for number, (kind, body) in enumerate(bodies)]
    assert repeated == [each.name for each in requests]
    assert json.loads(result_of(again, requests[0].name)) == {"number": 0}
    assert not asyncio.run(again.wait(requests[4].name, 0.1))
    orders = [again.queue.next_work({}).requests[0] for _ in range(3)]
    assert [each.order for each in orders] == [2, 3, 4]
    assert not again.finish_all([(orders[0], as_json({"number": 2}))])  # done again, to the same result
    (problem,) = again.finish_all([(orders[0], as_json({"number": 7}))])
    assert requests[2].name in problem
    new = again.submit("optim_step", step_body(model, 5), "new")
    assert new.name not in {each.name for each in requests}


def test_an_error_of_the_server_is_not_logged(tmp_path: Path) -> None:
    desk = start(tmp_path)
    name = session(desk)
    given = {"tokens": [1, 2]}
    body = {"prompt": {"chunks": [given]}, "sampling_params": {}, "base_model": "Tiny/Model"}
    sample = desk.submit("asample", json.dumps(body).encode(), "s")
    assert desk.queue.next_work({}).version == "" and desk.queue.next_work({"": 0}).requests == [sample]
    desk.finish_all([(sample, error("the replica died", "server"))])
    assert start(tmp_path).queue.next_work({"": 0}).requests[0].name == sample.name
    assert name


def test_samples_and_training_are_in_the_order_of_arrival(tmp_path: Path) -> None:
    desk = start(tmp_path, max_waiting=3)
    name = session(desk)
    body = json.dumps({"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {}, "base_model": "Tiny/Model"}).encode()
    desk.submit("create_model", model_body(name), "")
    desk.submit("asample", body, "")
    desk.submit("optim_step", step_body(f"{name}:train:0", 1), "")
    with pytest.raises(TooBusyError, match=r"service\.max_waiting"):
        desk.submit("asample", body, "")
    assert [desk.queue.next_work({"x": 0}).kind, desk.queue.next_work({"x": 0}).kind] == ["train", "sync"]
    assert desk.queue.next_work({"": 0}).kind == "sample"
    assert desk.queue.next_work({"": 0}).kind == "train"


def client(desk: Desk) -> str:
    """The name of a model of a new session."""
    name = session(desk, f"key {len(desk.reader.sessions)}")
    return desk.submit("create_model", model_body(name), "").call.scope


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
    assert desk.queue.next_work({}).requests[0].call.arguments["spec"]["rank"] == 4


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
        desk.queue.next_work({path: 0})
    desk.finish_all([(sample, as_json({}))])
    assert desk.submit("delete_checkpoint", delete, "").order == 1


def test_a_sample_of_a_replica_that_died_waits_again(tmp_path: Path) -> None:
    desk = start(tmp_path)
    first, second = (desk.submit("asample", sample_body(seed=seed), "") for seed in range(2))
    assert desk.queue.next_work({"": 0}).requests == [first, second]
    desk.submit("asample", sample_body(seed=2), "")
    desk.queue.give_back(first)
    assert (desk.queue.next_work({}).kind, desk.queue.next_work({}).version) == ("sync", "")
    assert [each.number for each in desk.queue.next_work({"": 0}).requests] == [2, 0]


def test_what_waits_and_what_was_done_is_in_the_log_alone(tmp_path: Path) -> None:
    desk = start(tmp_path)
    model = client(desk)
    requests = [desk.submit("forward_backward", passes_body(model, seq), "") for seq in range(1, 50)]
    desk.queue.next_work({})
    assert all(not each.call.arguments for each in requests)
    for request in requests:
        (taken,) = desk.queue.next_work({}).requests
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


def versions_sampled(desk: Desk, *names: str) -> list[Any]:
    """A sample of each is accepted."""
    own = [json.loads(sample_body(seed=number)) | {"base_model": None, "model_path": name} for number, name in enumerate(names)]
    return [desk.submit("asample", json.dumps(each).encode(), "") for each in own]


def test_samples_of_versions_in_slots_run_beside_each_other(tmp_path: Path) -> None:
    """A version comes into an empty slot, else into that of the one which was sampled least recently and is idle."""
    desk = start(tmp_path, num_slots=3)
    model = client(desk)
    desk.queue.next_work({})
    a, b, c, d = (f"tinker://{model}/sampler_weights/{name}" for name in "abcd")
    present: dict[str, int] = {"": NO_ADAPTER}

    def bring() -> str:
        work = desk.queue.next_work(present)
        assert work.kind == "sync"
        for version in [each for each, slot in present.items() if slot == work.slot]:
            del present[version]
        present[work.version] = work.slot
        return work.version

    requests = versions_sampled(desk, a, b, c)
    for request, version in zip(requests, (a, b, c), strict=True):
        assert bring() == version
        assert desk.queue.next_work(present).requests == [request]
    assert sorted(present.values()) == [NO_ADAPTER, 0, 1, 2]
    for request in (requests[1], requests[2]):
        desk.finish_all([(request, as_json({}))])
    versions_sampled(desk, d)
    assert bring() == d and b not in present and a in present, "a is older, but a sample of it runs"
    (again,) = versions_sampled(desk, c)
    desk.queue.next_work(present)
    desk.finish_all([(again, as_json({}))])
    desk.finish_all([(requests[0], as_json({}))])
    versions_sampled(desk, b)
    assert bring() == b and a not in present


@settings(max_examples=30, deadline=None)
@given(num_slots=st.integers(1, 4), versions=st.lists(st.integers(0, 6), min_size=1, max_size=30))
def test_no_two_versions_share_a_slot(tmp_path_factory: pytest.TempPathFactory, num_slots: int, versions: list[int]) -> None:
    desk = start(tmp_path_factory.mktemp("desk"), num_slots=num_slots)
    model = client(desk)
    desk.queue.next_work({})
    present: dict[str, int] = {}
    for version in versions:
        (request,) = versions_sampled(desk, f"tinker://{model}/sampler_weights/{version}")
        work = desk.queue.next_work(present)
        if work.kind == "sync":
            assert request.call.version not in present and 0 <= work.slot < num_slots
            assert work.slot not in present.values() or len(present) == num_slots, "empty ones go first"
            present = {each: slot for each, slot in present.items() if slot != work.slot} | {work.version: work.slot}
            work = desk.queue.next_work(present)
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
        found.append([requests.index(each) for each in desk.queue.next_work({}).requests])
    return found


def test_passes_of_clients_that_wait_share_one(tmp_path: Path) -> None:
    desk = start(tmp_path, checkpoint_every=0, shared_clients=3)
    a, b, c, d = (client(desk) for _ in range(4))
    for _ in range(4):
        desk.queue.next_work({})
    passes, step = "forward_backward", "optim_step"
    found = passes_that_share(desk, (passes, a), (step, a), (passes, b), (step, c), (passes, c), (passes, d), (passes, a))
    assert found == [[0, 2, 5], [1], [3], [4, 6]], "each client's own are in order"
    found = passes_that_share(desk, (passes, a), (passes, b), (passes, c), (passes, d))
    assert found == [[0, 1, 2], [3]], "as many as may"
    found = passes_that_share(desk, (passes, a), ("save_weights", b), (passes, c))
    assert found == [[0], [1], [2]], "it may overwrite weights"


def test_a_pass_waits_for_clients_that_had_one_lately(tmp_path: Path) -> None:
    """For an hour here, as long as one of them is missing. Samples do not wait."""
    desk = start(tmp_path, checkpoint_every=0, gather_seconds=3600.0)
    models = [client(desk) for _ in range(3)]
    for _ in models:
        desk.queue.next_work({})

    def submit(number: int, seq: int) -> Request:
        return desk.submit("forward_backward", passes_body(models[number], seq), "")

    first = submit(0, 10)
    assert desk.queue.next_work({}).requests == [first], "nobody else was here"
    found, waiting = list[Any](), [submit(1, 11)]
    thread = threading.Thread(target=lambda: found.append(desk.queue.next_work({}).requests))
    thread.start()
    waiting += [submit(2, 12), submit(0, 13)]
    thread.join(60)
    assert found == [waiting]
    submit(1, 14)
    sample = desk.submit("asample", sample_body(), "s")
    assert desk.queue.next_work({"": 0}).requests == [sample]


@settings(max_examples=50, deadline=None)
@given(every=st.integers(1, 7), kinds=st.lists(st.tuples(st.sampled_from(["forward_backward", "optim_step"]), st.integers(0, 3))))
def test_checkpoints_hold_the_first_requests(
    tmp_path_factory: pytest.TempPathFactory, every: int, kinds: list[tuple[str, int]]
) -> None:
    desk = start(tmp_path_factory.mktemp("desk"), checkpoint_every=every)
    models = [client(desk) for _ in range(4)]
    for _ in models:
        desk.queue.next_work({})
    found = passes_that_share(desk, *((kind, models[number]) for kind, number in kinds))
    done = list[int]()
    for group in found:
        done += group
        if (len(models) + len(done)) % every == 0:
            assert sorted(done) == list(range(len(done)))
    for model in range(4):
        own = [place for place in done if kinds[place][1] == model]
        assert own == sorted(own)


def test_an_error_of_a_thread_ends_the_main_one(tmp_path: Path) -> None:
    desk = start(tmp_path)
    desk.queue.fail(OSError("no space is left"))
    with pytest.raises(OSError, match="no space"):
        desk.queue.next_work({})


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
