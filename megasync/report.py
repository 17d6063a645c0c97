"""Writes a run's report.html again: its curves and figures as one file.

python -m megasync.report runs/quickstart/rl        # writes runs/quickstart/rl/report.html
"""

from __future__ import annotations

import argparse

from megasync.config.errors import main_errors
from megasync.reporting.page import write_report


def main() -> None:
    """Exit code 2 where the folder is not a run's."""
    parser = argparse.ArgumentParser(prog="python -m megasync.report", description="Write a run's report.html.")
    parser.add_argument("run_folder", help="such as runs/quickstart/rl")
    arguments = parser.parse_args()
    with main_errors():
        print(write_report(arguments.run_folder))


if __name__ == "__main__":
    main()
