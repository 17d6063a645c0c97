"""What travels between the trainer and the processes of rewards: pickled messages, each after its length in 8 bytes.

socket.send(pack(Work([Call(7, 0, [sample])], is_serial=True)))
messages = list(unpacker.feed(socket.recv(65536)))

Of a reward that fails it is said what the user's function did, with the sample that it was given.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megasync.config.errors import explain
from megasync.rewards.functions import RewardInput

LENGTH = struct.Struct("!Q")
BEGUN = struct.Struct("dq")  # time.monotonic() when the call that is worked on in turn began, and its number
SHOWN = 300  # characters of a text


class Setup(NamedTuple):
    """What a process is started with."""

    search_path: list[str]  # the trainer's sys.path
    parent: int
    socket: int  # descriptors that it inherits
    notes: int  # where it writes which call has BEGUN, and after it its stack when it is asked to, or crashes
    names: list[str]  # of `rollout.reward`
    limit_seconds: float


class Call(NamedTuple):
    """One reward of one sample, or of a list of samples."""

    number: int  # from 1
    reward: int  # its place among the names
    samples: list[RewardInput]


class Work(NamedTuple):
    """Calls for a process. In turn: one begins when the one before it is answered; else all are worked on side by side."""

    calls: list[Call]
    is_serial: bool


class Failure(NamedTuple):
    """Why a call has no numbers: what is said after "the reward NAME ", and a traceback or a stack."""

    what: str
    details: str = ""


class Answer(NamedTuple):
    """To the call of that number: one number a sample, or the failure."""

    number: int
    values: list[float]
    failure: Failure | None = None


class Answers(NamedTuple):
    """To some of the calls; `seconds`: that they took together, of those in turn."""

    answers: list[Answer]
    seconds: float = 0.0


class Ready(NamedTuple):
    """The first message of a process; `problem` is not empty where its functions could not be imported."""

    problem: str = ""


def pack(message: tuple[Any, ...]) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


class Unpacker:
    """Makes messages of bytes as they come in."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, more: bytes) -> Iterator[Any]:
        """The messages that are whole now."""
        self._bytes += more
        while len(self._bytes) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[LENGTH.size : end])
            del self._bytes[:end]
            yield pickle.loads(body)  # noqa: S301 # from a process of ours


class RewardError(RuntimeError):
    """A reward has no number for a sample; the text names reward, reason and sample, with the user's own traceback."""


def describe(name: str, failure: Failure, samples: Sequence[RewardInput], remedy: str) -> str:
    """The error's text."""
    first = samples[0]
    headline = explain(
        f"the reward {name} {failure.what}",
        samples=f"{len(samples)} of one prompt, of which this is the first" if len(samples) > 1 else "",
        data_line=str(first.line or ""),
        prompt=shown(first.prompt),
        answer=shown(first.answer),
        response=shown(first.response),
        remedy=remedy,
    )
    return f"{headline}\n{failure.details}".strip()


def shown(text: str) -> str:
    """The text on one line; of a long one beginning and end."""
    if len(text) > SHOWN:
        half = SHOWN // 2
        return f"{text[:half]!r} ... {text[-half:]!r} ({len(text)} characters)"
    return repr(text)
