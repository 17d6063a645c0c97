"""Why a job has no value: the user's error with its traceback, or the end of its process with its stack."""

from __future__ import annotations

import re
import signal
import traceback
from typing import NamedTuple

OWN_FRAMES = re.compile(r"megasync/\w+/program\.py")  # the files that call the user's functions; left out of tracebacks
MAX_TRACEBACK_CHARACTERS = 8000
MAX_TEXT_CHARACTERS = 2000
WAS_KILLED = "had its process killed by"
MAX_STACK_FRAMES = 12


class Failure(NamedTuple):
    """Why a job has no value: a predicate, such as "raised KeyError: 'a'", and a traceback or a stack."""

    what: str
    details: str = ""


class BadValueError(Exception):
    """A user's function returned something that cannot be used. The text is the failure's: returned nan, ... is expected."""


def failure_of(error: BaseException) -> Failure:
    """The failure that an error is, with the user's part of its traceback."""
    if isinstance(error, BadValueError):
        return Failure(str(error))
    frames = error.__traceback__
    while frames is not None and OWN_FRAMES.search(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    details = "".join(traceback.format_exception(type(error), error, frames))
    return Failure(f"raised {text_of(error)}", details[-MAX_TRACEBACK_CHARACTERS:].strip())


def text_of(error: BaseException) -> str:
    text = "".join(traceback.format_exception_only(error)).strip()
    return text if len(text) <= MAX_TEXT_CHARACTERS else f"{text[:MAX_TEXT_CHARACTERS]} ... ({len(text)} characters)"


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended its process with exit code {code}"
    name = next((each.name for each in signal.Signals if each == -code), f"signal {-code}")
    return f"{WAS_KILLED} {name}" + (", as the system does when memory runs out" if name == "SIGKILL" else "")


def user_frames(written: str) -> str:
    """The frames of a faulthandler stack above those of our programs, innermost first."""
    lines = []
    for line in written.splitlines():
        if OWN_FRAMES.search(line):
            break
        lines.append(line)
    return "\n".join(lines[: MAX_STACK_FRAMES + 1]).strip()
