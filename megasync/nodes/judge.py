"""What the figures of wire.py mean: what a run would fail at, and what would make it slow, each node by name. Pure.

errors, warnings = judge(["node1", "node2"], [{...}, {...}])
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from megasync.config.errors import explain
from megasync.diagnosis.storage import SKEW_SECONDS

SLOW_SHARE = 0.5  # of the median bandwidth
SHOWN = 6


def judge(hosts: Sequence[str], results: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Errors and warnings. `results` by seat, as wire.py writes them; {} of a node that told nothing in time."""
    errors = [f"{host}: the check did not come to its end" for host, found in zip(hosts, results, strict=True) if not found]
    for seat, found in enumerate(results):
        errors += _of_node(hosts, seat, found)
    rates = {
        (seat, int(other)): rate for seat, found in enumerate(results) for other, rate in found.get("gb_per_second", {}).items()
    }
    return errors, slow_pairs(hosts, rates)


def _of_node(hosts: Sequence[str], seat: int, found: Mapping[str, Any]) -> list[str]:
    host, told = hosts[seat], []
    if found.get("unreachable"):
        others = ", ".join(hosts[other] for other in found["unreachable"])
        remedy = f"let no firewall stand between the nodes, of which all ports must be open to {host}"
        told.append(explain(f"{host}: does not reach {others}", remedy=remedy))
    if found.get("unseen"):
        others = ", ".join(hosts[other] for other in found["unseen"])
        remedy = "let run.dir name a folder on a file system that all nodes share"
        told.append(explain(f"{host}: does not see in run.dir what {others} wrote there", remedy=remedy))
    ahead = found.get("ahead", 0.0)
    if abs(ahead) > SKEW_SECONDS:
        remedy = "timedatectl set-ntp true, or chronyc makestep"
        told.append(explain(f"{host}: its clock is {-ahead:+.1f} s off the one of {hosts[0]}", remedy=remedy))
    if found.get("is_right") is False:
        told.append(f"{host}: an all-reduce gave a wrong sum")
    if "error" in found:
        remedy = "see that GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, where they are set, name the interface between the nodes"
        told.append(explain(f"{host}: the all-reduce failed: {found['error']}", remedy=remedy))
    return told


def slow_pairs(hosts: Sequence[str], rates: Mapping[tuple[int, int], float]) -> list[str]:
    """The pairs below SLOW_SHARE of the median, the slowest first, and the node that all of them share, if there is one."""
    if not rates:
        return []
    median = statistics.median(rates.values())
    slow = sorted((rate, pair) for pair, rate in rates.items() if rate < SLOW_SHARE * median)
    if not slow:
        return []
    told = ", ".join(f"{hosts[source]} to {hosts[target]} {rate:.3g}" for rate, (source, target) in slow[:SHOWN])
    more = f" and {len(slow) - SHOWN} more" if len(slow) > SHOWN else ""
    common = set.intersection(*(set(pair) for _, pair in slow)) if len(slow) > 1 and len(hosts) > 2 else set()
    who = f"; {hosts[common.pop()]} is in all of them" if len(common) == 1 else ""
    return [f"slow links, below half of the median of {median:.3g} GB/s: {told}{more}{who}"]
