"""Looks for what would make a run fail or slow on this machine, and says what to do about it.

    megasync doctor                                       # the machine alone
    megasync doctor configs/smollm2.yaml run.dir=/data    # and what this config needs and names
    megasync doctor CONFIG.yaml --num-ranks 4 --json

Exit codes: 0 training can start, with warnings perhaps; 1 it would fail; 2 wrong use, or no config can be read. Changes nothing.
Leaves out the checks (examine.py). No torch in here.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from megasync.config.errors import main_errors
from megasync.config.load import load_config
from megasync.launch.machine import Finding
from megasync.tools.doctor.examine import examine

COLOURS = {"ok": "green", "warning": "yellow", "error": "bold red"}


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="megasync doctor", description="Is this machine fit for a run?")
    parser.add_argument("config", nargs="?", help="a YAML file; without: the machine alone")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="such as engine.wrap=ddp")
    parser.add_argument("--num-ranks", type=int, help="trainer ranks (default: as many as the launchers would start)")
    parser.add_argument("--json", action="store_true", help="a list of {check, level, seen, remedy}")
    given = parser.parse_intermixed_args(list(arguments))
    if given.num_ranks is not None and given.num_ranks < 1:
        parser.error(f"--num-ranks {given.num_ranks}: at least 1")
    with main_errors():
        config = load_config(given.config, given.overrides) if given.config else None
    found = examine(config, given.num_ranks, os.environ)
    if not given.json:
        return exit_code(show(found))
    findings = list(found)
    print(json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False))
    return exit_code(findings)


def show(findings: Iterable[Finding]) -> list[Finding]:
    """Print a line each as they come, with the remedy below it, and the counts."""
    from rich.console import Console
    from rich.markup import escape

    console, shown = Console(highlight=False), list[Finding]()
    for finding in findings:
        shown.append(finding)
        colour = COLOURS[finding.level]
        console.print(f"[{colour}]{finding.level:<7}[/] {finding.check:<18} {escape(finding.seen)}", soft_wrap=True)
        if finding.remedy:
            console.print(f"{'':27}[bold]remedy:[/] {escape(finding.remedy)}", soft_wrap=True)
    counts = {level: sum(finding.level == level for finding in shown) for level in ("error", "warning", "ok")}
    console.print(f"{counts['error']} errors, {counts['warning']} warnings, {counts['ok']} ok")
    return shown


def exit_code(findings: Sequence[Finding]) -> int:
    """1 where training would fail."""
    return int(any(finding.level == "error" for finding in findings))
