"""A server with OpenAI's chat API whose replies follow from the messages alone: a score from 0 to 10, or none for some of them.

python -m tests.support.judge_server --port 8123 --log asked.jsonl --unparsed 0.05

Each request is a line of the log: the last message, the seed and the server's port. `expected` gives the score without a server.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.support.config_files import ROOT

MODEL = "tiny-judge"


def _number(text: str, seed: int | None) -> int:
    return int.from_bytes(hashlib.blake2b(f"{text}/{seed or 0}".encode(), digest_size=6).digest())


def expected(text: str, unparsed: float = 0.0, seed: int | None = None) -> int | None:
    """The score of a user's message; None where the reply holds none."""
    number = _number(text, seed)
    return None if (number >> 8) % 1000 < unparsed * 1000 else number % 11


def build(port: int, log: Path, unparsed: float, seconds: float) -> web.Application:
    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        text = body["messages"][-1]["content"]
        with log.open("a") as file:
            file.write(json.dumps({"text": text, "seed": body.get("seed"), "port": port, "body": body}) + "\n")
        await asyncio.sleep(seconds)
        score = expected(text, unparsed, body.get("seed"))
        reply = "I cannot say." if score is None else f"It is written.\nScore: {score}"
        choice = {"index": 0, "message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}
        return web.json_response({"id": "1", "object": "chat.completion", "model": MODEL, "choices": [choice]})

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    application = web.Application()
    application.add_routes([web.post("/v1/chat/completions", chat), web.get("/v1/models", models)])
    return application


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def judge_server(log: Path, *, unparsed: float = 0.0, seconds: float = 0.0) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The URL of a server in a process of its own, which answers when the block begins, and the process."""
    port = free_port()
    command = [sys.executable, "-m", "tests.support.judge_server", "--port", str(port), "--log", str(log)]
    process = subprocess.Popen([*command, "--unparsed", str(unparsed), "--seconds", str(seconds)], cwd=ROOT)
    deadline = time.monotonic() + 120
    try:
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/v1", process
    finally:
        process.kill()
        process.wait()


def requests_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--unparsed", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=0.0)
    given = parser.parse_args()
    application = build(given.port, given.log, given.unparsed, given.seconds)
    web.run_app(application, host="127.0.0.1", port=given.port, print=None)


if __name__ == "__main__":
    main()
