"""A service in a process of its own, and a client of plain HTTP that outlives its restarts."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
from safetensors.numpy import load_file
from tests.support.tiny_models import write_tiny_model

from megasync.service import wire

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

    def __init__(self, folder: Path, num_ranks: int = 1, *overrides: str, family: str = "qwen3") -> None:
        write_tiny_model(folder / "model", family, num_hidden_layers=2)
        (folder / "serve.yaml").write_text(CONFIG.format(folder=folder))
        self.folder, self.log = folder, folder / "server.log"
        self.options = [*overrides, "--nproc", str(num_ranks), "--max-restarts", "100"]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.family: list[psutil.Process] = []  # all that have to end
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "megasync", "serve", str(self.folder / "serve.yaml"), *self.options]
        command += ["--port", str(self.port)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        end = time.monotonic() + SECONDS
        while "is served at " not in (text := self.log.read_text()):
            assert self.process.poll() is None and time.monotonic() < end, text[-4000:]
            time.sleep(0.2)

    def victim(self, kind: str) -> psutil.Process:
        """`rank N`, or vLLM's engine core of a replica; waits until there is one, after a former kill."""
        assert self.process is not None
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            for each in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    is_core = "EngineCore" in " ".join([each.name(), *each.cmdline()])
                    is_rank = each.ppid() == self.process.pid and f"rank {each.environ().get('RANK')}" == kind
                    if is_rank or (is_core and kind == "replica"):
                        return each
            time.sleep(0.2)
        raise AssertionError(f"there is no {kind}")

    def kill(self, kind: str) -> None:
        """SIGKILL. Ranks and replicas come back by themselves."""
        if kind == "server":
            self.end(signal.SIGKILL)
            self.start()
        else:
            self.family.append(self.victim(kind))
            self.family[-1].kill()

    def end(self, kind: signal.Signals) -> None:
        """SIGKILL: the rank and its launcher, at once."""
        assert self.process is not None
        launcher = psutil.Process(self.process.pid)
        self.family += [launcher, *launcher.children(recursive=True)]
        if kind is signal.SIGKILL:
            for rank in launcher.children():
                rank.kill()
        self.process.send_signal(kind)
        self.process.wait(300)


class Client:
    """One training client, whose requests are numbered."""

    def __init__(self, server: Server, http: aiohttp.ClientSession) -> None:
        self.server, self.http = server, http
        self.model, self.seq = "", 0

    async def post(self, kind: str, body: bytes) -> tuple[int, bytes]:
        """Repeated until there is an answer, as real clients do."""
        end = time.monotonic() + SECONDS
        while True:
            try:
                async with self.http.post(f"{self.server.url}/api/v1/{kind}", data=body) as answer:
                    return answer.status, await answer.read()
            except aiohttp.ClientError:
                assert time.monotonic() < end
                await asyncio.sleep(0.2)

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

    async def create(self, path: str = "", *, is_full: bool = False) -> None:
        """`path`: of saved weights to start from; `is_full`: the server trains all parameters."""
        self.session = (await self.send("create_session", {}))["session_id"]
        lora = {"rank": 4, "seed": 3, "train_unembed": is_full}
        fields: dict[str, Any] = {"session_id": self.session, "model_seq_id": 0}
        if path:
            sent = await self.send("load_weights", {**fields, "path": path, "optimizer": True})
        else:
            sent = await self.send("create_model", {**fields, "base_model": "Tiny/Model", "lora_config": lora})
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

    async def sample(self, session: str, seq: int, prompt: list[int], **others: Any) -> Any:
        fields = {"sampling_session_id": session, "seq_id": seq, "num_samples": 2, "prompt_logprobs": True, **others}
        fields["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": prompt}]}
        fields["sampling_params"] = {"max_tokens": 8, "seed": 1, "stop": []}
        answer = await self.fetch((await self.send("asample", fields))["request_id"])
        return wire.MESSAGES["SampleResponse"].FromString(answer)

    def weights(self, name: str) -> dict[str, bytes]:
        """Not the file's bytes, in which the order of metadata differs."""
        model = self.model.replace(":", "_")
        found = self.server.folder / "served/service/models" / model / "weights" / name / "adapter/adapter_model.safetensors"
        return {key: array.tobytes() for key, array in load_file(found).items()}


def top_of(message: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Tokens and log-probs of a TopkLogprobs, each [places, k]."""
    shape = message.length, message.k
    return np.frombuffer(message.token_ids, np.int32).reshape(shape), np.frombuffer(message.logprobs, np.float32).reshape(shape)


def log_probs_of(answer: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    output = wire.MESSAGES["ForwardBackwardOutput"].FromString(answer)
    return np.frombuffer(output.loss_fn_outputs[0].fields["logprobs"].data, np.float32)
