"""Messages between the trainer and a worker: lists of named tuples, pickled one by one, each list after its length in 8 bytes.

    writer.write(pack([Begin(7, payload)]))
    async for message in receive(reader): ...

The trainer sends Start, then Begin, Cancel and Reply; the worker sends Ready, then Request, Withdraw, Post, HeldUp and Ended.
Leaves out the payloads, which are the functions' own.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import pickle
import struct
from collections.abc import AsyncIterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from megasync.workers.failure import Failure

LENGTH = struct.Struct("!Q")
READ_BYTES = 2**16
# time.monotonic() of the start of the current step, and the number of its job; 0: no job. A serial job is one step.
RUNNING = struct.Struct("dq")
# from a fork server: False and 0, with a pidfd of the new worker; then True and its exit code, as subprocess has it
STATUS = struct.Struct("?i")
MAX_TARGET_BYTES = 4096


class Setup(NamedTuple):
    """Arguments of a new fork server, as JSON on its command line."""

    search_path: list[str]  # the trainer's sys.path
    parent: int
    control: int  # an inherited socket


class Start(NamedTuple):
    """The first message. `target`, as module:name, is called with the arguments and returns the function of all jobs.

    Serial: a plain function of a payload, called in the main thread without an event loop. Else an async function of a payload
    and a Caller (program.py), of which many calls run at a time. `ends_children`: processes that a job starts end with it.
    """

    target: str
    arguments: tuple[Any, ...]
    is_serial: bool
    ends_children: bool


class Ready(NamedTuple):
    """The answer to Start; `problem`: why `target` could not be imported or called, else empty."""

    problem: str = ""


class Begin(NamedTuple):
    job: int  # from 1
    payload: Any


class Cancel(NamedTuple):
    job: int


class Request(NamedTuple):
    """A question of a job. Its clock is stopped until the Reply."""

    job: int
    number: int
    message: Any


class Withdraw(NamedTuple):
    """Nobody waits for the reply to this request any more."""

    job: int
    number: int


class Reply(NamedTuple):
    job: int
    number: int
    value: Any


class Post(NamedTuple):
    """A message of a job without a reply."""

    job: int
    message: Any


class HeldUp(NamedTuple):
    """A step of the job blocked the event loop, and so all other jobs of the worker, for that long."""

    job: int
    seconds: float


class Ended(NamedTuple):
    """`seconds`: of a serial job, as the worker measured them."""

    job: int
    value: Any
    failure: Failure | None = None
    seconds: float = 0.0


def pack(messages: Sequence[tuple[Any, ...]]) -> bytes:
    """Each message is pickled alone, so that objects which they share become copies: a job may change its arguments."""
    body = b"".join(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL) for message in messages)
    return LENGTH.pack(len(body)) + body


def unpacked(body: bytes) -> list[Any]:
    file, messages = io.BytesIO(body), list[Any]()
    while file.tell() < len(body):
        messages.append(pickle.load(file))  # noqa: S301 # from a process of ours
    return messages


def read(file: BinaryIO) -> list[Any] | None:
    """The next list of messages; None: the other side has hung up."""
    header = file.read(LENGTH.size)
    return unpacked(file.read(*LENGTH.unpack(header))) if header else None


async def receive(reader: asyncio.StreamReader) -> AsyncIterator[Any]:
    """Messages, until the other side hangs up."""
    unread = bytearray()
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(READ_BYTES):
            unread += data
            while len(unread) >= (end := _end(unread)):
                messages = unpacked(bytes(memoryview(unread)[LENGTH.size : end]))
                del unread[:end]
                for message in messages:
                    yield message


def _end(unread: bytearray) -> int:
    """End of the first list in bytes, or of its length where that is not complete yet."""
    return LENGTH.size + (LENGTH.unpack_from(unread)[0] if len(unread) >= LENGTH.size else 0)
