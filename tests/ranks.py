"""Runs a function on N ranks under torchrun's own launcher and brings each rank's result back.

    results = run_ranks(2, "tests.engine_cases:losses", {"wrap": "ddp"})

The function gets the keyword arguments and returns anything that pickles. The ranks of one number stay for some more calls,
since importing torch and megatron-core costs more than most cases; ranks on which anything failed are ended, and the next
call starts others. They end with the tests (conftest.py), or when the process that started them is gone.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
POLL_SECONDS = 0.02
MAX_CALLS = 12  # bounds what is left of former engines (bench/equivalence/groups.py)
_running: dict[int, Ranks] = {}


def run_ranks(
    num_ranks: int, target: str, arguments: dict[str, Any], timeout_seconds: float = 300.0, *, alone: bool = False
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
    """One torchrun whose ranks take one call after another from a folder."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks, self.num_calls = num_ranks, 0
        self.folder = Path(tempfile.mkdtemp(prefix="megasync-ranks-"))
        self.output = self.folder / "output"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)),
            *("-m", "tests.ranks", str(self.folder), str(os.getpid())),
        ]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TMPDIR": str(self.folder)}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def call(self, target: str, arguments: dict[str, Any], timeout_seconds: float) -> list[Any]:
        number, self.num_calls = self.num_calls, self.num_calls + 1
        said_before = self.output.stat().st_size
        _put(self.folder / f"call{number}", (target, arguments))
        results = [self.folder / f"call{number}_rank{rank}" for rank in range(self.num_ranks)]
        deadline = time.monotonic() + timeout_seconds
        while not all(path.exists() for path in results):
            ended = self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                said = self.output.read_bytes()[said_before:].decode(errors="replace")
                what = "failed" if ended else f"took more than {timeout_seconds:g} s"
                raise AssertionError(f"{target} on {self.num_ranks} ranks {what}:\n{said[-8000:]}")
            time.sleep(POLL_SECONDS)
        return [pickle.loads(path.read_bytes()) for path in results]

    def end(self) -> None:
        """The ranks leave on their own; what does not is killed."""
        _put(self.folder / f"call{self.num_calls}", None)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _put(path: Path, value: Any) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(value))
    partial.rename(path)


def serve(folder: Path, parent: int) -> None:
    """What each rank does: call after call until there is a None or no parent."""
    rank = os.environ["RANK"]
    for number in itertools.count():
        path = folder / f"call{number}"
        while not path.exists():
            if not Path(f"/proc/{parent}").exists():
                return
            time.sleep(POLL_SECONDS)
        call = pickle.loads(path.read_bytes())
        if call is None:
            return
        target, arguments = call
        module, name = target.split(":")
        function = getattr(importlib.import_module(module), name)
        if number == 0:  # what was imported stays: no collection need look through it again
            gc.collect()
            gc.freeze()
        _put(folder / f"call{number}_rank{rank}", function(**arguments))
        gc.collect()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
