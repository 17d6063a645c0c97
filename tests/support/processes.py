"""What processes are called that may end while they are looked at. Leaves out which ones a test looks at."""

from __future__ import annotations

import psutil


def name_of(process: psutil.Process) -> str:
    """Empty where it has ended."""
    try:
        return str(process.name())
    except psutil.Error:
        return ""


def command_of(process: psutil.Process) -> str:
    """Its words with spaces between them; empty where it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
