"""Writes a run's report.html again: its curves and figures as one file.

megasync report runs/quickstart/rl        # writes runs/quickstart/rl/report.html
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megasync.config.errors import main_errors
from megasync.reporting.page import write_report


def main(arguments: Sequence[str]) -> int:
    """Exit code 2 where the folder is not a run's."""
    parser = argparse.ArgumentParser(prog="megasync report", description="Write a run's report.html.")
    parser.add_argument("run_folder", help="such as runs/quickstart/rl")
    given = parser.parse_args(arguments)
    with main_errors():
        print(write_report(given.run_folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
