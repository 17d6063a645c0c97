"""Writes a run's report.html, or one page of several runs side by side; or serves it while the run is active.

Leaves out the page (megasync/report/).

    megasync report runs/quickstart/rl                         # writes runs/quickstart/rl/report.html
    megasync report runs/a runs/b --to comparison.html
    megasync report runs/a --watch                             # on http://127.0.0.1:8070, until Ctrl-C
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megasync.config.errors import ConfigError, main_errors
from megasync.launch.scope import LAST_PORT
from megasync.report.page import write_comparison, write_report
from megasync.report.watch import DEFAULT_PORT, watch

COMPARISON_FILE = "comparison.html"


def main(arguments: Sequence[str]) -> int:
    """Exit code 0: done; 2: a folder is not a run's, or the page cannot be written."""
    parser = argparse.ArgumentParser(prog="megasync report", description=__doc__.splitlines()[0])
    parser.add_argument("run_folders", nargs="+", metavar="RUN", help="a run's folder, such as runs/quickstart/rl")
    parser.add_argument(
        "--to", metavar="FILE", help=f"the file to write (default: RUN/report.html; for several runs {COMPARISON_FILE})"
    )
    parser.add_argument("--watch", action="store_true", help="serve the page on the loopback interface until Ctrl-C")
    parser.add_argument("--port", type=_port, default=DEFAULT_PORT, help=f"with --watch (default: {DEFAULT_PORT}; 0: a free one)")
    given = parser.parse_args(arguments)
    folders = [Path(folder) for folder in given.run_folders]
    with main_errors():
        if given.watch:
            if given.to:
                raise ConfigError("--to and --watch: --watch writes no file", remedy="remove one of them")
            watch(folders, given.port)
        elif len(folders) == 1 and not given.to:
            print(write_report(folders[0]))
        else:
            print(write_comparison(folders, given.to or COMPARISON_FILE))
    return 0


def _port(text: str) -> int:
    number = int(text)
    if not 0 <= number <= LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text}: 0 to {LAST_PORT}")
    return number
