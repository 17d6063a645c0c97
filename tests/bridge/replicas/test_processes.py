"""Descendants of a replica that are found, ended, or gone before anybody looks; programs that end.

python -m pytest tests/bridge/replicas/test_processes.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from bridge import processes

FAMILY = """
import multiprocessing.shared_memory, os, subprocess, sys, threading
lock = multiprocessing.get_context("spawn").Lock()
shared = [multiprocessing.shared_memory.SharedMemory(name, create=True, size=64) for name in sys.argv[1:]]
command = [sys.executable, "-c", "import time; time.sleep(600)"]
thread = threading.Thread(target=lambda: (subprocess.Popen(command), threading.Event().wait()), daemon=True)
thread.start()  # whose children are not the main thread's
subprocess.Popen(command)
while len(sys.stdin.readline()):
    threads = [threading.Thread(target=subprocess.run, args=(["true"],)) for _ in range(3)]
    [thread.start() for thread in threads]
    print(os.getpid(), flush=True)
"""


@pytest.fixture
def family() -> Iterator[subprocess.Popen[str]]:
    """A process with a child of its main thread, one of another thread, segments, and for each line some that end at once.

    The segments are named as vLLM names its own, of which the second kind is there on CPUs with AVX-512 only.
    """
    names = [f"psm_test{uuid4().hex[:8]}", f"test{uuid4().hex[:8]}-[0-1]-cpushm_0"]
    process = subprocess.Popen([sys.executable, "-c", FAMILY, *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    processes.end_descendants(process.pid)
    process.kill()
    process.communicate()
    for name in names:
        Path(f"/dev/shm/{name}").unlink(missing_ok=True)


def tick(family: subprocess.Popen[str]) -> None:
    assert family.stdin is not None and family.stdout is not None
    family.stdin.write("\n")
    family.stdin.flush()
    family.stdout.readline()


def until(condition, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def children(pid: int, pattern: str) -> set[int]:
    """Those of whose arguments one matches."""
    found = set()
    for child in processes.descendants(pid):
        with suppress(psutil.NoSuchProcess):
            found |= {child.pid for argument in child.cmdline() if re.fullmatch(pattern, argument)}
    return found


def lasting(pid: int) -> set[int]:
    return children(pid, r"import time; time\.sleep\(600\)")  # a fork has the family's own script at first


def is_over(pid: int) -> bool:
    """Ended, whether its parent has heard of it or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_every_thread_of_a_family_gets_a_lower_priority_and_none_a_higher_one(family: subprocess.Popen[str]) -> None:
    tick(family)
    until(lambda: len(lasting(family.pid)) == 2)
    os.setpriority(os.PRIO_PROCESS, family.pid, 15)
    processes.lower_priority(family.pid, 10)
    tasks = {
        int(thread.name): int(thread.name) == family.pid
        for pid in (family.pid, *(child.pid for child in processes.descendants(family.pid)))
        for thread in Path(f"/proc/{pid}/task").iterdir()
    }
    assert len(tasks) > 4
    assert {number: os.getpriority(os.PRIO_PROCESS, number) for number in tasks} == {
        number: 15 if is_first else 10 for number, is_first in tasks.items()
    }


def test_descendants_of_all_threads_are_ended_the_resource_tracker_is_not(family: subprocess.Popen[str]) -> None:
    tick(family)
    until(lambda: len(lasting(family.pid)) == 2)
    ended = lasting(family.pid)
    processes.end_descendants(family.pid)
    until(lambda: all(map(is_over, ended)))
    (tracker,) = children(family.pid, ".*resource_tracker.*")
    assert psutil.pid_exists(tracker) and family.poll() is None


def test_looking_while_threads_and_processes_come_and_go_misses_none_that_stay(family: subprocess.Popen[str]) -> None:
    tick(family)
    until(lambda: len(lasting(family.pid)) == 2)
    stay, over = lasting(family.pid), threading.Event()
    names = processes.shared_memory_below(family.pid)
    assert [name for name in names if "psm_test" in name] and [name for name in names if "-cpushm_0" in name]
    assert [name for name in names if "sem.mp-" in name]  # the lock, which its maker maps under another name

    def keep_going() -> None:
        while not over.is_set():
            tick(family)

    thread = threading.Thread(target=keep_going)
    thread.start()
    try:
        for _ in range(50):
            assert stay <= {child.pid for child in processes.descendants(family.pid)}
            assert processes.shared_memory_below(family.pid) == names
    finally:
        over.set()
        thread.join()


def test_nothing_is_found_of_a_process_that_is_gone() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert processes.shared_memory_below(process.pid) == set()
    processes.end_descendants(process.pid)
    assert processes.descendants(process.pid) == []


@pytest.mark.parametrize("folder", ["/tmp", "/scratch/" + 12 * "long/"])
def test_sockets_lie_where_their_paths_are_short_enough(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", folder)
    made = processes.make_sockets()
    assert Path(made).is_dir() and Path(made).parent == Path("/tmp")
    processes.remove_sockets(os.getpid())
    assert not Path(made).exists()


@pytest.mark.parametrize("name", ["cuda.shm.0.{pid:x}.test{some}", "torch_{pid}_{some}_0"])
def test_what_cuda_and_torch_keep_of_a_process_is_reported_from_that_of_others(name: str) -> None:
    paths = [f"/dev/shm/{name}".format(pid=pid, some=uuid4().hex[:8]) for pid in (2**31 - 2, 2**31 - 3)]
    mine, another = map(Path, paths)
    try:
        mine.touch()
        another.touch()
        assert processes.cuda_memory([2**31 - 2]) == {str(mine)}
    finally:
        mine.unlink(missing_ok=True)
        another.unlink(missing_ok=True)


LEAVING = """
import atexit, sys, time
from megasync.launch.processes import run_and_leave
def main(arguments):
    print("said", *arguments)
    {deed}
atexit.register(time.sleep, 600)
run_and_leave(main)
"""


@pytest.mark.parametrize(("deed", "code"), [("return 0", 0), ("return 3", 3), ("sys.exit(143)", 143)])
def test_nothing_that_libraries_do_at_exit_holds_a_program_that_is_done(deed: str, code: int) -> None:
    command = [sys.executable, "-c", LEAVING.format(deed=deed), "this"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (code, "said this\n")


UNDISTURBED = """
import os, signal
from megasync.launch.processes import end_on_sigterm, ignore_signals, run_and_leave
def main(arguments):
    end_on_sigterm(and_on_sigint=True)
    try:
        raise ValueError
    except ValueError:
        ignore_signals()
        return 3
    finally:
        for kind in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), kind)
        print("taken down")
run_and_leave(main)
"""


def test_no_signal_breaks_off_what_a_failed_program_takes_down() -> None:
    """torchrun sends a rank SIGTERM as soon as another one has ended."""
    done = subprocess.run([sys.executable, "-c", UNDISTURBED], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (3, "taken down\n"), done.stderr


WITH_RAY = """
import time
from megasync.launch.processes import end_on_sigterm, run_and_leave
from megasync.launch.ray_cluster import start_ray
def main(arguments):
    end_on_sigterm()
    stop = start_ray("local")
    try:
        print("there", flush=True)
        while True:  # a signal just before a `signal.pause` would be waited for
            time.sleep(0.1)
    finally:
        stop()
run_and_leave(main)
"""


WITHOUT_RAY = """
import os, signal, time
import psutil, ray
from bridge.config import ReplicaConfig
from bridge.processes import is_alive
from bridge.replicas.launched import ActorLauncher, ReplicaActor
from megasync.launch.ray_cluster import start_ray
class Deaf:
    def host_name(self): return os.getpid()
    def close(self): time.sleep(600)
start_ray("local")
handle = ray.remote(Deaf).options(num_cpus=0).remote()
pid = ray.get(handle.host_name.remote())
for process in psutil.Process().children(recursive=True):
    if process.name() in ("raylet", "gcs_server"):
        process.kill()
os.kill(pid, signal.SIGSTOP)  # else it may notice that its raylet is gone
ActorLauncher(ReplicaConfig("", "float32"))._end([ReplicaActor(handle, pid=pid, is_here=True)], seconds=1.0)
print(is_alive(pid), flush=True)
os._exit(0)
"""


def test_an_actor_whose_ray_is_gone_is_ended() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_RAY], capture_output=True, text=True, timeout=400, check=False)
    assert done.stdout == "False\n", done.stdout + done.stderr


def test_a_program_with_a_ray_of_its_own_ends_by_sigterm_as_any_other() -> None:
    with subprocess.Popen([sys.executable, "-c", WITH_RAY], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "there\n"
            process.terminate()
            assert process.wait(timeout=400) == 143
        finally:
            process.kill()
