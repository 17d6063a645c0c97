"""The loopback, through which all processes of a run on one machine talk, and ports."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from megasync.diagnosis.finding import Finding, error, ok, warning
from megasync.launch.ray_cluster import free_port
from megasync.launch.scope import LOOPBACK

PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
FEW_PORTS = 1000  # a run of a few replicas has some hundred connections
SECONDS = 5.0


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
