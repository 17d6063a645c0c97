"""Programs that try to get out of the sandbox, and such that take too much. Each way of shutting in that works here is tried."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples import sandbox
from examples.python_tool import Outcome, PythonTool
from examples.sandbox import Limits, Sandbox, SandboxError

WAYS = {way.name: way for way in sandbox.kinds()}
SECONDS = 30.0  # for a program that is to end by itself, on a busy machine


@pytest.fixture(scope="module", params=WAYS)
def any_way(request: pytest.FixtureRequest) -> Sandbox:
    return working(request.param)


@pytest.fixture(scope="module", params=["bubblewrap", "unshare"])
def way(request: pytest.FixtureRequest) -> Sandbox:
    """The first with that program: as root where the tests are."""
    names = [name for name in WAYS if name.startswith(request.param)]
    if not names:
        pytest.skip(f"{request.param} is not installed")
    return working(names[0])


def working(name: str) -> Sandbox:
    if problem := sandbox.problem_of(WAYS[name]):
        pytest.skip(f"{name} does not work on this machine: {problem}")
    return WAYS[name]


def run(way: Sandbox, code: str, **limits: float) -> Outcome:
    tool = PythonTool(Limits(**{"seconds": SECONDS, **limits}), way)  # type: ignore[arg-type]
    return asyncio.run(tool.run(code))


def processes_with(word: str) -> list[str]:
    """Command lines of the machine's processes in which the word is."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        found += [line] if word in line else []
    return found


def test_what_a_program_prints_comes_back(any_way: Sandbox) -> None:
    code = "import sys, math\nprint('é🙂', math.sqrt(4)); print('err', file=sys.stderr)\nsys.stdout.buffer.write(b'\\xff')"
    assert run(any_way, code) == Outcome("é🙂 2.0\nerr\n\ufffd", 0)
    failed = run(any_way, "1 / 0")
    assert failed.exit_code == 1 and failed.text().endswith("ZeroDivisionError: division by zero\n[exit code 1]")
    assert run(any_way, "import os; os.abort()").exit_code == -6
    assert run(any_way, "import numpy; print(numpy.arange(3).sum())").output == "3\n"  # the environment's packages are there
    assert run(any_way, "print(input())").output.endswith("EOFError: EOF when reading a line\n")


def test_no_network(any_way: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
import socket
for host, port in (("127.0.0.1", {port}), ("10.0.0.1", 80), ("8.8.8.8", 53)):
    try:
        socket.create_connection((host, port), 1)
        print("connected", host)
    except OSError as error:
        print("no")
print(socket.if_nameindex())
"""
        assert run(any_way, code).output == "no\nno\nno\n[(1, 'lo')]\n"


def test_nothing_outside_of_tmp_is_written(any_way: Sandbox, tmp_path: Path) -> None:
    code = f"""
import os, sys
places = ["/", "/usr", "/usr/lib", "/etc", "/dev", "/root", "/home", sys.prefix, os.path.dirname(os.__file__), {str(tmp_path)!r}]
for folder in places:
    try:
        open(folder + "/megasync-was-here", "w").write("x")
        print("written:", folder)
    except OSError:
        pass
for path in ("/dev/sda", "/dev/vda", "/dev/mem", "/proc/sys/kernel/core_pattern", "/sys/power/state", os.__file__):
    try:
        open(path, "r+b")
        print("opened:", path)
    except OSError:
        pass
open("/tmp/mine", "w").write("x")
print(open("/tmp/mine").read())
"""
    assert run(any_way, code).output == "x\n"
    assert run(any_way, "import os; print(os.path.exists('/tmp/mine'))").output == "False\n"
    assert not list(tmp_path.iterdir())


def test_no_secret_is_read(any_way: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = secrets.token_hex(16)
    monkeypatch.setenv("MY_API_KEY", secret)
    (tmp_path / "key").write_text(secret)
    home = Path.home() / ".megasync-test-secret"
    home.write_text(secret)
    code = f"""
import glob, os
print(dict(os.environ))
of_processes = [*glob.glob("/proc/*/environ"), *glob.glob("/proc/*/cmdline")]
for path in ({str(tmp_path / "key")!r}, {str(home)!r}, {__file__!r}, "/etc/shadow", *of_processes):
    try:
        print(open(path, "rb").read())
    except OSError:
        pass
for number in range(3, 256):
    try:
        os.fstat(number)
        print("open file", number)
    except OSError:
        pass
"""
    try:
        outcome = run(any_way, code)
    finally:
        home.unlink()
    assert outcome.exit_code == 0
    assert outcome.output.count("\n") == 1 and secret not in outcome.output


def test_no_right_is_won_back(any_way: Sandbox) -> None:
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
MS_REMOUNT, MS_BIND, CLONE_NEWUSER, CLONE_NEWNS = 32, 4096, 0x10000000, 0x20000
def remounted():
    return libc.mount(b"none", b"/usr", None, MS_REMOUNT | MS_BIND, None) == 0 or libc.umount2(b"/usr", 2) == 0
print(remounted(), libc.mount(b"none", b"/tmp", b"proc", 0, None) == 0, libc.chroot(b"/tmp") == 0)
uid = os.getuid()
libc.unshare(CLONE_NEWUSER | CLONE_NEWNS)
print(remounted())
try:
    open("/usr/x", "w")
    print("written")
except OSError:
    pass
if uid:
    os.setuid(0)
"""
    lines = run(any_way, code).output.splitlines()
    assert lines[:2] == ["False False False", "False"]
    assert len(lines) == 2 or "PermissionError" in lines[-1] or "Invalid argument" in lines[-1]


def test_a_program_that_hangs_or_sleeps_is_ended(way: Sandbox) -> None:
    for code in (
        "while True: pass",
        "import os, signal, time\nsignal.signal(15, signal.SIG_IGN); os.close(1); os.close(2); time.sleep(999)",
    ):
        outcome = run(way, code, seconds=1)
        assert outcome.stopped == "ran longer than 1 s" and outcome.text() == "[stopped: ran longer than 1 s]"


def test_endless_output_is_cut(way: Sandbox) -> None:
    outcome = run(way, "while True: print('é' * 999)", output_characters=1000)
    assert outcome.stopped == "printed more than 1000 characters"
    assert outcome.output == f"{'é' * 999}\n"


def test_a_program_may_be_gone_when_its_output_is_read(way: Sandbox) -> None:
    """Another episode has held the process up meanwhile."""
    tool = PythonTool(Limits(output_characters=1000), way)

    async def held_up() -> Outcome:
        running = asyncio.ensure_future(tool.run("print('x' * 5000)"))
        await asyncio.sleep(0.1)  # it is started
        time.sleep(3)  # it ends
        return await running

    assert asyncio.run(held_up()).text() == f"{'x' * 1000}\n[stopped: printed more than 1000 characters]"


def test_memory_is_bounded(way: Sandbox) -> None:
    small = 128 << 20
    assert "MemoryError" in run(way, "x = bytearray(4 << 30)", memory_bytes=small).output
    many = "import os, time\nfor _ in range(3): os.fork()\nx = bytearray(64 << 20); time.sleep(60)"
    assert run(way, many, memory_bytes=small, processes=16).stopped == "took more than 128 MiB of memory"
    files = "for n in range(99): open(f'/tmp/{n}', 'wb').write(bytes(1 << 20))"
    assert "No space left" in run(way, files, file_bytes=8 << 20).output
    assert "File too large" in run(way, "open('/tmp/x', 'wb').write(bytes(9 << 20))", file_bytes=8 << 20).output


def test_a_fork_bomb_ends_and_leaves_nothing(way: Sandbox) -> None:
    word = f"bomb{secrets.token_hex(8)}"
    code = f"""
import os, time
word = '{word}'
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
"""
    outcome = run(way, code, seconds=3, processes=8)
    assert outcome.stopped in ("ran longer than 3 s", "had more than 8 processes")
    assert run(way, "print('fine')").output == "fine\n"


def test_children_end_with_their_program(way: Sandbox) -> None:
    word = f"child{secrets.token_hex(8)}"
    child = f"[sys.executable, '-c', 'import time; time.sleep(600)', '{word}'], start_new_session=True"
    start = f"import subprocess, sys; subprocess.Popen({child}, "
    begin = time.monotonic()
    for streams in ("stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)", ")"):  # one keeps the output open
        assert run(way, f"{start}{streams}; print('left')").output == "left\n"
    assert time.monotonic() - begin < SECONDS
    assert not processes_with(word)
    assert run(way, "import os; os.kill(-1, 9)").exit_code != 0
    assert processes_with("pytest") or processes_with("python")


def test_a_cancelled_call_ends_the_program(way: Sandbox) -> None:
    word = f"cancelled{secrets.token_hex(8)}"
    code = f"import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)', '{word}'])"

    async def cancel() -> None:
        call = asyncio.create_task(PythonTool(Limits(seconds=600), way).run(code))
        while not processes_with(word):
            assert not call.done()
            await asyncio.sleep(0.02)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(cancel())
    assert not processes_with(word)


def test_calls_side_by_side_and_arguments_as_a_model_writes_them(way: Sandbox) -> None:
    async def calls() -> list[str]:
        tool = PythonTool(Limits(seconds=SECONDS), way)
        assert tool.description["function"]["parameters"]["required"] == ["code"]
        codes = [json.dumps({"code": f"print({number} ** 2)"}) for number in range(6)]
        return list(await asyncio.gather(*(tool(code) for code in codes), tool("{"), tool("{}"), tool({"code": 5}), tool("[]")))

    said = asyncio.run(calls())
    assert said[:6] == [str(number**2) for number in range(6)]
    assert set(said[6:]) == {'error: the arguments must be {"code": "a Python program"}'}


def test_limits_of_the_process_that_calls_hold_too(way: Sandbox) -> None:
    code = f"""
import asyncio, resource
from examples import sandbox
from examples.python_tool import PythonTool
from examples.sandbox import Limits
way = next(way for way in sandbox.kinds() if way.name == {way.name!r})
for name in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE):
    resource.setrlimit(name, (1 << 29 if name == resource.RLIMIT_AS else 200,) * 2)
tool = PythonTool(Limits(seconds={SECONDS}, memory_bytes=4 << 30), way)
print(asyncio.run(tool.run("import resource; print(resource.getrlimit(resource.RLIMIT_AS), resource.getrlimit(7))")).output)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["(536870912,", "536870912)", "(200,", "200)"], done.stderr


def test_a_machine_without_a_sandbox_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    found = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name in ("bwrap", "setpriv") else found(name))
    sandbox.sandbox.cache_clear()
    try:
        with pytest.raises(SandboxError, match=r"unshare: setpriv not found.*Remedy: install bubblewrap"):
            PythonTool()
    finally:
        sandbox.sandbox.cache_clear()
    assert os.getpid()
