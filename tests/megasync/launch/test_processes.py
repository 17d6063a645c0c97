"""How a program leaves by signals, of which a second one changes nothing, and nothing is said of it.

python -m pytest tests/megasync/launch/test_processes.py
"""

from __future__ import annotations

import signal
import subprocess
import sys

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
    time.sleep(60)
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
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (128 + min(kinds), "taken down\n", "")
