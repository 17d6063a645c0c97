"""Signs of life in a store whose process is stopped: who waits for an answer hears that nobody gives one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megasync.launch.ray_cluster import free_port
from megasync.nodes.store import Beats, HeadGoneError, NodeStore, silence
from tests.support.rewards import until

LOOPBACK = "127.0.0.1"
SERVER = f"""
import time
from megasync.nodes.store import NodeStore
store = NodeStore.listen("{LOOPBACK}", 0)
print(store.port, flush=True)
time.sleep(300)
"""


@contextmanager
def head() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that has a store, and the store's port."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def is_stopped(pid: int) -> bool:
    """All of its threads, each of which stops by itself: on a busy machine one may still answer."""
    return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in Path(f"/proc/{pid}/task").iterdir())


def test_who_waits_for_a_silent_head_hears_it(capfd: pytest.CaptureFixture[str]) -> None:
    with head() as (process, port):
        store, own = NodeStore.connect(LOOPBACK, port), NodeStore.connect(LOOPBACK, port)
        assert store is not None and own is not None
        beats = Beats(own, "beat/1", limit_seconds=3.0)
        store.set("key", 1)
        assert store.get("key") == 1
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: is_stopped(process.pid))
        begin = time.monotonic()
        with pytest.raises(HeadGoneError, match="is gone, or cannot be reached any more"):
            store.get("key")
        beats.close()
        assert time.monotonic() - begin < 10
    assert "no answer from the head node 127.0.0.1 for 3 s; this node ends" in capfd.readouterr().err


def test_a_node_hears_why_the_head_is_not_there() -> None:
    assert silence(LOOPBACK, free_port()) == "Connection refused"
    with socket.create_server((LOOPBACK, 0)) as other:
        told = silence(LOOPBACK, other.getsockname()[1])
    assert told.startswith("a program listens there that is no head of a run; end it, or write another port")
