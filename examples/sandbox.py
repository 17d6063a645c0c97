"""Commands that isolate a Python program: no network, a read-only root that contains only Python, a /tmp of its own.

Uses bubblewrap if it is installed and works, else util-linux's unshare and mount; as root, or as any user through user
namespaces. The program sees only its own processes, and no environment variables, home folder or data. If started as root, it
runs as a user that owns nothing. Leaves out limits of time and output (python_tool.py), and a filter of system calls: it does not
protect against exploits of the kernel.

    command = sandbox().command(limits, folder)      # SandboxError if no sandbox works on this machine
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TMP = "/tmp"  # noqa: S108 # the sandbox's own
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": TMP, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
PROBE_SECONDS = 20.0
# Runs in the sandbox: drops all privileges, then executes Python, which reads the program from stdin.
LAUNCHER = """
import ctypes, json, os, resource, sys
limits = json.loads(sys.argv[1])
for name, value in limits["rlimits"].items():
    hard = resource.getrlimit(getattr(resource, name))[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(getattr(resource, name), (value, value))
libc = ctypes.CDLL(None, use_errno=True)
for capability in range(64):
    libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
if limits["uid"]:
    os.setgroups([])
    os.setgid(limits["uid"])
    os.setuid(limits["uid"])
libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
os.chdir("/tmp")
os.execv(sys.executable, [sys.executable, "-I", "-B", "-u", "-"])
"""
# For unshare: creates the root of the sandbox in the new mount namespace. $1: an empty folder; the rest: the program.
BUILD_ROOT = """
set -e
root=$1
shift
mount -t tmpfs -o size=1m,mode=755 none "$root"
mkdir "$root/tmp"
mount -t tmpfs -o size={tmp_bytes},mode=1777,nosuid,nodev none "$root/tmp"
{binds}
mount -o remount,bind,ro "$root"
chroot "$root" "$@"
exit $?
"""


class SandboxError(RuntimeError):
    """No sandbox works on this machine; the text has the reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one run. `memory_bytes`: of each process, and of all together, which is polled several times a second."""

    seconds: float = 10.0
    memory_bytes: int = 512 << 20
    processes: int = 16
    output_characters: int = 10_000
    file_bytes: int = 32 << 20  # of one file, and of all files in /tmp

    def arguments(self, *, drop_user: bool) -> str:
        """Arguments of LAUNCHER as JSON. `drop_user`: run as a random user id, since the kernel limits processes per user."""
        rlimits = {
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_CPU": int(self.seconds) + 1,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NOFILE": 256,
            "RLIMIT_CORE": 0,
            "RLIMIT_NPROC": self.processes,
        }
        uid = (1 << 20) + secrets.randbelow(1 << 24) if drop_user else 0
        return json.dumps({"rlimits": rlimits, "uid": uid})


@dataclass(frozen=True, slots=True)
class Sandbox:
    """One kind of sandbox. `command` needs an empty folder that exists during the run."""

    name: str
    drops_user: bool  # it runs as root without a user namespace
    wrap: Callable[[Limits, str], list[str]]

    def command(self, limits: Limits, folder: str) -> list[str]:
        """The command that runs a Python program from stdin. Its processes end with it, and with the process that started it."""
        inner = [sys.executable, "-I", "-B", "-c", LAUNCHER, limits.arguments(drop_user=self.drops_user)]
        return ["setpriv", "--pdeathsig", "KILL", *self.wrap(limits, folder), *inner]


@functools.cache
def sandbox() -> Sandbox:
    """The first kind of sandbox that works on this machine.

    Raises:
        SandboxError: none works.
    """
    problems = []
    for kind in kinds():
        problem = problem_of(kind)
        if not problem:
            return kind
        problems.append(f"{kind.name}: {problem}")
    remedy = "install bubblewrap, or allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1)"
    raise SandboxError("no sandbox works on this machine. " + "; ".join(problems) + f". Remedy: {remedy}")


def kinds() -> Iterator[Sandbox]:
    """All kinds, the best first. If the program does not run as another user, only python_tool.py limits its processes."""
    users = (True, False) if os.getuid() == 0 else (False,)
    if shutil.which("bwrap"):
        for as_root in users:
            yield Sandbox("bubblewrap" + " as root" * as_root, as_root, functools.partial(_bubblewrap, as_root))
    for as_root in users:
        yield Sandbox("unshare" + " as root" * as_root, as_root, functools.partial(_unshare, as_root))


def problem_of(kind: Sandbox) -> str:
    """The reason why the sandbox does not work; empty if it works."""
    import tempfile

    missing = [name for name in ("setpriv", "mount", "chroot", "unshare") if not shutil.which(name)]
    if missing:
        return f"{', '.join(missing)} not found"
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                kind.command(Limits(), folder),
                input="print(6 * 7)", env=ENVIRONMENT, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"took longer than {PROBE_SECONDS:.0f} s"
    return "" if done.stdout.strip() == "42" else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]


def _folders() -> tuple[list[str], dict[str, str]]:
    """Folders that are visible in the sandbox (Python, its packages, the system's libraries), and links at the root."""
    links = {name: str(Path(name).readlink()) for name in ("/bin", "/lib", "/lib64") if Path(name).is_symlink()}
    wanted = ["/usr", "/etc/ld.so.cache", "/etc/alternatives", sys.base_prefix, sys.prefix]
    wanted += [name for name in ("/bin", "/lib", "/lib64") if name not in links]
    found = [name for name in dict.fromkeys(wanted) if Path(name).exists()]
    inner = {name for name in found if any(other != name and Path(name).is_relative_to(other) for other in found)}
    return [name for name in found if name not in inner], links


def _parents(names: Sequence[str]) -> list[str]:
    """Parent folders of `names`, the outermost first."""
    above = {str(parent) for name in names for parent in Path(name).parents if str(parent) not in ("/", TMP)}
    return sorted(above - set(names), key=lambda name: name.count("/"))


def _bubblewrap(as_root: bool, limits: Limits, _folder: str) -> list[str]:
    folders, links = _folders()
    command = ["bwrap", "--die-with-parent", "--new-session", "--clearenv"]
    if as_root:
        command += [
            "--unshare-ipc",
            "--unshare-pid",
            "--unshare-net",
            "--unshare-uts",
            "--unshare-cgroup-try",
            "--cap-drop",
            "ALL",
        ]
        for capability in ("SETUID", "SETGID", "SETPCAP"):  # LAUNCHER needs and drops them
            command += ["--cap-add", f"CAP_{capability}"]
    else:
        command += ["--unshare-all"]
    command += ["--perms", "1777", "--size", str(limits.file_bytes), "--tmpfs", TMP]  # first, since Python may be in /tmp
    for parent in _parents((*folders, *DEVICES)):  # else only root could read them
        command += ["--dir", parent]
    for name in folders:
        command += ["--ro-bind", name, name]
    for name, target in links.items():
        command += ["--symlink", target, name]
    for name in DEVICES:
        command += ["--dev-bind", name, name]
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    return [*command, "--remount-ro", "/"]


def _unshare(as_root: bool, limits: Limits, folder: str) -> list[str]:
    folders, links = _folders()
    binds = [f'mkdir "$root"{shlex.quote(parent)}' for parent in _parents((*folders, *DEVICES))]
    for name in (*folders, *DEVICES):
        source, inside = shlex.quote(name), f'"$root"{shlex.quote(name)}'
        binds.append(f"{'mkdir' if Path(name).is_dir() else 'touch'} {inside}; mount --rbind {source} {inside}")
        if name not in DEVICES:
            binds.append(f"mount -o remount,bind,ro,nosuid {inside}")
    binds += [f'ln -s {shlex.quote(target)} "$root"{shlex.quote(name)}' for name, target in links.items()]
    script = BUILD_ROOT.format(binds="\n".join(binds), tmp_bytes=limits.file_bytes)
    user = [] if as_root else ["--user", "--map-root-user"]
    namespaces = ["--mount", "--propagation", "private", "--net", "--pid", "--fork", "--kill-child", "--ipc", "--uts"]
    return [
        "unshare",
        *user,
        *namespaces,
        "env",
        "-i",
        *(f"{name}={value}" for name, value in ENVIRONMENT.items()),
        "sh",
        "-c",
        script,
        "sh",
        folder,
    ]
