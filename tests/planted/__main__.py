"""Plants one fault after the other in a copy of the repository and prints which test finds it.

    python -m tests.planted                           # all faults, each against the tests that the list names
    python -m tests.planted --only lora-scale mask    # those whose name holds one of these words
    python -m tests.planted --tier default            # against all tests that CI runs; `all`: those marked long, too

A fault's tests run one after the other, without those marked long; only where none of them fails those marked long follow. The
exit code is 1 where a fault is not found. Each run of pytest takes the environment of launch/test.sh.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.planted.faults import ROOT, Fault, read_faults

LIMIT_SECONDS = 900  # of one run of pytest; one that hangs has found the fault, too
TIERS = {"default": "not gpu and not long", "long": "not gpu and long"}
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+)", re.MULTILINE)  # of the summary, with the reason
NOTHING_RUN = 5  # pytest's exit code


@dataclass(frozen=True)
class Catch:
    """What became of a fault; `test`, the first that failed and why, and `tier` are empty where nothing did."""

    fault: str
    file: str
    test: str
    tier: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.fault:44} {self.tier or 'NOT CAUGHT':10} {self.seconds:6.0f} s  {self.test:.150}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description="Which test finds which fault.")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="faults whose name holds one of these")
    parser.add_argument("--tier", choices=["default", "all"], help="run these tests instead of those that the list names")
    parser.add_argument("--to", type=Path, metavar="FILE", help="append each result as a line of JSON")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # pytest has a session of its own, and ends with us
    chosen = [fault for fault in read_faults() if any(word in fault.name for word in given.only)]
    num_missed = 0
    with tempfile.TemporaryDirectory(prefix="megasync-planted-") as folder:
        copy = copy_repository(Path(folder) / "copy")
        for fault in chosen:
            catch = plant(fault, copy, given.tier)
            num_missed += not catch.test
            print(catch, flush=True)
            if given.to is not None:
                with given.to.open("a") as file:
                    file.write(json.dumps(asdict(catch)) + "\n")
    print(f"{len(chosen) - num_missed} of {len(chosen)} faults are caught")
    return int(num_missed > 0)


def copy_repository(target: Path) -> Path:
    """All files of the working tree that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def plant(fault: Fault, copy: Path, tier: str | None) -> Catch:
    """Run the tests with the fault planted, up to the first that fails."""
    begin = time.monotonic()
    with fault.planted(copy):
        for arguments, name in runs(fault, tier):
            if test := first_failure(copy, arguments):
                return Catch(fault.name, fault.file, test, name, time.monotonic() - begin)
    return Catch(fault.name, fault.file, "", "", time.monotonic() - begin)


def runs(fault: Fault, tier: str | None) -> Iterator[tuple[list[str], str]]:
    """Arguments of pytest and the tier that they are of, in the order in which they are tried."""
    for name in ("default", "long") if tier != "default" else ("default",):
        for chosen in [["tests", "--all"]] if tier else [[test] for test in fault.tests]:
            yield [*chosen, "-m", TIERS[name]], name


def first_failure(copy: Path, arguments: Sequence[str]) -> str:
    """The first test that fails or cannot be collected; empty where all pass."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MEGASYNC_ROOT")}
    environment |= {"MEGASYNC_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    options = ["-x", "-q", "-p", "no:cacheprovider", "--ignore", "tests/planted"]
    with tempfile.TemporaryFile("w+") as output:  # a pipe would be held open by processes that a fault leaves behind
        run = subprocess.Popen(
            ["./launch/test.sh", *arguments, *options],
            cwd=copy, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = run.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"{arguments[0]} has no end within {LIMIT_SECONDS} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
        if code in (0, NOTHING_RUN):
            return ""
        output.seek(0)
        found = FAILED.search(output.read())
    return found[1] if found else f"{arguments[0]} ends with exit code {code}"


if __name__ == "__main__":
    sys.exit(main())
