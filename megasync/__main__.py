"""The command `megasync`, and `python -m megasync`: cli.py, whose imports Ctrl-C ends in a sentence."""

from __future__ import annotations

import os
import signal
from typing import NoReturn


def entry() -> NoReturn:
    """Entry point of the console script."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup and shells' background jobs ignore it
        signal.signal(signal.SIGINT, _leave)
    from megasync.cli import entry as run

    run()


def _leave(*_: object) -> NoReturn:
    os.write(2, b"megasync: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    entry()
