"""Child processes that do not outlive this one, and programs that end once they are done.

Linux only: the kernel tells the child that its parent died.

code = run_to_end(torchrun(2, "megasync.train", "configs/quickstart.yaml"))
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

PR_SET_PDEATHSIG = 1  # linux/prctl.h
INTERRUPTED = 130  # the exit code of shells for Ctrl-C


def end_with_parent(kind: signal.Signals = signal.SIGTERM) -> None:
    """For `preexec_fn`, or first in a child: it gets `kind` when the thread that started it ends, or its process, in any way."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, kind)


def end_on_sigterm() -> None:
    """SIGTERM ends this program the ordinary way from now on, so that Ray and vLLM are taken down with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def run_and_leave(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run `main` on the command's arguments and end this process with its code, once all that was written is out.

    Nothing is freed on the way: threads of torch, gloo, Ray and Triton that still run while Python and then C++ take themselves
    down can wait for each other for ever, and a rank that has done its work would hold its launcher.
    """
    try:
        code = main(sys.argv[1:])
    except SystemExit as leaving:
        if not isinstance(leaving.code, int):
            raise
        code = leaving.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def torchrun(num_ranks: int, module: str, *arguments: str) -> list[str]:
    """The command that runs `python -m module arguments` on so many ranks of this machine."""
    launcher = [sys.executable, "-m", "megasync.launch.torchrun", "--nproc-per-node", str(num_ranks)]
    return [*launcher, "-m", module, *arguments]


def run_to_end(command: Sequence[str]) -> int:
    """The command's exit code. SIGINT and SIGTERM are handed on as one SIGTERM, then the command's own end is awaited.

    The command has a session of its own: Ctrl-C would else reach a launcher and its ranks at once, and once more from
    here, and a launcher that is interrupted while it ends its ranks leaves some behind.
    """
    interrupted = False
    process = subprocess.Popen(
        command,
        start_new_session=True,
        preexec_fn=end_with_parent,  # noqa: PLW1509  (no threads of ours run)
    )

    def hand_on(*_: object) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            process.terminate()

    kinds = (signal.SIGINT, signal.SIGTERM)
    former = [signal.signal(kind, hand_on) for kind in kinds]
    try:
        code = process.wait()
    finally:
        for kind, handler in zip(kinds, former, strict=True):
            signal.signal(kind, handler)
    return INTERRUPTED if interrupted else code
