"""`megasync serve` with its engine and a replica, over plain HTTP: each call, and a kill in the middle."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file
from tests.support.tiny_models import write_tiny_model

from megasync.service import wire

pytestmark = [pytest.mark.long, pytest.mark.vllm_on_cpu]
SECONDS = 240.0
LENGTH = 12
CONFIG = """
run: {{name: served, dir: {folder}}}
model: {{path: {folder}/model, dtype: float32}}
engine: {{wrap: ddp, lora: {{rank: 8}}, tokens_per_microbatch: 256}}
rollout: {{replicas: 1, max_model_len: 64, max_new_tokens: 32, kv_cache_bytes: 64MiB}}
service: {{base_model: Tiny/Model, checkpoint_every: 5}}
"""


class Server:
    """Started, killed and started again in one folder."""

    def __init__(self, folder: Path) -> None:
        write_tiny_model(folder / "model", "qwen3", num_hidden_layers=2)
        (folder / "serve.yaml").write_text(CONFIG.format(folder=folder))
        self.folder, self.log = folder, folder / "server.log"
        self.url = ""
        self.family: list[psutil.Process] = []  # all that have to end
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "megasync", "serve", str(self.folder / "serve.yaml"), "--port", "0", "--nproc", "1"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        end = time.monotonic() + SECONDS
        while "is served at " not in (text := self.log.read_text()):
            assert self.process.poll() is None and time.monotonic() < end, text[-4000:]
            time.sleep(0.2)
        self.url = text.partition("is served at ")[2].split()[0]

    def end(self, kind: signal.Signals) -> None:
        """SIGKILL: the rank and its launcher, at once."""
        assert self.process is not None
        launcher = psutil.Process(self.process.pid)
        self.family += [launcher, *launcher.children(recursive=True)]
        if kind is signal.SIGKILL:
            for rank in launcher.children():
                rank.kill()
        self.process.send_signal(kind)
        self.process.wait(90)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("served"))
    server.start()
    yield server
    server.end(signal.SIGTERM)
    _, left = psutil.wait_procs(server.family, 120)  # Ray's agents outlive a kill by more than a minute
    assert not left


class Client:
    """One training client, whose requests are numbered."""

    def __init__(self, server: Server, http: aiohttp.ClientSession) -> None:
        self.server, self.http = server, http
        self.model, self.seq = "", 0

    async def post(self, kind: str, body: bytes) -> tuple[int, bytes]:
        async with self.http.post(f"{self.server.url}/api/v1/{kind}", data=body) as answer:
            return answer.status, await answer.read()

    async def send(self, kind: str, fields: dict[str, Any] | bytes) -> dict[str, Any]:
        body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        status, answer = await self.post(kind, body)
        assert status == 200, answer
        found: dict[str, Any] = json.loads(answer)
        return found

    async def fetch(self, request: str) -> bytes:
        status, answer = 408, b""
        while status == 408:
            status, answer = await self.post("retrieve_future", json.dumps({"request_id": request}).encode())
        assert status == 200, answer
        return answer

    async def create(self) -> None:
        self.session = (await self.send("create_session", {}))["session_id"]
        lora = {"rank": 4, "seed": 3, "train_unembed": False}
        fields = {"session_id": self.session, "model_seq_id": 0, "base_model": "Tiny/Model", "lora_config": lora}
        sent = await self.send("create_model", fields)
        self.model = sent["model_id"]
        assert json.loads(await self.fetch(sent["request_id"]))["model_id"] == self.model

    async def ask(self, kind: str, **fields: Any) -> str:
        """The name of the future."""
        self.seq += 1
        return str((await self.send(kind, {"model_id": self.model, "seq_id": self.seq, **fields}))["request_id"])

    async def passes(self, loss: str, tokens: list[int], *, forward_only: bool = False, **values: Any) -> str:
        self.seq += 1
        message = wire.MESSAGES["ForwardBackwardRequest"](
            model_id=self.model, seq_id=self.seq, loss_fn=loss, forward_only=forward_only
        )
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(tokens[:-1], np.int32).tobytes()
        arrays = {"target_tokens": np.asarray(tokens[1:], np.int64)}
        arrays |= {name: np.asarray(value, np.float32) for name, value in values.items()}
        for name, array in arrays.items():
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = array.tobytes(), wire.INT64 if array.dtype.kind == "i" else wire.FLOAT32
        return str((await self.send("forward_backward", message.SerializeToString()))["request_id"])

    async def step(self, seed: int) -> list[str]:
        """Both kinds of losses, and a step of the optimizer."""
        random = np.random.default_rng(seed)
        tokens = random.integers(3, 100, LENGTH + 1).tolist()
        given: dict[str, Any] = {"logprobs": random.normal(-4, 1, LENGTH), "advantages": random.normal(size=LENGTH)}
        return [
            await self.passes("cross_entropy", tokens, weights=np.ones(LENGTH)),
            *[await self.passes(loss, tokens, **given) for loss in ("importance_sampling", "ppo", "cispo", "dro")],
            await self.ask("optim_step", adam_params={"learning_rate": 1e-2}),
        ]

    async def sample(self, session: str, seq: int, prompt: list[int]) -> Any:
        fields = {"sampling_session_id": session, "seq_id": seq, "num_samples": 2, "prompt_logprobs": True}
        fields["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": prompt}]}
        fields["sampling_params"] = {"max_tokens": 8, "seed": 1, "stop": []}
        answer = await self.fetch((await self.send("asample", fields))["request_id"])
        return wire.MESSAGES["SampleResponse"].FromString(answer)

    def weights(self, name: str) -> dict[str, bytes]:
        """Not the file's bytes, in which the order of metadata differs."""
        model = self.model.replace(":", "_")
        found = self.server.folder / "served/service/models" / model / "weights" / name / "adapter/adapter_model.safetensors"
        return {key: array.tobytes() for key, array in load_file(found).items()}


def log_probs_of(answer: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    output = wire.MESSAGES["ForwardBackwardOutput"].FromString(answer)
    return np.frombuffer(output.loss_fn_outputs[0].fields["logprobs"].data, np.float32)


async def unbroken(client: Client) -> list[bytes]:
    await client.create()
    results = [await client.fetch(name) for seed in range(3) for name in await client.step(seed)]
    await client.fetch(await client.ask("save_weights", path="end"))
    return results


async def killed(client: Client) -> list[bytes]:
    """The same, with a kill while requests wait."""
    await client.create()
    names = [name for seed in range(2) for name in await client.step(seed)]
    first = await client.fetch(names[0])
    await asyncio.to_thread(client.server.end, signal.SIGKILL)
    await asyncio.to_thread(client.server.start)
    names += await client.step(2)
    results = [await client.fetch(name) for name in names]
    assert results[0] == first
    await client.fetch(await client.ask("save_weights", path="end"))
    return results


def test_sampled_log_probs_are_the_trainers(server: Server) -> None:
    asyncio.run(_sampled(server))


async def _sampled(server: Server) -> None:
    async with aiohttp.ClientSession() as http:
        client = Client(server, http)
        await client.create()
        for name in await client.step(0):
            await client.fetch(name)
        await client.fetch(await client.ask("save_weights", path="one"))
        sent = await client.ask("save_weights_for_sampler", sampling_session_seq_id=0)
        session = json.loads(await client.fetch(sent))["sampling_session_id"]
        prompt = [5, 6, 7, 8]
        answer = await client.sample(session, 1, prompt)
        for sequence in answer.sequences:
            tokens = [*prompt, *np.frombuffer(sequence.tokens, np.int32).tolist()]
            passed = await client.passes("cross_entropy", tokens, forward_only=True)
            own = log_probs_of(await client.fetch(passed))
            np.testing.assert_allclose(np.frombuffer(sequence.logprobs, np.float32), own[3:], atol=1e-4)
            np.testing.assert_allclose(np.frombuffer(answer.prompt_logprobs, np.float32)[1:], own[:3], atol=1e-4)
        again = f"tinker://{client.model}/weights/one"
        rounds = []
        for _ in range(2):
            await client.fetch(await client.ask("load_weights", path=again, optimizer=True))
            rounds.append([await client.fetch(name) for name in await client.step(7)])
        assert rounds[0] == rounds[1]
        assert b"there are weights" in await client.fetch(await client.ask("save_weights", path="one"))


def test_a_kill_changes_no_bit(server: Server) -> None:
    asyncio.run(_bits(server))


async def _bits(server: Server) -> None:
    async with aiohttp.ClientSession() as http:
        whole, broken = Client(server, http), Client(server, http)
        assert await unbroken(whole) == await killed(broken)
        assert whole.weights("end") == broken.weights("end")
