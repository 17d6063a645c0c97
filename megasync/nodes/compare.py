"""What differs between the nodes of a round, each by name, and what to do about it. Pure.

differences({"node1": node_facts(...), "node2": node_facts(...)})
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from megasync.config.errors import explain

SHOWN = 4  # names of keys or packages in one line
Facts = Mapping[str, Any]


def differences(nodes: Mapping[str, Facts]) -> dict[str, str]:
    """What is wrong with which node; the nodes of which nothing is wrong are left out.

    What most nodes have counts as right, the first node's where there are as many. The result does not depend on who asks, and
    is empty for equal nodes.
    """
    found: dict[str, list[str]] = {}
    if not nodes:
        return {}
    for told in (_codes(nodes), _pythons(nodes), _packages(nodes), _configs(nodes), _files(nodes)):
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


def _packages(nodes: Mapping[str, Facts]) -> dict[str, str]:
    told = _differing(nodes, "packages", absent="not installed")
    remedy = "run ./launch/setup.sh on all nodes, or let them share one environment"
    return {host: explain(f"{host}: other packages", here=text, remedy=remedy) for host, text in told.items()}


def _configs(nodes: Mapping[str, Facts]) -> dict[str, str]:
    told = _differing(nodes, "config", absent="absent")
    remedy = "start all nodes with the same file and the same key=value"
    return {host: explain(f"{host}: another config", here=text, remedy=remedy) for host, text in told.items()}


def _files(nodes: Mapping[str, Facts]) -> dict[str, str]:
    told = _differing(nodes, "files", absent="absent")
    remedy = "let all nodes see the same folder, or copy it to each"
    return {host: explain(f"{host}: other files", here=text, remedy=remedy) for host, text in told.items()}


def _differing(nodes: Mapping[str, Facts], fact: str, absent: str) -> dict[str, str]:
    """Of each node the names whose value is not what most have, with both values."""
    names = sorted({name for facts in nodes.values() for name in facts[fact]})
    right = {name: most(facts[fact].get(name, absent) for facts in nodes.values()) for name in names}
    found = {}
    for host, facts in nodes.items():
        values = {name: facts[fact].get(name, absent) for name in names}
        wrong = [f"{name} {values[name]} (elsewhere {right[name]})" for name in names if values[name] != right[name]]
        if wrong:
            more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            found[host] = ", ".join(wrong[:SHOWN]) + more
    return found
