"""How a program leaves by signals, of which a second one changes nothing; and that a rank goes on unread.

python -m pytest tests/megasync/launch/test_leaving.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys, time
from megasync.launch.processes import end_on_sigterm

kinds = [signal.Signals(int(number)) for number in sys.argv[1:]]
end_on_sigterm(and_on_sigint=True)
try:
    signal.pthread_sigmask(signal.SIG_BLOCK, kinds)
    for kind in kinds:
        os.kill(os.getpid(), kind)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, kinds)
    time.sleep(600)
finally:
    for kind in kinds:
        os.kill(os.getpid(), kind)
    time.sleep(0.1)
    print("taken down", flush=True)
"""


@pytest.mark.parametrize("kinds", [[signal.SIGTERM], [signal.SIGINT], [signal.SIGINT, signal.SIGTERM]])
def test_signals_that_come_at_once_end_a_program_once(kinds: list[signal.Signals]) -> None:
    """As a rank's do, which is in a collective while Ctrl-C and then its launcher's SIGTERM come."""
    command = [sys.executable, "-c", PROGRAM, *(str(int(kind)) for kind in kinds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (128 + min(kinds), "taken down\n", "")


UNREAD = """
import logging, subprocess, sys
logging.basicConfig(format="%(message)s")
from megasync.launch.processes import run_and_leave

def main(arguments):
    print("the first line", flush=True)
    sys.stdin.readline()  # until nobody reads any more
    for number in range(1000):
        print("x" * 1000, flush=number % 2 == 0)
        print("y" * 1000, file=sys.stderr)
        logging.warning("z")  # by the stream that was there before
    subprocess.run(["echo", "of a child"], check=True)
    return 7

run_and_leave(main)
"""


def test_a_rank_goes_on_where_nobody_reads_its_output_any_more() -> None:
    """`megasync train CONFIG 2>&1 | head -1`: the run, of hours, is not lost with its reader."""
    command = [sys.executable, "-c", UNREAD]
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "a rank's"}
    started = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert started.stdin is not None and started.stdout is not None
    assert started.stdout.readline() == "the first line\n"
    started.stdout.close()
    started.stdin.close()
    assert started.wait(300) == 7


def test_a_rank_goes_on_where_the_disk_of_its_log_is_full() -> None:
    """`megasync train CONFIG > train.log` on a full disk: lines of the log are lost, the run is not."""
    program = "from megasync.launch.processes import run_and_leave\nrun_and_leave(lambda _: print('lost', flush=True) or 7)"
    command = [sys.executable, "-c", program]
    with Path("/dev/full").open("w") as full:
        environment = os.environ | {"TORCHELASTIC_RUN_ID": "a rank's"}
        done = subprocess.run(command, env=environment, stdout=full, stderr=full, check=False, timeout=300)
    assert done.returncode == 7


def test_a_rank_may_start_without_any_output() -> None:
    """As a job of some schedulers does: `... >&- 2>&-`."""
    program = "from megasync.launch.processes import run_and_leave\nrun_and_leave(lambda _: print('lost') or 7)"
    command = ["sh", "-c", '"$0" -c "$1" >&- 2>&-', sys.executable, program]
    assert subprocess.run(command, env=os.environ | {"TORCHELASTIC_RUN_ID": "a rank's"}, check=False, timeout=300).returncode == 7


def test_what_is_read_comes_whole_and_in_its_encoding() -> None:
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "a rank's", "PYTHONIOENCODING": "latin-1"}
    program = "from megasync.launch.processes import run_and_leave\nrun_and_leave(lambda _: print('é' * 100_000) or 0)"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True, timeout=300)
    assert done.stdout == b"\xe9" * 100_000 + b"\n" and done.stderr == b""


def test_a_rank_goes_on_whose_terminal_was_closed() -> None:
    """`megasync train CONFIG &`, and then the end of the terminal, whose shell sends no SIGHUP to what is in the background."""
    ours, theirs = os.openpty()
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "a rank's"}
    command = [sys.executable, "-c", UNREAD]
    started = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs)
    assert started.stdin is not None
    os.close(theirs)
    assert os.read(ours, 100) == b"the first line\r\n"
    os.close(ours)
    started.stdin.close()
    assert started.wait(300) == 7
