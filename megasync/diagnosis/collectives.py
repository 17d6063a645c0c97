"""gloo and NCCL between two processes of this machine, with a limit of time. The processes are probe.py's."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from megasync.diagnosis.finding import Finding, error, ok, warning
from megasync.launch.ray_cluster import free_port
from megasync.launch.scope import ON_LOOPBACK

ROOT = Path(__file__).resolve().parents[2]
PROBE, NUM_RANKS, DONE = "megasync.diagnosis.probe", 2, "all-reduce: "
NAMES = {"gloo": "gloo", "nccl": "NCCL"}
REMEDIES = {
    "gloo": "unset GLOO_SOCKET_IFNAME, or let it name an interface that `ip addr` lists; see that torch can be imported",
    "nccl": "run it again with NCCL_DEBUG=INFO; see driver, /dev/shm and NCCL_* variables; is it P2P? try NCCL_P2P_DISABLE=1",
}
LEAST_GB_PER_SECOND = {"gloo": 0.0, "nccl": 5.0}  # below it NCCL goes through host memory, or PCIe of one lane


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
