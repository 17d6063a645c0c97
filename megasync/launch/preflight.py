"""The comparison of a run's nodes before it starts: code, Python, packages, config, files; and what the figures of probe.py mean.

Each finding names its node and the remedy. Leaves out the measuring between nodes (probe.py). No torch in here.

differences({"node1": node_facts(config), "node2": {...}})
errors, warnings = judge(["node1", "node2"], [{...}, {...}])
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import statistics
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge.processes import MEMORY_FOLDER
from megasync.config.errors import explain, some
from megasync.config.own_packages import PACKAGES
from megasync.config.schema import Config
from megasync.config.shipped import CLONE
from megasync.launch.machine import SKEW_SECONDS, check_shared_memory, free_bytes, installed

HEADER_BYTES = 2**16  # of each compared file: the headers of safetensors and Parquet files, the first lines of JSONL
NUM_PIECES, PIECE_BYTES = 64, 2**12  # of each compared file: evenly spaced behind the header, the last at its end
MAX_FILES = 2000  # of a folder
MAX_NAMES = 4  # of keys or packages in one line
SLOW_SHARE = 0.5  # of the median bandwidth
REMEDIES = {  # by kind of fact: the headline after the node's name, and the remedy
    "code": ("other code than the other nodes", "check the same commit out on all nodes"),
    "python": ("another Python", "run ./launch/setup.sh on all nodes"),
    "packages": ("other packages", "run ./launch/setup.sh on all nodes, or let them share one environment"),
    "config": ("another config", "start all nodes with the same file and the same key=value"),
    "files": ("other files", "let all nodes see the same folder, or copy it to each"),
}
Facts = Mapping[str, Mapping[str, str]]


def node_facts(config: Config) -> dict[str, dict[str, str]]:
    """Facts that nodes compare: values by name, by kind (REMEDIES). `shown` is not compared, but added to what differs."""
    return {
        "code": {"files": code_digest(CLONE)},
        "shown": {"code": f"; commit {commit(CLONE) or 'unknown'}"},
        "python": {"version": platform.python_version()},
        "packages": installed(),
        "config": flat(config.model_dump(mode="json")),
        "files": {key: described(Path(path)) for key, path in config.input_paths.items()},
    }


def code_digest(root: Path) -> str:
    """Digest of all source files, committed or not."""
    total = hashlib.sha256()
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        total.update(f"{path.relative_to(root)}\0".encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]


def commit(root: Path) -> str:
    """git's, with a + where the work tree has changes; empty where this is no clone, or there is no git."""
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    if shutil.which("git") is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def flat(values: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Full keys and their values as text."""
    found: dict[str, str] = {}
    for name, value in values.items():
        found |= flat(value, f"{above}{name}.") if isinstance(value, dict) and value else {f"{above}{name}": repr(value)}
    return found


def described(path: Path) -> str:
    """Number of files, bytes and a digest of names, sizes, headers and pieces: replicas, teachers and supervised ranks read their
    own node's files.
    """
    if not path.exists():
        return "not there"
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())[:MAX_FILES]
    total, num_bytes = hashlib.sha256(), 0
    for file in files:
        size = file.stat().st_size
        total.update(f"{file.relative_to(path) if path.is_dir() else ''}\0{size}\0".encode())
        with file.open("rb") as opened:
            total.update(opened.read(HEADER_BYTES))
            for number in range(1, NUM_PIECES + 1) if size > HEADER_BYTES else ():
                opened.seek(max(HEADER_BYTES, number * size // NUM_PIECES - PIECE_BYTES))
                total.update(opened.read(PIECE_BYTES))
        num_bytes += size
    return f"{len(files)} files, {num_bytes} bytes, digest {total.hexdigest()[:12]}"


def shared_memory_finding(host: str, *, has_rollouts: bool) -> tuple[str, bool]:
    """The problem with /dev/shm on this node, and whether it prevents the run; an empty text where there is none."""
    found = check_shared_memory(free_bytes(MEMORY_FOLDER) if MEMORY_FOLDER.is_dir() else -1)
    if found.level == "ok" or (found.level == "warning" and not has_rollouts):
        return "", False
    return explain(f"{host}: {found.check}: {found.seen}", remedy=found.remedy), found.level == "error"


def differences(nodes: Mapping[str, Facts]) -> dict[str, str]:
    """Facts of each host that differ from the value of most nodes, or from the first node's where there are as many.

    Empty for equal nodes; the result is the same on every node.
    """
    found: dict[str, list[str]] = {}
    for kind, (headline, remedy) in REMEDIES.items():
        names = sorted({name for facts in nodes.values() for name in facts[kind]})
        values = {name: {host: facts[kind].get(name, "absent") for host, facts in nodes.items()} for name in names}
        usual = {name: Counter(by_host.values()).most_common(1)[0][0] for name, by_host in values.items()}
        for host, facts in nodes.items():
            wrong = [name for name in names if values[name][host] != usual[name]]
            shown = some([f"{name} {values[name][host]} (elsewhere {usual[name]})" for name in wrong], MAX_NAMES)
            if wrong:
                shown += facts["shown"].get(kind, "")
                found.setdefault(host, []).append(explain(f"{host}: {headline}", here=shown, remedy=remedy))
    return {host: "\n".join(problems) for host, problems in found.items()}


def judge(hosts: Sequence[str], results: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Errors and warnings. `results`: of probe.py, in the order of `hosts`; {} of a node that reported nothing in time."""
    errors = [error for seat, result in enumerate(results) for error in _node_errors(hosts, seat, result)]
    return errors, slow_links(hosts, [result.get("gb_per_second") for result in results])


def _node_errors(hosts: Sequence[str], seat: int, result: Mapping[str, Any]) -> list[str]:
    host, errors = hosts[seat], []
    if not result:
        errors.append(f"{host}: the network check did not finish")
    if result.get("unreachable"):
        others = ", ".join(hosts[other] for other in result["unreachable"])
        remedy = f"open all ports between the nodes to {host}"
        errors.append(explain(f"{host}: does not reach {others}", remedy=remedy))
    if result.get("unseen"):
        others = ", ".join(hosts[other] for other in result["unseen"])
        remedy = "let run.dir name a folder on a file system that all nodes share"
        errors.append(explain(f"{host}: does not see in run.dir what {others} wrote there", remedy=remedy))
    if abs(ahead := result.get("ahead", 0.0)) > SKEW_SECONDS:
        remedy = "timedatectl set-ntp true, or chronyc makestep"
        errors.append(explain(f"{host}: its clock is {-ahead:+.1f} s off the one of {hosts[0]}", remedy=remedy))
    if result.get("is_right") is False:
        errors.append(f"{host}: an all-reduce gave a wrong sum")
    if "error" in result:
        remedy = "let GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, where set, name the interface between the nodes"
        errors.append(explain(f"{host}: the all-reduce failed: {result['error']}", remedy=remedy))
    return errors


def slow_links(hosts: Sequence[str], rates: Sequence[float | None]) -> list[str]:
    """Links below SLOW_SHARE of the median. `rates`: GB/s from each host to the next one, of the last to the first."""
    median = statistics.median(known) if (known := [rate for rate in rates if rate is not None]) else 0.0
    pairs = zip(hosts, [*hosts[1:], hosts[0]], rates, strict=True)
    slow = [f"{host} to {other} {rate:.3g}" for host, other, rate in pairs if rate is not None and rate < SLOW_SHARE * median]
    return [f"slow links, below half of the median of {median:.3g} GB/s: {some(slow)}"] if slow else []
