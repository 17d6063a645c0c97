"""The head's store where its process is stopped: a client does not wait for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from megasync.launch.head_store import HeadLostError, HeadStore, is_own
from megasync.launch.ray_cluster import free_port
from megasync.launch.connect import connection_problem

LOOPBACK = "127.0.0.1"
SERVER = """
import sys, time
from megasync.launch.head_store import HeadStore
store = HeadStore.listen("127.0.0.1", int(sys.argv[1]))
print(store.of_head, flush=True)
time.sleep(300)
"""


def ask_for_ever(store: HeadStore) -> None:
    """A thread of a stopped process may still answer for a moment."""
    while True:
        store.get("key")


def test_a_client_of_a_stopped_head_fails_at_the_limit() -> None:
    port = free_port()
    with subprocess.Popen([sys.executable, "-c", SERVER, str(port)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "True\n"
            store = HeadStore.connect(LOOPBACK, port)
            assert store is not None and HeadStore.listen(LOOPBACK, port) is None
            store.limit_response_time(2.0)
            store.set("key", 1)
            assert store.get("key") == 1 and store.get("other") is None
            os.kill(process.pid, signal.SIGSTOP)
            begin = time.monotonic()
            with pytest.raises(HeadLostError):
                ask_for_ever(store)
            assert time.monotonic() - begin < 10
        finally:
            process.kill()


def test_nobody_listens() -> None:
    assert not is_own("no..host") and HeadStore.listen("no..host", 29400) is None
    port = free_port()
    assert connection_problem(LOOPBACK, port) == "Connection refused" and HeadStore.connect(LOOPBACK, port) is None
