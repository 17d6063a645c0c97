"""A job of Ray's job server: submitted once, followed, asked for its exit code, stopped; patient with connections that break.

Leaves out the job and the messages for users (submit.py).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

STOP_SECONDS = 20.0
AGENT_SECONDS = 60.0
RETRY_SECONDS = 10.0  # a job server on a loaded machine breaks connections off
OF_SERVER = "failed with status code 5"  # ray 2.60.0 dashboard/modules/dashboard_sdk.py:306


def submit(address: str, job_arguments: dict[str, Any]) -> tuple[Any, str]:
    """A client of the job server, and the id of the job that it has now.

    Interrupted, it leaves no job there, also where the server has accepted one and its answer was lost.
    """
    from ray.job_submission import JobSubmissionClient

    logging.getLogger("ray.dashboard.modules.job.sdk").setLevel(logging.WARNING)  # says when its socket closes
    client = JobSubmissionClient(address)
    job_id = f"raysubmit_{secrets.token_hex(8)}"
    try:
        submit_when_ready(client, job_id, job_arguments)
    except KeyboardInterrupt:
        stop_if_there(client, job_id)
        raise
    print(f"submitted {job_id} to {address}", flush=True)
    return client, job_id


def submit_when_ready(client: Any, job_id: str, job_arguments: dict[str, Any]) -> None:
    """Submit the job, once; on a cluster that has just started, wait until a node's agent takes jobs."""
    deadline = time.monotonic() + AGENT_SECONDS
    while True:
        try:
            patiently(partial(client.submit_job, submission_id=job_id, **job_arguments))
        except RuntimeError as error:
            if "already exists" in str(error):  # the server took it, and its answer was lost
                return
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.5)
        else:
            return


def patiently(ask: Callable[[], Any]) -> Any:
    """The job server's answer; asked again where the connection breaks, or the server has an error of its own, for RETRY_SECONDS.

    Raises:
        OSError, RuntimeError: the last failure.
    """
    deadline = time.monotonic() + RETRY_SECONDS
    while True:
        try:
            return ask()
        except (OSError, RuntimeError) as error:
            is_passing = isinstance(error, OSError) or OF_SERVER in str(error)
            if not is_passing or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def follow_in_thread(client: Any, job_id: str) -> None:
    """`follow`, in a thread that a Ctrl-C leaves behind: in the main one, Ray's log stream can swallow the cancellation.

    Raises:
        BaseException: what `follow` raised.
    """
    failures: list[BaseException] = []

    def work() -> None:
        try:
            asyncio.run(follow(client, job_id))
        except BaseException as error:  # noqa: BLE001 # raised below, in the thread that waits
            failures.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
    if failures:
        raise failures[0]


async def follow(client: Any, job_id: str) -> None:
    """Print the job's log as it comes, until the job ends."""
    from aiohttp import ClientError

    while not has_ended(client, job_id):
        try:
            async for lines in client.tail_job_logs(job_id):
                print(lines, end="", flush=True)
        except (RuntimeError, OSError, ClientError) as error:
            print(f"the log stream broke off ({error}); the job continues", file=sys.stderr)
        await asyncio.sleep(0.2)


def has_ended(client: Any, job_id: str) -> bool:
    ended: bool = patiently(partial(client.get_job_status, job_id)).is_terminal()
    return ended


def exit_code(client: Any, job_id: str) -> int:
    """The driver's exit code of a job that has ended."""
    info = patiently(partial(client.get_job_info, job_id))
    if info.status == "SUCCEEDED":
        return 0
    if info.driver_exit_code is None:  # the driver never started, or was killed: only Ray knows why
        print(f"{job_id} {info.status}: {info.message}", file=sys.stderr)
    return info.driver_exit_code or 1


def stop(client: Any, job_id: str) -> None:
    """Ask Ray to stop the job and wait until it has."""
    client.stop_job(job_id)
    deadline = time.monotonic() + STOP_SECONDS
    while not has_ended(client, job_id) and time.monotonic() < deadline:
        time.sleep(0.2)


def stop_if_there(client: Any, job_id: str) -> None:
    """Like `stop`, for a job that the server may never have received, or may receive in a moment."""
    print(f"stopping {job_id}", file=sys.stderr)
    for _ in range(2):
        try:
            stop(client, job_id)
        except (RuntimeError, OSError):
            time.sleep(1.0)
        else:
            return
