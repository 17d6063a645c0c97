"""How `megasync scale` asks a run that goes on for more or fewer replicas, and how that answers: two files in the run's folder.

The request stays until the run is done, and holds for a run that is resumed; the answer grows. Both are written whole. Leaves out
what the trainer does about it (scaling.py) and the command (megasync/scale.py). No torch in here.

    ask(run_folder, Request("20f1", replicas=4, configured=2))
    read_answer(run_folder)         # Answer("20f1", ("taken at version 12: ...",), code=None)
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megasync.config.files import write_atomically

REQUEST_FILE, ANSWER_FILE = "scale.json", "scale_answer.json"


@dataclass(frozen=True)
class Request:
    """So many replicas; or, with 0, as many as there are less those on the host `without`."""

    key: str  # no other request's
    replicas: int = 0
    without: str = ""
    configured: int = 0  # the run's rollout.replicas, as it was when this was asked

    def __post_init__(self) -> None:
        kinds = {"key": str, "replicas": int, "without": str, "configured": int}
        if any(type(getattr(self, name)) is not kind for name, kind in kinds.items()) or self.replicas < 0:
            raise ValueError(f"{REQUEST_FILE}: {asdict(self)} is no request")


@dataclass(frozen=True)
class Answer:
    """What has come of the request of this key so far; `code`: None while more is to come."""

    key: str
    lines: tuple[str, ...] = ()
    code: int | None = None


def ask(run_folder: Path, request: Request) -> None:
    write_atomically(run_folder / REQUEST_FILE, json.dumps(asdict(request)))


def read_request(run_folder: Path) -> Request | None:
    """None where nobody asks.

    Raises:
        ValueError: the file is no request.
    """
    path = run_folder / REQUEST_FILE
    if not path.exists():
        return None
    try:
        return Request(**json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: this is no request ({error}); write it with megasync scale") from error


def answer(run_folder: Path, said: Answer) -> None:
    write_atomically(run_folder / ANSWER_FILE, json.dumps(asdict(said)))


def read_answer(run_folder: Path) -> Answer | None:
    path = run_folder / ANSWER_FILE
    if not path.exists():
        return None
    fields = json.loads(path.read_text(encoding="utf-8"))
    return Answer(fields["key"], tuple(fields["lines"]), fields["code"])


def forget_request(run_folder: Path) -> None:
    """Of a run that begins anew, or that is done."""
    for name in (REQUEST_FILE, ANSWER_FILE):
        (run_folder / name).unlink(missing_ok=True)
