"""What a check of the machine says.

ok("python", "3.11.9")
error("apex", "PyPI's apex 0.9.10.dev0", "pip uninstall apex")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """error: training would fail; warning: it would be slow, or behave otherwise than expected."""

    check: str
    level: Level
    seen: str
    remedy: str = ""


def ok(check: str, seen: str) -> list[Finding]:
    return [Finding(check, "ok", seen)]


def warning(check: str, seen: str, remedy: str) -> list[Finding]:
    return [Finding(check, "warning", seen, remedy)]


def error(check: str, seen: str, remedy: str) -> list[Finding]:
    return [Finding(check, "error", seen, remedy)]


def exit_code(findings: Sequence[Finding]) -> int:
    """1 where training would fail."""
    return int(any(finding.level == "error" for finding in findings))


def gib(num_bytes: float) -> str:
    """With the unit: GiB, or MiB below one."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
