"""A command's signals around the replicas that it starts."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

STARTS_PROCESSES = True  # see ranks.py
COMMAND = """
import time
from contextlib import nullcontext
from megasync.config.schema import Config
from megasync.tools.serving import replicas
replicas.replicas = lambda config, warms_up: nullcontext()
with replicas.served(Config()):
    pass
print("over", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
def test_signals_end_a_command_that_goes_on_after_its_replicas(sent: signal.Signals, code: int) -> None:
    with subprocess.Popen([sys.executable, "-c", COMMAND], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "over\n"
        command.send_signal(sent)
        assert command.wait(timeout=120) == code
