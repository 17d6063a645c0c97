"""Proxies; NCCL, and gloo over the loopback, through which all processes of a run on one machine communicate."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from megasync.launch.machine import Finding
from megasync.launch.scope import LOOPBACK, ON_LOOPBACK

PROBE_SECONDS = 120.0
ROOT = Path(__file__).resolve().parents[3]
MIN_NCCL_GB_PER_SECOND = 5.0  # below it NCCL goes through host memory, or PCIe of one lane
REMEDIES = {
    "gloo": "unset GLOO_SOCKET_IFNAME, or let it name an interface of `ip addr`; ip link set lo up; is torch importable?",
    "nccl": "run it again with NCCL_DEBUG=INFO; see driver, /dev/shm and NCCL_* variables; is it P2P? try NCCL_P2P_DISABLE=1",
}


def check_proxy(environment: Mapping[str, str]) -> Finding:
    """Job submission is HTTP on the loopback."""
    names = [name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if environment.get(name)]
    exempt = (environment.get("no_proxy") or environment.get("NO_PROXY") or "").replace(" ", "").split(",")
    if not names or {"*", LOOPBACK, "127.0.0.0/8"} & set(exempt):
        return Finding("proxy", "ok", "none for the loopback")
    seen = f"{names[0]} is set, and no_proxy leaves {LOOPBACK} out: submitting a job would ask the proxy for this machine"
    return Finding("proxy", "warning", seen, f"export no_proxy={','.join(filter(None, [*exempt, LOOPBACK, 'localhost']))}")


def run_probe(backend: str, environment: Mapping[str, str], seconds: float = PROBE_SECONDS) -> tuple[int | None, str]:
    """Exit code, None after `seconds`, and the last line of output of two processes that all-reduce with this environment."""
    inherited = {name: value for name, value in environment.items() if not name.startswith("TORCHELASTIC_")}  # torchrun's store
    path = f"{ROOT}:{environment.get('PYTHONPATH', '')}"
    own = {**ON_LOOPBACK, **inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "megasync.tools.doctor.probe", backend]
    with subprocess.Popen(
        command, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as running:
        try:
            lines = running.communicate(timeout=seconds)[0].strip().splitlines()
            return running.returncode, (lines or ["no output"])[-1][:300]
        except subprocess.TimeoutExpired:
            return None, f"not done after {seconds:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)


def check_collective(backend: str, code: int | None, output: str) -> Finding:
    """`code`, `output`: of `run_probe`; where it worked, seconds and GB/s of an all-reduce."""
    name = {"gloo": "gloo", "nccl": "NCCL"}[backend]
    if code != 0:
        return Finding(name, "error", f"an all-reduce of two processes failed: {output}", REMEDIES[backend])
    took, rate = map(float, output.split())
    seen = f"two processes: {took * 1e3:.1f} ms, {rate:.1f} GB/s an all-reduce"
    if backend == "nccl" and rate < MIN_NCCL_GB_PER_SECOND:
        remedy = "see `nvidia-smi topo -m` for NVLink and peer access, and NCCL_* variables: GPUs of one host reach more"
        return Finding(name, "warning", seen, remedy)
    return Finding(name, "ok", seen)
