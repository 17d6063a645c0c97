"""Bad clients against the HTTP server: each gets an error by name, others are served beside it, and memory is bounded.

Without an engine: requests are finished here as the main thread would.
"""

from __future__ import annotations

import json
import resource
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.adapters import AdapterSpec
from megasync.config.service_section import ServiceConfig
from megasync.service.calls import Reader
from megasync.service.catalog import Catalog
from megasync.service.desk import Desk
from megasync.service.requests import Result, as_json
from megasync.service.http import Server
from megasync.service.queries import PREFIX
from megasync.service.usage import Usage
from megasync.service.journal import Journal
from tests.support.rewards import until

KEY = "tml-mine"
BODY_BYTES = 2**20


class Running:
    """A server whose training requests are all done at once."""

    def __init__(self, folder: Path, key: str = "", result: Result | None = None, **config: Any) -> None:
        reader = Reader(("Tiny/Model",), vocabulary_size=128, max_tokens=64, frozen_unembed=True)
        settings = ServiceConfig(max_body_bytes=BODY_BYTES, **config)
        self.journal = Journal(folder / "log.jsonl")
        self.desk = Desk(settings, self.journal, reader, 0)
        self.specs: dict[str, AdapterSpec] = {}
        self.done: list[tuple[str, str]] = []
        self.lines: list[tuple[int, dict[str, Any]]] = []
        self.usage = Usage(self.desk, lambda: {"": 0}, lambda step, values: self.lines.append((step, values)))
        catalog = Catalog(folder / "models", "Tiny/Model", "model", self.specs)
        self.server = Server(settings, self.desk, catalog, self.usage, key, 64)
        self.port, self.key, self.result = self.server.start("127.0.0.1", 0), key, result
        self.worker = threading.Thread(target=self._work)
        self.worker.start()

    def _work(self) -> None:
        while (work := self.desk.queue.next_work(lambda: {"": 0})).kind != "end":
            for request in work.requests:
                self.done.append((request.call.kind, request.call.scope))
                self.desk.finish_all([(request, self.result or as_json({"number": request.number}))])

    def close(self) -> None:
        self.desk.queue.end()
        self.worker.join()
        self.server.close()
        self.journal.close()

    def send(self, path: str, body: Any = None, method: str = "", **headers: str) -> tuple[int, bytes]:
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        sent = {"X-API-Key": self.key, **{name.replace("_", "-"): value for name, value in headers.items()}}
        url = path if path.startswith("http") else f"http://127.0.0.1:{self.port}{PREFIX}/{path}"
        request = urllib.request.Request(url, data, sent, method=method or ("GET" if data is None else "POST"))
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def model(self) -> str:
        session = json.loads(self.send("create_session", {"tags": [str(time.monotonic())]})[1])["session_id"]
        fields = {"session_id": session, "model_seq_id": 0, "base_model": "Tiny/Model", "lora_config": {"rank": 4}}
        return str(json.loads(self.send("create_model", fields)[1])["model_id"])

    def step(self, model: str, seq: int) -> str:
        fields = {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 0.1}}
        return str(json.loads(self.send("optim_step", fields)[1])["request_id"])

    def fetch(self, name: str) -> tuple[int, Any]:
        status, body = self.send("retrieve_future", {"request_id": name})
        return status, json.loads(body)

    def socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(**options: Any) -> Running:
        started.append(Running(tmp_path, **options))
        return started[-1]

    yield start
    for each in started:
        each.close()


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_a_key_and_no_web_pages(run: Callable[..., Running]) -> None:
    running = run(key=KEY)
    assert running.send("healthz")[0] == 200
    for wrong in ("", "tml-other", KEY[:-1]):
        status, answer = running.send("create_session", {}, X_API_Key=wrong)
        assert status == 401 and b"TINKER_API_KEY" in answer
    assert running.send("healthz", Origin="https://example.com")[0] == 403
    assert running.send("billing/usage")[0] == 404
    assert b"not here" in running.send("billing/usage")[1]


def test_a_body_of_a_gigabyte_is_not_read(run: Callable[..., Running]) -> None:
    running, before = run(), peak_bytes()
    for header in (f"Content-Length: {2**30}", "Transfer-Encoding: chunked"):
        with running.socket() as connection:
            head = f"POST {PREFIX}/forward_backward HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n"
            connection.sendall(head.encode())
            block = b"100000\r\n" + bytes(2**20) + b"\r\n"
            try:
                for _ in range(1024):
                    connection.sendall(block)
            except OSError:  # the server has hung up
                continue
            assert b" 413 " in connection.recv(1024)
    assert peak_bytes() - before < 64 * 2**20
    status, answer = running.send("forward_backward", bytes(BODY_BYTES + 1))
    assert (status, b"service.max_body_bytes" in answer) == (413, True)
    assert running.fetch(running.step(running.model(), 1))[0] == 200


def test_bodies_that_do_not_arrive_are_bounded(run: Callable[..., Running]) -> None:
    """Each that has begun holds its memory; others wait for it, with small ones going past."""
    running = run(max_arriving_bytes=2 * BODY_BYTES)
    head = f"POST {PREFIX}/forward_backward HTTP/1.1\r\nHost: x\r\nContent-Length: {BODY_BYTES - 1000}\r\n\r\nx"
    slow = [running.socket() for _ in range(2)]
    for connection in slow:
        connection.sendall(head.encode())
    until(lambda: b"service.max_arriving_bytes" in running.send("forward_backward", bytes(BODY_BYTES))[1])
    assert running.send("forward_backward", bytes(BODY_BYTES))[0] == 429
    assert running.fetch(running.step(running.model(), 1))[0] == 200
    for connection in slow:
        connection.close()
    answers: list[tuple[int, bytes]] = []
    until(lambda: bool(answers.append(running.send("forward_backward", bytes(BODY_BYTES))) or answers[-1][0] == 200))
    _, answer = answers[-1]  # a future that fails
    assert running.fetch(json.loads(answer)["request_id"])[1]["category"] == "user"


def test_a_client_that_does_not_read_blocks_no_other(run: Callable[..., Running]) -> None:
    running = run(result=as_json({"large": "x" * 2**24}))
    name = running.step(running.model(), 1)
    body = json.dumps({"request_id": name})
    assert running.fetch(name)[0] == 200
    before = peak_bytes()
    slow = [running.socket() for _ in range(20)]
    for connection in slow:
        head = f"POST {PREFIX}/retrieve_future HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        connection.sendall(head.encode())
    time.sleep(1.0)
    assert running.send("healthz")[0] == 200
    assert peak_bytes() - before < 2**24  # less than one of their 20 results
    status, found = running.fetch(name)
    assert (status, len(found["large"])) == (200, 2**24)
    for connection in slow:
        connection.close()


@pytest.mark.long
def test_futures_that_nobody_fetches(run: Callable[..., Running]) -> None:
    """10,000 results of 4 kB, and as many requests that failed, in memory less than 1.5 kB each."""
    running = run(result=as_json({"text": "x" * 4096}))
    model = running.model()
    body = {"model_id": model, "adam_params": {"learning_rate": 0.1}}
    for number in range(1, 1001):  # so that what is allocated once is
        running.desk.submit("optim_step", json.dumps({**body, "seq_id": number}).encode(), f"a{number}")
    before = peak_bytes()
    names = []
    for number in range(1001, 10_001):
        while True:
            try:
                names.append(
                    running.desk.submit("optim_step", json.dumps({**body, "seq_id": number}).encode(), f"a{number}").name
                )
            except RuntimeError:  # as many wait as may
                time.sleep(0.01)
            else:
                break
    for _ in range(1500):
        running.step("nobody", 1)
    assert len(running.server._failed) <= running.server._config.max_waiting
    assert peak_bytes() - before < 9000 * 1500 + 8 * 2**20
    assert running.fetch(names[0])[1] == {"text": "x" * 4096}
    assert running.fetch(names[-1])[1] == {"text": "x" * 4096}


def test_a_client_that_is_gone_makes_room(run: Callable[..., Running]) -> None:
    """Only where a place is wanted, and not one that gives signs of life."""
    running = run(full_parameters=True, silent_seconds=3.0)
    first = running.model()
    running.specs[first] = AdapterSpec(rank=0)
    session = first.partition(":")[0]
    info = json.loads(running.send("get_info", {"model_id": first})[1])
    assert (info["is_lora"], info["lora_rank"]) == (False, None)
    asked = running.step(first, 1)
    for beat in range(8):
        time.sleep(0.5)
        if beat < 4:
            assert running.send("session_heartbeat", {"session_id": session})[0] == 200
        else:
            assert running.fetch(asked)[0] == 200
    assert running.fetch(running.step(running.model(), 1))[0] == 200
    assert ("finish_session", f"{session}:finish") not in running.done
    time.sleep(4.5)
    last = running.model()
    assert running.fetch(running.step(last, 1))[0] == 200
    assert running.done.index(("finish_session", f"{session}:finish")) < running.done.index(("create_model", last))


def test_two_clients_with_one_id(run: Callable[..., Running]) -> None:
    running = run()
    model = running.model()
    first = running.step(model, 1)
    assert running.step(model, 1) == first
    other = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.2}}
    status, found = running.fetch(json.loads(running.send("optim_step", other)[1])["request_id"])
    assert (status, found["category"]) == (200, "user")
    assert "seq_id 1" in found["error"]
    assert running.fetch(running.step(model, 2))[0] == 200


def test_lists_and_downloads(run: Callable[..., Running], tmp_path: Path) -> None:
    running = run(key=KEY)
    model, other = running.model(), running.model()
    running.specs[other] = AdapterSpec(rank=2)
    for kind, name in (("weights", "a"), ("sampler_weights", "b"), ("external_weights", "c"), ("weights", ".partial_d")):
        folder = tmp_path / "models" / model.replace(":", "_") / kind / name
        folder.mkdir(parents=True)
        (folder / "spec.json").write_text('{"rank": 4, "train_attn": true, "train_mlp": true, "seed": 0}')
        (folder / "adapter_config.json").write_text("{}")
    found = json.loads(running.send(f"training_runs/{model}/checkpoints")[1])
    assert {each["checkpoint_id"] for each in found["checkpoints"]} == {"weights/a", "sampler_weights/b", "external_weights/c"}
    page = json.loads(running.send("checkpoints?limit=1&offset=1")[1])
    assert (len(page["checkpoints"]), page["cursor"]) == (1, {"offset": 1, "limit": 1, "total_count": 3})
    runs = json.loads(running.send("training_runs")[1])["training_runs"]
    assert {each["training_run_id"]: each["lora_rank"] for each in runs} == {model: 4, other: 2}
    assert running.send("checkpoints?limit=x")[0] == 422
    assert running.send("training_runs/..%2F..%2Fetc/checkpoints")[0] == 404

    urls = json.loads(running.send(f"training_runs/{model}/checkpoints/external_weights/c/external_weights_urls")[1])["urls"]
    assert list(urls) == ["adapter_config.json"]
    url = urls["adapter_config.json"]
    assert running.send(url, X_API_Key="") == (200, b"{}")
    assert running.send(url.replace("expires=", "expires=9"), X_API_Key="")[0] == 403
    assert running.send(url.replace("adapter_config.json", "spec.json"), X_API_Key="")[0] == 403
    assert running.send(f"training_runs/{model}/checkpoints/external_weights/..%2Fx/external_weights_urls")[0] == 422
    assert running.send(f"training_runs/{model}/checkpoints/weights/none", method="DELETE")[0] == 404
    assert running.send(f"training_runs/{model}/checkpoints/weights/a", method="DELETE")[0] == 204
