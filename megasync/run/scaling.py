"""More or fewer replicas while a run is in progress: the request, and rank 0's side between two syncs.

`megasync scale` writes a request file into the run's folder; the run answers in a second file. The request stays until the run is
done, also where it is resumed; the answer grows. Both are written atomically.

New replicas start in the background, as one that was lost does, and take part in the first sync after that, which brings them the
weights. A leaving replica gets no more groups; it takes part in syncs until its groups have ended, and is then ended.
 Leaves out the command (megasync/tools/scale/command.py) and the actors (bridge/replicas/actors.py). No torch in here.

    ask(run_folder, Request("20f1", replicas=4, configured=2))
    scaling = Scaling(config, pool, rollouts.release_idle, log.note)
    scaling.apply_request(version)  # before the members of the next sync are settled
    scaling.write_answer(version)   # after that
    read_answer(run_folder)         # Answer("20f1", ("taken at version 12: ...",), code=None)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.messages import name_replicas
from megasync.config.files import write_atomically

if TYPE_CHECKING:
    from bridge.replicas.pool import ReplicaPool
    from megasync.config.schema import Config

REQUEST_FILE, ANSWER_FILE = "scale.json", "scale_answer.json"
DONE, FAILED, REFUSED = 0, 1, 2


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
    """The answer to the request of this key so far; `code`: None while it is being carried out."""

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


def is_replaced(run_folder: Path, request: Request) -> bool:
    """Whether somebody has asked for something else since: a run takes the newest request alone."""
    try:
        newest = read_request(run_folder)
    except ValueError:  # written by hand
        return True
    return newest is not None and newest.key != request.key


def answer(run_folder: Path, said: Answer) -> None:
    write_atomically(run_folder / ANSWER_FILE, json.dumps(asdict(said)))


def read_answer(run_folder: Path) -> Answer | None:
    path = run_folder / ANSWER_FILE
    if not path.exists():
        return None
    fields = json.loads(path.read_text(encoding="utf-8"))
    return Answer(fields["key"], tuple(fields["lines"]), fields["code"])


def forget_request(run_folder: Path) -> None:
    """At the start of a new run, and once all steps are done."""
    for name in (REQUEST_FILE, ANSWER_FILE):
        (run_folder / name).unlink(missing_ok=True)


def asked_number(request: Request, wanted: set[int], hosts: Mapping[int, str]) -> tuple[int, list[int]]:
    """How many replicas are requested, and which are excluded. Pure.

    `wanted`: replicas that are wanted now; `hosts`: the host name of each that is there, which may have a domain.
    """
    if not request.without:
        return request.replicas, []
    short = request.without.partition(".")[0]
    there = sorted(replica for replica, host in hosts.items() if host.partition(".")[0] == short)
    return len(wanted.difference(there)), there


def refusal(request: Request, number: int, there: list[int], min_replicas: int) -> str:
    """Why there cannot be so many; empty where room is all that is asked for. `there`: those on the host `without`. Pure."""
    if request.without and not there:
        return f"no replica is on {request.without}"
    if number < min_replicas:
        left = f"{number} replicas would be left" if request.without else f"{number} replicas"
        return f"{left}, rollout.min_replicas = {min_replicas} are needed"
    return ""


class Scaling:
    """Changes the number of one run's replicas; methods are called on rank 0, on the trainer's thread."""

    def __init__(
        self, config: Config, pool: ReplicaPool, release_idle: Callable[[], set[int]], note: Callable[[str], None]
    ) -> None:
        """`release_idle`: forgets leaving replicas that have nothing to do; returns the leaving ones that still work."""
        self.folder, self.min_replicas, self.configured = config.run.folder, config.rollout.min_replicas, config.rollout.replicas
        self.pool, self.release_idle, self.note = pool, release_idle, note
        former = read_answer(self.folder)
        self._answer = Answer("")
        self._refused = former.key if former is not None and former.code == REFUSED else ""
        self._is_first = True
        self._members: set[int] = set(pool.members)
        self._unreadable = ""

    def apply_request(self, version: int) -> None:
        """Take a new request, and end leaving replicas that have nothing to do."""
        request = self._read()
        if request is not None and request.key not in (self._answer.key, self._refused):
            self._take(request, version)
        self._is_first = False
        if self.pool.leaving:
            self.pool.dismiss(*(self.pool.leaving - self.release_idle()))

    def _read(self) -> Request | None:
        try:
            return read_request(self.folder)
        except ValueError as error:
            if str(error) != self._unreadable:
                self._unreadable = str(error)
                self.note(str(error))
            return None

    def _take(self, request: Request, version: int) -> None:
        """The first request may be of the process that this one resumes: it holds as long as the config has the same number;
        a request to leave a host does not.
        """
        self._answer = Answer(request.key)
        former = read_answer(self.folder)
        is_known = self._is_first and former is not None and former.key == request.key
        if is_known and (request.without or request.configured != self.configured):
            return
        number, without = asked_number(request, self.pool.wanted, self.pool.hosts())
        problem = refusal(request, number, without, self.min_replicas)
        if not problem and number > len(self.pool.wanted):
            problem = self.pool.room_problem(number)
        if problem:
            self._say(f"refused at version {version}: {problem}", REFUSED)
            return
        before = set(self.pool.members)
        self.pool.scale(number, without)
        new, leaving = sorted(self.pool.wanted - before), sorted(before - self.pool.wanted)
        changes = [f"{name_replicas(new)} to start"] if new else []
        changes += [f"{name_replicas(leaving)} to leave"] if leaving else []
        self._say(f"taken at version {version}: {number} replicas; {', '.join(changes) or 'they are there'}")

    def write_answer(self, version: int) -> None:
        """Report the replicas that came and went with the sync of `version`, and whether the request is done."""
        members = set(self.pool.members)
        came, went, self._members = sorted(members - self._members), sorted(self._members - members), members
        if not self._answer.key or self._answer.code is not None:
            return
        for replicas, words in ((came, f"in the sync from version {version} on"), (went, f"ended before version {version}")):
            if replicas:
                self._say(f"{name_replicas(replicas)} {words}; {len(members)} replicas")
        given_up = self.pool.given_up
        if members == self.pool.wanted:
            self._say(f"done: {len(members)} replicas", DONE)
        elif given_up and members == self.pool.wanted - given_up.keys():
            failed = "; ".join(f"replica {replica} did not start: {text}" for replica, text in given_up.items())
            self._say(f"{failed}; the run goes on with {len(members)} replicas", FAILED)

    def _say(self, line: str, code: int | None = None) -> None:
        self._answer = Answer(self._answer.key, (*self._answer.lines, line), code)
        answer(self.folder, self._answer)
        self.note(f"scale: {line}")
