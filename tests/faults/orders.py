"""What the processes of a fault run share through a folder: the case, whether it was signalled, the record. No torch in here."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from bridge.vllm.serving.api import REPLICA_PID
from tests.faults.cases import Case
from tests.support.processes import command_of

FOLDER = "MEGASYNC_BENCH_FAULTS"  # environment variable of a run's processes: the case's folder
CASE_FILE, SIGNALLED_FILE, DEED_FILE = "case.json", "signalled.json", "deed"
STARTS, COMMITS, TRAINED = "starts.jsonl", "commits.jsonl", "trained.jsonl"


def folder() -> Path:
    return Path(os.environ[FOLDER])


def read_case() -> Case:
    return Case.from_json((folder() / CASE_FILE).read_text(encoding="utf-8"))


def is_first(name: str) -> bool:
    """Whether no process of this run has asked that before."""
    try:
        os.close(os.open(folder() / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def note(name: str, **fields: Any) -> None:
    """A line of the record; whole, since it is one small write."""
    with (folder() / name).open("a", encoding="utf-8") as file:
        file.write(json.dumps({**fields, "seconds": time.time()}) + "\n")


def read_notes(where: Path, name: str) -> list[dict[str, Any]]:
    """The record's lines; a last one that was cut off is left out."""
    path = where / name
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
    return [json.loads(line) for line in lines]


def is_due(case: Case, replica: int, phase: str, version: int | None) -> bool:
    """Whether this replica gets its signal here and now; `version` None: whatever it is."""
    is_here = case.kind == "replica" and case.number == replica and case.phase == phase
    return is_here and version in (None, case.version) and not (folder() / SIGNALLED_FILE).exists()


def signal_replica(case: Case) -> None:
    """From its actor or its engine core. Once in a run."""
    actor = int(os.environ[REPLICA_PID])
    send(actor if case.part == "actor" else core_of(actor), case.signal)


def core_of(actor: int) -> int:
    """ValueError where there is none yet."""
    family = psutil.Process(actor).children(recursive=True)
    (core,) = [int(child.pid) for child in family if "EngineCore" in command_of(child)]
    return core


def send(pid: int, kind: str) -> None:
    try:
        descriptor = os.open(folder() / SIGNALLED_FILE, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return
    os.write(descriptor, json.dumps({"pid": pid, "seconds": time.time()}).encode())
    os.close(descriptor)
    os.kill(pid, getattr(signal, kind))
