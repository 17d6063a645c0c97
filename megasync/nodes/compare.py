"""What differs between the nodes of a round, and what the figures of wire.py mean, each node by name, and what to do. Pure.

differences({"node1": node_facts(...), "node2": node_facts(...)})
errors, warnings = judge(["node1", "node2"], [{...}, {...}])
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megasync.config.errors import explain, some
from megasync.diagnosis.storage import SKEW_SECONDS

SHOWN = 4  # names of keys or packages in one line
NAMED = (  # facts that are values by name: what they are called, what a node has that lacks one, the remedy
    ("packages", "other packages", "not installed", "run ./launch/setup.sh on all nodes, or let them share one environment"),
    ("config", "another config", "absent", "start all nodes with the same file and the same key=value"),
    ("files", "other files", "absent", "let all nodes see the same folder, or copy it to each"),
)
Facts = Mapping[str, Any]
SLOW_SHARE = 0.5  # of the median bandwidth


def differences(nodes: Mapping[str, Facts]) -> dict[str, str]:
    """What is wrong with which node; the nodes of which nothing is wrong are left out.

    What most nodes have counts as right, the first node's where there are as many. The result does not depend on who asks, and
    is empty for equal nodes.
    """
    found: dict[str, list[str]] = {}
    if not nodes:
        return {}
    for told in (_codes(nodes), _pythons(nodes), *(_named(nodes, *kind) for kind in NAMED)):
        for host, problem in told.items():
            found.setdefault(host, []).append(problem)
    return {host: "\n".join(problems) for host, problems in found.items()}


def most(values: Iterable[Any]) -> Any:
    """The commonest, the first of those that are as common."""
    return Counter(values).most_common(1)[0][0]


def _codes(nodes: Mapping[str, Facts]) -> dict[str, str]:
    right = most(facts["code"] for facts in nodes.values())
    others = next(facts["commit"] for facts in nodes.values() if facts["code"] == right)
    remedy = "check the same commit out on all nodes"
    return {
        host: explain(
            f"{host}: other code than the other nodes", here=_code(facts), there=_code({"code": right, "commit": others}),
            remedy=remedy,
        )
        for host, facts in nodes.items()
        if facts["code"] != right
    }  # fmt: skip


def _code(facts: Facts) -> str:
    return f"commit {facts['commit'] or 'unknown'}, files {facts['code']}"


def _pythons(nodes: Mapping[str, Facts]) -> dict[str, str]:
    right = most(facts["python"] for facts in nodes.values())
    return {
        host: explain(f"{host}: another Python", here=facts["python"], there=right, remedy="run ./launch/setup.sh on all nodes")
        for host, facts in nodes.items()
        if facts["python"] != right
    }


def _named(nodes: Mapping[str, Facts], fact: str, what: str, absent: str, remedy: str) -> dict[str, str]:
    """Of each node the names whose value is not what most have, with both values."""
    names = sorted({name for facts in nodes.values() for name in facts[fact]})
    right = {name: most(facts[fact].get(name, absent) for facts in nodes.values()) for name in names}
    found = {}
    for host, facts in nodes.items():
        values = {name: facts[fact].get(name, absent) for name in names}
        wrong = [f"{name} {values[name]} (elsewhere {right[name]})" for name in names if values[name] != right[name]]
        if wrong:
            found[host] = explain(f"{host}: {what}", here=some(wrong, SHOWN), remedy=remedy)
    return found


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
    told = some(f"{hosts[source]} to {hosts[target]} {rate:.3g}" for rate, (source, target) in slow)
    common = set.intersection(*(set(pair) for _, pair in slow)) if len(slow) > 1 and len(hosts) > 2 else set()
    who = f"; {hosts[common.pop()]} is in all of them" if len(common) == 1 else ""
    return [f"slow links, below half of the median of {median:.3g} GB/s: {told}{who}"]
