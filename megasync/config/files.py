"""Files of a run: names, the lock of the run's folder, and atomic writes, so that readers never see a half-written file.

lock(run_folder)                       # until this process ends
write_atomically(run_folder / "summary.json", text)
former = archive_folder(run_folder)    # renames runs/NAME to runs/NAME.1 if it holds results of a former run
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import secrets
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from megasync.config.errors import ConfigError

CHECKPOINTS = "checkpoints"
VERSIONS = "versions"
MARKER = f"{VERSIONS}/trained.json"  # the last step that can be resumed from the version log (run/checkpoints.py)
METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
SAMPLES_FILE = "samples.jsonl"
STOP_FILE = "stop"
EPISODES = "episodes"  # the folder of records
TEACHER = "teacher"  # models that were rebuilt from the version log to be teachers


def lock(run_folder: Path) -> int | None:
    """Locks the folder for this process until it ends or closes the returned descriptor. Prints a warning and returns None if
    the file system has no locks.

    A POSIX lock belongs to the process; children do not inherit it. The locked file lies beside the folder, since
    `archive_folder` renames the folder.

    Raises:
        ConfigError: another process holds the lock; with its id and host.
    """
    path = run_folder.with_name(f".{run_folder.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _in_use(run_folder, os.read(descriptor, 1000).decode()) from error
    except OSError as error:
        print(f"{path}: cannot be locked ({error.strerror}): do not start this run twice at the same time", file=sys.stderr)
        return None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return descriptor


def lock_holder(run_folder: Path) -> str | None:
    """Process and host that hold the lock of the folder, as text; None if it is not locked. Takes no lock."""
    run_folder = Path(os.path.realpath(run_folder))  # so that it has a name even if it is the current folder
    path = run_folder.with_name(f".{run_folder.name}.lock")
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        os.lockf(descriptor, os.F_TEST, 0)
    except OSError:
        return os.read(descriptor, 1000).decode(errors="replace") or "a process that has not written its id yet"
    finally:
        os.close(descriptor)
    return None


def refuse_if_locked(run_folder: Path) -> None:
    """Raises ConfigError if another process holds the lock of the folder. Takes no lock."""
    if (holder := lock_holder(run_folder)) is not None:
        raise _in_use(run_folder, holder)


def _in_use(run_folder: Path, holder: str) -> ConfigError:
    remedy = "wait until it ends, stop it, or write run.name=NAME for another run"
    return ConfigError(f"{run_folder}: a run is going on in this folder", held_by=holder, remedy=remedy)


def newest_checkpoint(run_folder: Path) -> Path | None:
    """The folder of the newest complete checkpoint, or None. (As engine.checkpoint.newest, without importing the engine.)"""
    return max((run_folder / CHECKPOINTS).glob("step_" + 8 * "[0-9]"), default=None)


def read_marker(run_folder: Path) -> dict[str, Any] | None:
    """The step whose weights are the newest version in the log (`step`), and the prompts that were trained by then
    (`num_trained`, `num_begun`, `begun`); None if there is no such file.

    Raises:
        ConfigError: the file is damaged, for example by a power failure, or another version of megasync wrote it.
    """
    path = run_folder / MARKER
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        numbers = [content["step"], content["num_trained"], content["num_begun"], *content["begun"]]
        if all(type(number) is int for number in numbers):
            return dict(content)
        problem = "holds values that are not whole numbers"
    except (ValueError, LookupError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
    remedy = "delete it, or write checkpoint.resume=auto: the run resumes from its newest checkpoint"
    raise ConfigError(f"{path}: cannot be read: {problem}", remedy=remedy)


def existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    path = folder.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def unwritable(folder: Path) -> str:
    """The reason why the folder, or its nearest existing parent, is not writable; empty if it is. Leaves no file behind."""
    nearest, whole = existing(folder), folder.absolute()
    for path in (whole, *whole.parents):  # mkdir fails on a broken link
        if path.is_symlink() and not path.exists():
            return f"{path} is a link to {path.readlink()}, which does not exist"
    try:
        with tempfile.TemporaryFile(dir=nearest, prefix=".probe-") as probe:
            probe.write(b"probe")
            probe.flush()
    except OSError as error:
        return str(error.strerror) if nearest.is_dir() else f"{nearest} is a file"
    return ""


def has_results(run_folder: Path) -> bool:
    """Whether the folder holds steps, evaluations or checkpoints of a run."""
    records = (run_folder / name for name in (METRICS_FILE, EVALUATIONS_FILE))
    return any(path.is_file() and path.stat().st_size for path in records) or any((run_folder / CHECKPOINTS).glob("step_*"))


def is_asked_to_stop(run_folder: Path) -> bool:
    """Whether the run's folder has a file `stop`, which a user or a batch system writes to end the run."""
    return (run_folder / STOP_FILE).exists()


def forget_stop(run_folder: Path) -> None:
    """Deletes the file `stop`, at the start of a run (launch/stop_request.py) and at its end."""
    (run_folder / STOP_FILE).unlink(missing_ok=True)


def teacher_folder(run_folder: Path, version: int) -> Path:
    """The model of one of the run's versions, where it is the teacher."""
    return run_folder / TEACHER / f"version_{version:08d}"


def archive_folder(run_folder: Path) -> Path | None:
    """Renames a folder with results to the first free name of FOLDER.1, FOLDER.2, ... and returns it; None without results.

    A file `stop` stays in `run_folder`, since it is meant for the run that starts.
    """
    if not has_results(run_folder):
        return None
    names = (run_folder.with_name(f"{run_folder.name}.{number}") for number in itertools.count(1))
    free = next(path for path in names if not path.exists())
    former = run_folder.rename(free)
    if is_asked_to_stop(former):
        run_folder.mkdir(exist_ok=True)
        (former / STOP_FILE).rename(run_folder / STOP_FILE)
    return former


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces the file by a text (in UTF-8) or bytes in one step. Creates its folder; the file's mode follows the umask.

    Raises:
        OSError: the file cannot be written; `filename` is `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # mkstemp would make it unreadable for other users
    try:
        with draft.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error  # with the name of the file, not of the draft
        raise


def flush(path: Path) -> None:
    """Writes the file from the page cache to the disk (fsync)."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
