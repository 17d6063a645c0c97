"""The loopback, through which all processes of a run on one machine talk, ports, and gloo and NCCL between two of them.

The two processes are probe.py's, and have a limit of time.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from megasync.diagnosis.finding import Finding, error, ok, warning
from megasync.launch.ray_cluster import free_port
from megasync.launch.scope import LOOPBACK, ON_LOOPBACK

PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
FEW_PORTS = 1000  # a run of a few replicas has some hundred connections
SECONDS = 5.0
ROOT = Path(__file__).resolve().parents[2]
PROBE, NUM_RANKS, DONE = "megasync.diagnosis.probe", 2, "all-reduce: "
NAMES = {"gloo": "gloo", "nccl": "NCCL"}
REMEDIES = {
    "gloo": "unset GLOO_SOCKET_IFNAME, or let it name an interface that `ip addr` lists; see that torch can be imported",
    "nccl": "run it again with NCCL_DEBUG=INFO; see driver, /dev/shm and NCCL_* variables; is it P2P? try NCCL_P2P_DISABLE=1",
}
LEAST_GB_PER_SECOND = {"gloo": 0.0, "nccl": 5.0}  # below it NCCL goes through host memory, or PCIe of one lane


def check_loopback(address: str = LOOPBACK) -> list[Finding]:
    """A connection to a socket of this process."""
    remedy = f"ip link set lo up; let no firewall refuse connections from {address} to itself"
    try:
        with closing(socket.create_server((address, 0))) as server:
            server.settimeout(SECONDS)
            with closing(socket.create_connection(server.getsockname(), timeout=SECONDS)) as client:
                accepted, _ = server.accept()
                with closing(accepted):
                    client.sendall(b"probe")
                    if accepted.recv(5) != b"probe":
                        return error("loopback", f"{address}: what was sent did not arrive", remedy)
    except OSError as problem:
        return error("loopback", f"{address}: {problem.strerror or problem}", remedy)
    return ok("loopback", f"{address} answers")


def read_port_range(file: Path = PORT_RANGE) -> tuple[int, int]:
    """The first and the last port that Linux hands out by itself."""
    first, last = map(int, file.read_text().split()[:2]) if file.is_file() else (32768, 60999)
    return first, last


def check_ports(first: int, last: int) -> list[Finding]:
    """Whether ports are free, and enough of them are handed out."""
    remedy = f"sysctl -w net.ipv4.ip_local_port_range='32768 60999', now {first} {last}"
    try:
        port = free_port()
    except RuntimeError as problem:
        return error("ports", str(problem), "end what listens on them (ss -tlnp)")
    if last - first + 1 < FEW_PORTS:
        return warning("ports", f"{max(0, last - first + 1)} are handed out by the kernel, {first} to {last}", remedy)
    return ok("ports", f"{port} is free; the kernel hands out {first} to {last}")


def check_proxy(environment: Mapping[str, str]) -> list[Finding]:
    """Job submission is HTTP on the loopback."""
    names = [name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if environment.get(name)]
    exempt = (environment.get("no_proxy") or environment.get("NO_PROXY") or "").replace(" ", "").split(",")
    if not names or "*" in exempt or LOOPBACK in exempt or "127.0.0.0/8" in exempt:
        return []
    seen = f"{names[0]} is set, and no_proxy leaves {LOOPBACK} out: submitting a job asks the proxy for this machine"
    return warning("proxy", seen, f"export no_proxy={','.join(filter(None, [*exempt, LOOPBACK, 'localhost']))}")


def check_collective(backend: str, environment: Mapping[str, str], seconds: float = 120.0) -> list[Finding]:
    """Two processes with this environment add numbers up. `seconds`: both are ended then."""
    name, (code, said) = NAMES[backend], run_pair(backend, environment, seconds)
    if code is None:
        return error(name, f"two processes did not find each other within {seconds:g} s: {said}", REMEDIES[backend])
    if code:
        return error(name, f"two processes failed: {said}", REMEDIES[backend])
    took, rate = map(float, said.removeprefix(DONE).split())
    told = f"two processes: {took * 1e3:.1f} ms, {rate:.1f} GB/s an all-reduce"
    if rate < LEAST_GB_PER_SECOND[backend]:
        return warning(name, told, "see `GPU links` and NCCL_* variables: GPUs of one host reach more")
    return ok(name, told)


def run_pair(backend: str, environment: Mapping[str, str], seconds: float) -> tuple[int | None, str]:
    """The first exit code that is not 0, None where a process had to be ended, and the last line of that process."""
    inherited = {name: value for name, value in environment.items() if not name.startswith("TORCHELASTIC_")}  # torchrun's store
    own = {**ON_LOOPBACK, **inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{environment.get('PYTHONPATH', '')}"}
    deadline, port = time.monotonic() + seconds, str(free_port())
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(rank) for rank in range(NUM_RANKS)]
        running = []
        try:
            for rank, file in enumerate(files):
                with file.open("wb") as output:
                    command = [sys.executable, "-m", PROBE, backend, str(rank), port]
                    running.append(subprocess.Popen(command, env=own, stdout=output, stderr=subprocess.STDOUT))
            while any(each.poll() is None for each in running) and time.monotonic() < deadline:
                if any(each.poll() for each in running):
                    break  # the other one waits for it
                time.sleep(0.05)
            codes = [each.poll() for each in running]
        finally:
            for each in running:
                each.kill()
                each.wait()
        place = next((rank for rank, code in enumerate(codes) if code), None)
        place = next((rank for rank, code in enumerate(codes) if code is None), 0) if place is None else place
        return codes[place], _last_line(files[place])


def _last_line(file: Path) -> str:
    """What was measured; else the last that says something, of a traceback the error."""
    lines = [line.strip() for line in file.read_text(errors="replace").splitlines() if line.strip()]
    done, errors = (
        [line for line in lines if line.startswith(DONE)],
        [line for line in lines if "Error" in line.partition(":")[0]],
    )
    return ((done or errors or lines or ["without a word"])[-1])[:300]
