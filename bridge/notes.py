"""Notes of a replica's processes to the actor that started them: marked lines of their output.

Leaves out errors, which end a start (replicas/output.py), and what vLLM logs.
"""

from __future__ import annotations

import sys

MARK = "megasync notes: "


def note(text: str) -> None:
    """One line, in the output of this process, which may be any of a replica's."""
    print(f"{MARK}{text}", file=sys.stderr, flush=True)


def find_notes(output: str) -> list[str]:
    """Each once; vLLM may have put the name of a process before the mark."""
    return list(dict.fromkeys(line.partition(MARK)[2].strip() for line in output.splitlines() if MARK in line))
