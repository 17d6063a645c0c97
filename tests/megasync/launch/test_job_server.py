"""Following a job of Ray's job server, by Ray's own client, while the server has errors of its own.

python -m pytest tests/megasync/launch/test_job_server.py
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from megasync.launch.job_server import exit_code, follow_in_thread

JOB = {"type": "SUBMISSION", "job_id": None, "submission_id": "raysubmit_1", "entrypoint": "x", "driver_exit_code": 0}


class Server:
    """Of one job. It is busy at every second question, and when it is asked for the log for the first time."""

    def __init__(self) -> None:
        self.num_asked = self.num_tailed = 0

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "5", "ray_version": "2.60.0", "ray_commit": "x", "session_name": "s"})

    async def job(self, _: web.Request) -> web.Response:
        self.num_asked += 1
        if self.num_asked % 2:
            return web.Response(status=500 + self.num_asked % 4, text="busy")
        return web.json_response(JOB | {"status": "SUCCEEDED" if self.num_tailed == 3 else "RUNNING"})

    async def tail(self, request: web.Request) -> web.StreamResponse:
        self.num_tailed += 1
        if self.num_tailed == 1:
            return web.Response(status=500, text="busy")
        log = web.WebSocketResponse()
        await log.prepare(request)
        await log.send_str(f"line {self.num_tailed}\n")
        await log.close()
        return log

    async def start(self) -> str:
        application = web.Application()
        application.router.add_get("/api/version", self.version)
        application.router.add_get("/api/jobs/{job}", self.job)
        application.router.add_get("/api/jobs/{job}/logs/tail", self.tail)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return "http://127.0.0.1:{1}".format(*runner.addresses[0])


def test_a_server_with_errors_of_its_own_is_asked_again(capsys: pytest.CaptureFixture[str]) -> None:
    """They say nothing of the job: a cluster of this machine would end with the command, and its run with it."""
    from ray.job_submission import JobSubmissionClient

    def follow(address: str) -> int:
        client: Any = JobSubmissionClient(address)
        follow_in_thread(client, "raysubmit_1")
        return exit_code(client, "raysubmit_1")

    async def main() -> int:
        return await asyncio.to_thread(follow, await Server().start())

    assert asyncio.run(main()) == 0
    said = capsys.readouterr()
    assert said.out == "line 2\nline 3\n" and said.err.count("the log stream broke off") == 1
