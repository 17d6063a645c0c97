"""The documents' commands that need a GPU, on such: tests/doc_commands_gpu.sh makes what this needs and calls it.

    python -m tests.doc_commands_gpu OUT [--seconds 240] [--beside 5] [key=value ...]
    python -m tests.doc_commands_gpu OUT --as-written [--others REGEX] [--seconds 1200]

From a fresh folder, in order: the quickstart, alone until its first RL step; the real run of the README; then, several beside
each other, what looks at that run. Lines are as written but for FEWER, which says what makes them shorter, on one GPU. With
`--as-written` they are not made shorter and have all GPUs, one after another; what looks at the run has a GPU of its own.
With `--others` those of the pages that it is found in run instead. What would begin after `--seconds` is left out. Writes
OUT/commands.jsonl, a line a command as it ends, and a log beside it for each. `key=value` goes to the real run and to what has no
run, for a try on a CPU. Where smollm2/ is there, it is not made.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from megasync.launch.devices import visible_devices
from tests.doc_commands import PLACEHOLDERS, Command, collect, write_files

FIRST = r"^\./launch/quickstart\.sh$"
ASSETS, TRAIN = r"^megasync assets ", r"^megasync train configs/smollm2\.yaml"
AFTER = r"runs/smollm2|^megasync (evaluate|generate) models/mine"
NUM_STEPS = 8
# Lines of 100 steps become those of NUM_STEPS, on one GPU in turns, with little memory so that others fit beside it.
SMALL = "rollout.gpu_memory_utilization=0.1 rollout.kv_cache_bytes=4GiB rollout.enforce_eager=true"
IN_TURNS = "rollout.placement=colocated rollout.max_staleness=0 rollout.on_update=drain"
SHORT = f"run.steps={NUM_STEPS} data.batch_size=16 rollout.evaluate_every_steps=4 checkpoint.every_steps=4"
LOGGED = {"megasync train configs/smollm2.yaml": "megasync train configs/smollm2.yaml sync.log=deltas"}  # for docs/verify.md
FEWER = {
    "megasync train configs/smollm2.yaml": f"megasync train configs/smollm2.yaml sync.log=deltas {SHORT} {IN_TURNS} {SMALL}",
    "--step 50": "--step 4",
    "87": "7",
    "v87": "v7",
}
FIRST_STEP = Path("runs/quickstart/rl/metrics.jsonl")


def as_run(command: Command, overrides: list[str], *, as_written: bool) -> str:
    """The line with files that are there, and fewer steps unless `as_written`."""
    line, small = command.line, [] if as_written else [SMALL]
    more = overrides if re.search(TRAIN, line) else [*small, *overrides] if "models/mine" in line else []
    for written, instead in (PLACEHOLDERS | (LOGGED if as_written else FEWER)).items():
        line = re.sub(rf"(?<!\w){re.escape(written)}(?!\w)", instead, line)
    return " ".join([line, *more])


class Runner:
    """Runs lines in the folder, until its time is over."""

    def __init__(self, to: Path, seconds: float, limit: float, overrides: list[str], *, as_written: bool) -> None:
        self._to, self._limit, self._overrides, self._as_written = to, limit, overrides, as_written
        self._end = time.monotonic() + seconds
        self._free = free_gpus(visible_devices()) if as_written else None
        self.failed = 0
        self.has_stepped = threading.Event()  # the quickstart, or it ended without

    def run_on_one(self, command: Command, number: int) -> None:
        """With `as_written` on a GPU that no other command has meanwhile."""
        if self._free is None:
            self.run(command, number)
            return
        gpu = self._free.get()
        try:
            self.run(command, number, {"CUDA_VISIBLE_DEVICES": gpu})
        finally:
            self._free.put(gpu)

    def run(self, command: Command, number: int, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        line, begin = as_run(command, self._overrides, as_written=self._as_written), time.monotonic()
        figures = {"page": command.page, "line": command.line, "run": line}
        if begin > self._end:
            self._tell(figures | {"left_out": "no time"})
            return
        write_files(Path.cwd())
        with (self._to / f"{number:02}.log").open("w", encoding="utf-8") as log:
            shell = ["timeout", f"{self._limit:g}", "bash", "-c", line]
            reported = subprocess.Popen(shell, stdout=log, stderr=subprocess.STDOUT, env=os.environ | environment)
            if re.search(FIRST, command.line):
                figures |= {"first_step_seconds": first_step(reported, begin)}
                self.has_stepped.set()
            code = reported.wait()
        self.failed += code != 0
        self._tell(figures | {"exit_code": code, "seconds": round(time.monotonic() - begin, 1), "log": f"{number:02}.log"})

    def _tell(self, figures: dict[str, object]) -> None:
        with (self._to / "commands.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(figures) + "\n")
        print(figures, flush=True)


def free_gpus(names: Sequence[str]) -> queue.SimpleQueue[str] | None:
    """None: there are none."""
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        free.put(name)
    return free if names else None


def first_step(process: subprocess.Popen[bytes], begin: float) -> float | None:
    """Seconds until the first RL step was logged; None where the command ended before."""
    while process.poll() is None:
        if FIRST_STEP.is_file() and FIRST_STEP.stat().st_size:
            return round(time.monotonic() - begin, 1)
        time.sleep(0.2)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("to", type=Path, metavar="OUT")
    parser.add_argument("--seconds", type=float, default=240.0, help="after so many nothing more begins")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds that one command may take")
    parser.add_argument("--beside", type=int, default=5, help="so many at a time of those that look at the run")
    parser.add_argument("--as-written", action="store_true", help="nothing is made shorter; on all GPUs")
    parser.add_argument("--others", metavar="REGEX", help="instead of them the pages' commands in which it is found")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the real run")
    given = parser.parse_intermixed_args()
    given.to.mkdir(parents=True, exist_ok=True)
    if Path("runs").exists():
        parser.error(f"{Path.cwd()}: not fresh, runs/ is there; tests/doc_commands_gpu.sh makes a copy")
    runner = Runner(given.to.resolve(), given.seconds, given.limit, given.overrides, as_written=given.as_written)
    commands = list(dict.fromkeys(collect()))
    if given.others:
        for number, command in enumerate(command for command in commands if re.search(given.others, command.line)):
            runner.run(command, number)
        return int(runner.failed > 0)
    assets = ASSETS if not Path("smollm2").exists() else "^$"
    parts = [[command for command in commands if re.search(part, command.line)] for part in (FIRST, assets, TRAIN, AFTER)]
    numbers = {command: number for number, command in enumerate(command for part in parts for command in part)}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        quickstart = pool.submit(runner.run, parts[0][0], numbers[parts[0][0]])
        runner.has_stepped.wait()
        if given.as_written:
            quickstart.result()
        for command in (*parts[1], *parts[2]):
            runner.run(command, numbers[command])
        quickstart.result()
    with concurrent.futures.ThreadPoolExecutor(given.beside) as pool:
        list(pool.map(runner.run_on_one, parts[3], (numbers[command] for command in parts[3])))
    return int(runner.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
