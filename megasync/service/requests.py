"""A request that was accepted, and its result. Leaves out their order (work_queue.py) and who waits for them (desk.py)."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from megasync.service.calls import Call
from megasync.service.journal import Place

Form = Literal["json", "protobuf", "error"]


class Result(NamedTuple):
    """The bytes of an answer. `error`: JSON with `error` and `category`, as the client's futures fail."""

    form: Form
    body: bytes

    @property
    def is_server_error(self) -> bool:
        """Such a request is tried again after a restart."""
        return self.form == "error" and json.loads(self.body)["category"] == "server"


def error(message: str, category: Literal["user", "server"]) -> Result:
    return Result("error", json.dumps({"error": message, "category": category}).encode())


def as_json(value: Any) -> Result:
    return Result("json", json.dumps(value).encode())


@dataclass(eq=False)
class Request:
    """One that was accepted. `call` has arguments only while it is executed."""

    name: str  # in futures
    call: Call
    digest: str  # of the body
    number: int  # of acceptance, among all
    place: Place  # in the log
    order: int = -1  # among training requests
    result: Place | Result | None = None  # in the log; in memory what failed here, which is tried again after a restart
    num_failures: int = 0
    waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = field(default_factory=list)

    def __reduce__(self) -> tuple[Any, ...]:
        """For the other ranks, which execute the call."""
        return Request, (self.name, self.call, self.digest, self.number, self.place, self.order)
