"""Requests are accepted once, in order, and survive a kill: Desk, Journal and Reader without an engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megasync.config.service_section import ServiceConfig
from megasync.service import wire
from megasync.service.calls import Reader
from megasync.service.desk import Desk, TooBusyError, as_json, error
from megasync.service.journal import Journal
from megasync.service.wire import BadRequestError

LENGTH = 5


def start(folder: Path, done: int = 0, **config: Any) -> Desk:
    reader = Reader(("Tiny/Model",), vocabulary_size=128, max_tokens=64, frozen_unembed=False)
    return Desk(ServiceConfig(**config), Journal(folder / "log.jsonl"), reader, done)


def session(desk: Desk, key: str = "k") -> str:
    return desk.submit("create_session", b"{}", key).name


def model_body(name: str, **lora: Any) -> bytes:
    given = {"rank": 4, "train_unembed": False, **lora}
    return json.dumps({"session_id": name, "model_seq_id": 0, "base_model": "Tiny/Model", "lora_config": given}).encode()


def step_body(model: str, seq: int, **adam: float) -> bytes:
    return json.dumps({"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 0.1, **adam}}).encode()


def passes_body(model: str, seq: int, loss: str = "cross_entropy", **arrays: Any) -> bytes:
    message = wire.MESSAGES["ForwardBackwardRequest"](model_id=model, seq_id=seq, loss_fn=loss)
    tokens = arrays.pop("tokens", np.arange(LENGTH))
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray(tokens, np.int32).tobytes()
    arrays = {"target_tokens": np.arange(LENGTH), "weights": np.ones(LENGTH), **arrays}
    for name, values in arrays.items():
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
    assert desk.next_work(None).requests == [first]
    step = desk.submit("optim_step", step_body(f"{name}:train:0", 1), "d")
    assert desk.next_work(None).requests == [step]


def test_a_killed_service_goes_on_where_its_log_ends(tmp_path: Path) -> None:
    desk = start(tmp_path)
    name = session(desk)
    model = f"{name}:train:0"
    bodies = [("create_model", model_body(name)), *(("optim_step", step_body(model, seq)) for seq in range(1, 5))]
    requests = [desk.submit(kind, body, str(number)) for number, (kind, body) in enumerate(bodies)]
    for request in requests[:3]:
        desk.next_work(None)
        assert not desk.finish(request, as_json({"number": request.order}))
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(b'{"request": "cut o')  # the process was killed in the middle of a line
    again = start(tmp_path, done=2)  # the state holds the first two
    repeated = [again.submit(kind, body, str(number)).name for number, (kind, body) in enumerate(bodies)]
    assert repeated == [each.name for each in requests]
    result = asyncio.run(again.wait(requests[0].name, 0.1))
    assert result is not None and json.loads(result.body) == {"number": 0}
    assert asyncio.run(again.wait(requests[4].name, 0.1)) is None
    orders = [again.next_work(None).requests[0] for _ in range(3)]
    assert [each.order for each in orders] == [2, 3, 4]
    assert not again.finish(orders[0], as_json({"number": 2}))  # done again, to the same result
    assert requests[2].name in again.finish(orders[0], as_json({"number": 7}))
    new = again.submit("optim_step", step_body(model, 5), "new")
    assert new.name not in {each.name for each in requests}


def test_an_error_of_the_server_is_not_logged(tmp_path: Path) -> None:
    desk = start(tmp_path)
    name = session(desk)
    given = {"tokens": [1, 2]}
    body = {"prompt": {"chunks": [given]}, "sampling_params": {}, "base_model": "Tiny/Model"}
    sample = desk.submit("asample", json.dumps(body).encode(), "s")
    assert desk.next_work(None).version == "" and desk.next_work("").requests == [sample]
    desk.finish(sample, error("the replica died", "server"))
    assert start(tmp_path).next_work("").requests[0].name == sample.name
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
    assert [desk.next_work("x").kind, desk.next_work("x").kind] == ["train", "sync"]
    assert desk.next_work("").kind == "sample"
    assert desk.next_work("").kind == "train"


BAD_ARRAYS: dict[str, dict[str, Any]] = {
    "target_tokens": {"target_tokens": np.arange(LENGTH - 1)},
    "weights": {"weights": np.full(LENGTH, np.nan)},
    "advantages": {"advantages": np.ones(LENGTH)},
    "shape": {"target_tokens": np.zeros((LENGTH, 2), np.int64)},
    "vocabulary": {"tokens": [0, 1, 2, 3, 128]},
    "tokens": {"tokens": []},
    "this server has": {"loss": "gspo"},
    "logprobs": {"loss": "ppo"},
}


@pytest.mark.parametrize("named", BAD_ARRAYS)
def test_passes_are_refused_by_name(tmp_path: Path, named: str) -> None:
    desk = start(tmp_path)
    name = session(desk)
    with pytest.raises(BadRequestError, match=named):
        desk.submit("forward_backward", passes_body(f"{name}:train:0", 1, **BAD_ARRAYS[named]), "")
    assert desk.submit("forward_backward", passes_body(f"{name}:train:0", 1), "").order == 0


@pytest.mark.parametrize(
    ("kind", "body", "named"),
    [
        ("create_model", b'{"session_id": "x"}', "model_seq_id"),
        ("create_model", model_body("nobody"), "session_id"),
        ("optim_step", step_body("nobody:train:0", 1), "session_id"),
        ("optim_step", b"\x80\x04.", "body"),  # a pickle
        ("forward_backward", b"\xff\xff", "protobuf"),
        ("save_weights", b'{"model_id": "S:train:0", "seq_id": 1, "path": "../x"}', "path"),
        ("load_weights", b'{"model_id": "S:train:0", "seq_id": 1, "path": "tinker://S:train:0/x/y", "optimizer": true}', "path"),
        ("asample", b'{"prompt": {"chunks": []}, "sampling_params": {}, "topk_prompt_logprobs": 3}', "topk_prompt_logprobs"),
        ("asample", b'{"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {}, "base_model": "Other"}', "base_model"),
    ],
)
def test_bodies_are_refused_by_name(tmp_path: Path, kind: str, body: bytes, named: str) -> None:
    desk = start(tmp_path)
    with pytest.raises(BadRequestError, match=named):
        desk.submit(kind, body.replace(b"S:train", session(desk).encode() + b":train"), "")


def test_the_output_layer_has_no_adapter_unless_the_server_says_so(tmp_path: Path) -> None:
    desk = start(tmp_path)
    name = session(desk)
    with pytest.raises(BadRequestError, match=r"service\.frozen_unembed"):
        desk.submit("create_model", model_body(name, train_unembed=True), "")
    desk.reader.frozen_unembed = True
    assert desk.submit("create_model", model_body(name, train_unembed=True), "").call.arguments["spec"]["rank"] == 4
