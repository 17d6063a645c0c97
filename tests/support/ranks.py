"""Runs a function on N ranks, each a process with the environment that torchrun gives it, and brings each rank's result back.

    results = run_ranks(2, "tests.engine.engine_cases:losses", {"wrap": "ddp"})

The function gets the keyword arguments and returns anything that pickles. Importing torch and megatron-core costs more than most
cases: ranks are forked from a process that has done so (rank_imports.py), on GPUs started afresh. The ranks of one number stay
for some more calls; ranks on which anything failed are ended, and the next call starts others. They end with the tests
(conftest.py), or when the process that started them is gone.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import itertools
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
POLL_SECONDS = 0.02
END_SECONDS = 30.0
SAY_SECONDS = 2.0  # for a rank to write where it hangs
MAX_CALLS = 12  # bounds what is left of former engines (bench/equivalence/measure.py)
_running: dict[int, Ranks] = {}


def run_ranks(
    num_ranks: int, target: str, arguments: dict[str, Any], timeout_seconds: float = 500.0, *, alone: bool = False
) -> list[Any]:
    """Results in rank order. A failing rank raises AssertionError with the ranks' output.

    `alone`: in processes that have run nothing before and run nothing after.
    """
    ranks = _running.get(num_ranks)
    if ranks is not None and (alone or ranks.num_calls == MAX_CALLS):
        ranks.end()
        ranks = None
    ranks = _running[num_ranks] = ranks or Ranks(num_ranks)
    try:
        results = ranks.call(target, arguments, timeout_seconds)
    except BaseException:
        del _running[num_ranks]
        ranks.kill()
        raise
    if alone:
        _running.pop(num_ranks).end()
    return results


def end_ranks() -> None:
    """End all that stayed."""
    for ranks in _running.values():
        ranks.end()
    _running.clear()


class Ranks:
    """Processes that take one call after another from a folder."""

    def __init__(self, num_ranks: int) -> None:
        from bridge.transport.store import open_store
        from megasync.launch.driver import Place, rank_environments
        from megasync.launch.scope import LOOPBACK

        self.num_calls = 0
        self.folder = Path(tempfile.mkdtemp(prefix="megasync-ranks-"))
        self.output = self.folder / "output"
        self.output.touch()
        self._store = open_store(LOOPBACK)  # through which the ranks find each other
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        common = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TMPDIR": str(self.folder)}
        self.processes = [
            process_context().Process(target=serve, args=(self.folder, os.getpid(), {**common, **own}))
            for own in rank_environments([Place("", "")] * num_ranks, LOOPBACK, self._store.port)
        ]
        for process in self.processes:
            process.start()

    def call(self, target: str, arguments: dict[str, Any], timeout_seconds: float) -> list[Any]:
        number, self.num_calls = self.num_calls, self.num_calls + 1
        said_before = self.output.stat().st_size
        results = [self.folder / f"call{number}_rank{rank}" for rank in range(len(self.processes))]
        with own_core() as core:
            _put(self.folder / f"call{number}", (target, arguments, core))
            deadline = time.monotonic() + timeout_seconds
            while not all(path.exists() for path in results):
                ended = any(process.exitcode is not None for process in self.processes)
                if ended or time.monotonic() > deadline:
                    if not ended:
                        self._say_where()
                    said = self.output.read_bytes()[said_before:].decode(errors="replace")
                    what = "failed" if ended else f"took more than {timeout_seconds:g} s"
                    raise AssertionError(f"{target} on {len(self.processes)} ranks {what}:\n{said[-8000:]}")
                time.sleep(POLL_SECONDS)
        return [pickle.loads(path.read_bytes()) for path in results]

    def _say_where(self) -> None:
        """Each rank's threads, to the output."""
        for process in self.processes:
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(SAY_SECONDS)

    def end(self) -> None:
        """The ranks leave on their own; what does not is killed."""
        _put(self.folder / f"call{self.num_calls}", None)
        self._wait(END_SECONDS)

    def kill(self) -> None:
        for process in self.processes:
            process.terminate()
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
        self._wait(END_SECONDS / 3)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def own_core() -> Iterator[int | None]:
    """The core that all ranks of a call run on, where there are as many xdist workers as cores; else None: they run on any.

    Ranks that wake each other across cores take an eighth more CPU time. If there is one, it is a core that no other worker's
    ranks have.
    """
    cores = sorted(os.sched_getaffinity(0))
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")) < len(cores):
        yield None
        return
    with socket.socket(socket.AF_UNIX) as claim:  # its name is of no file, and ends with it
        for core in cores:
            with suppress(OSError):
                claim.bind(f"\0megasync-tests-core-{core}")
                break
        else:
            core = random.choice(cores)
        yield core


def process_context() -> Any:
    """Of multiprocessing. A process that has asked for GPUs must not be forked, and imports ask for them."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.rank_imports"])
    return context


def _put(path: Path, value: Any) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(value))
    partial.rename(path)


def serve(folder: Path, parent: int, environment: dict[str, str]) -> None:
    """What each rank does: call after call until there is a None or no parent."""
    os.environ.clear()
    os.environ |= environment
    tempfile.tempdir = None
    output = os.open(folder / "output", os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(output, stream.fileno())
    faulthandler.register(signal.SIGUSR1, file=output)
    try:
        _take_calls(folder, parent)
    finally:
        atexit._run_exitfuncs()  # multiprocessing's processes end without


def _take_calls(folder: Path, parent: int) -> None:
    rank, cores = os.environ["RANK"], os.sched_getaffinity(0)
    for number in itertools.count():
        given = folder / f"call{number}"
        while not given.exists():
            if not Path(f"/proc/{parent}").exists():
                return
            time.sleep(POLL_SECONDS)
        call = pickle.loads(given.read_bytes())
        if call is None:
            return
        target, arguments, core = call
        path, name = target.split(":")
        module = importlib.import_module(path)
        function = getattr(module, name)
        stay_on(cores if core is None or hasattr(module, "STARTS_PROCESSES") else {core})
        gc.freeze()  # what is here stays, modules above all: no collection need look through it again
        _put(folder / f"call{number}_rank{rank}", function(**arguments))
        gc.collect()


def stay_on(cores: set[int]) -> None:
    """All threads of this process."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            os.sched_setaffinity(int(thread.name), cores)
