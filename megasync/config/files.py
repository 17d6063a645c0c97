"""Files of a run: its folder is one process's at a time, and a reader, or the next start after a crash, sees a file whole.

lock(run_folder)                    # until this process ends
write_atomically(run_folder / "summary.json", text)
former = set_aside(run_folder)      # runs/NAME becomes runs/NAME.1 if it holds the results of a former run
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
MARKER = f"{VERSIONS}/trained.json"  # up to which step the run's log of versions can be gone on from (run/checkpoints.py)
METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
SAMPLES_FILE = "samples.jsonl"
STOP_FILE = "stop"
EPISODES = "episodes"  # the folder of records


def lock(run_folder: Path) -> int | None:
    """Make the folder this process's until it ends, in any way, or closes the descriptor that this returns.

    A POSIX lock belongs to the process: no child inherits it. The locked file lies beside the folder, which `set_aside` renames.
    None, and a warning, where the file system has no locks.

    Raises:
        ConfigError: another process has the folder; its id and host.
    """
    path = run_folder.with_name(f".{run_folder.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _going_on(run_folder, os.read(descriptor, 1000).decode()) from error
    except OSError as error:
        print(f"{path}: cannot be locked ({error.strerror}): do not start this run twice at a time", file=sys.stderr)
        return None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return descriptor


def lock_holder(run_folder: Path) -> str | None:
    """Who holds the lock that a run has on its folder, None for nobody. Takes no lock."""
    run_folder = run_folder.resolve()  # with a name, also where it is the current folder
    path = run_folder.with_name(f".{run_folder.name}.lock")
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        os.lockf(descriptor, os.F_TEST, 0)
    except OSError:
        return os.read(descriptor, 1000).decode(errors="replace") or "a process that has not said its name yet"
    finally:
        os.close(descriptor)
    return None


def refuse_going_on(run_folder: Path) -> None:
    """ConfigError where another process has the folder now. Takes no lock."""
    if (holder := lock_holder(run_folder)) is not None:
        raise _going_on(run_folder, holder)


def _going_on(run_folder: Path, holder: str) -> ConfigError:
    remedy = "wait for its end, end it, or write run.name=NAME for another run"
    return ConfigError(f"{run_folder}: a run is going on in this folder", held_by=holder, remedy=remedy)


def newest_checkpoint(run_folder: Path) -> Path | None:
    """The whole one of the highest step. (engine.checkpoint.newest does the same, with all that the engine imports.)"""
    return max((run_folder / CHECKPOINTS).glob("step_" + 8 * "[0-9]"), default=None)


def read_marker(run_folder: Path) -> dict[str, Any] | None:
    """With which step, its `step`, the weights of the newest version were made, and which prompts were trained by then.

    Raises:
        ConfigError: it is damaged, as a machine that loses its power may leave it, or another version wrote it.
    """
    path = run_folder / MARKER
    if not path.is_file():
        return None
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        numbers = [told["step"], told["num_trained"], told["num_begun"], *told["begun"]]
        if all(type(number) is int for number in numbers):
            return dict(told)
        problem = "holds something else than numbers"
    except (ValueError, LookupError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
    remedy = "delete it, or write checkpoint.resume=auto: the run goes on from its newest checkpoint"
    raise ConfigError(f"{path}: cannot be read: {problem}", remedy=remedy)


def existing(folder: Path) -> Path:
    """The folder, or the nearest above it that there is."""
    path = folder.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def unwritable(folder: Path) -> str:
    """Why no file can be made in the folder, or in the nearest above it that there is; empty where one can. Nothing stays."""
    nearest, whole = existing(folder), folder.absolute()
    for path in (whole, *whole.parents):  # in the place of a link no folder can be made
        if path.is_symlink() and not path.exists():
            return f"{path} is a link to {path.readlink()}, which is not there"
    try:
        with tempfile.TemporaryFile(dir=nearest, prefix=".probe-") as probe:  # whose name goes at once
            probe.write(b"probe")
            probe.flush()
    except OSError as error:
        return str(error.strerror) if nearest.is_dir() else f"{nearest} is a file"
    return ""


def has_results(run_folder: Path) -> bool:
    """Whether a run left steps, evaluations or checkpoints in it."""
    records = (run_folder / name for name in (METRICS_FILE, EVALUATIONS_FILE))
    return any(path.is_file() and path.stat().st_size for path in records) or any((run_folder / CHECKPOINTS).glob("step_*"))


def is_asked_to_stop(run_folder: Path) -> bool:
    """By whoever made the file `stop` in the run's folder, such as a batch system before its time limit."""
    return (run_folder / STOP_FILE).exists()


def forget_stop(run_folder: Path) -> None:
    """At the start of a run (launch/stop_request.py), and at the end of one that had come to its end anyway."""
    (run_folder / STOP_FILE).unlink(missing_ok=True)


def set_aside(run_folder: Path) -> Path | None:
    """Renames a folder with results to the first name of FOLDER.1, FOLDER.2, ... that is free; returns it. No results: None.

    A `stop` in it stays where it was: it is asked of the run that begins.
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
    """Replaces `path` by a text (UTF-8) or bytes in one step; makes its folder if need be. Its mode is as the umask has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # no mkstemp, whose files are for their owner alone
    try:
        with draft.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error  # not the draft's name, or none
        raise


def flush(path: Path) -> None:
    """Waits until the file is on the disk, not only in the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
