"""A Desk without an engine, and bodies of requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from megasync.config.service_section import ServiceConfig
from megasync.service import wire
from megasync.service.calls import Reader
from megasync.service.desk import Desk
from megasync.service.journal import Journal

LENGTH = 5


def start(folder: Path, done: int = 0, num_slots: int = 1, wait_seconds: float = 0.0, **config: Any) -> Desk:
    reader = Reader(("Tiny/Model",), vocabulary_size=128, max_tokens=64, frozen_unembed=False)
    return Desk(ServiceConfig(**config), Journal(folder / "log.jsonl"), reader, done, num_slots, wait_seconds)


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


def client(desk: Desk) -> str:
    """The name of a model of a new session."""
    name = session(desk, f"key {len(desk.reader.sessions)}")
    return desk.submit("create_model", model_body(name), "").call.scope
