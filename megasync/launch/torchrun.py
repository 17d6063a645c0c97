"""torchrun for the ranks of this machine: its store listens on the loopback alone, and nothing is left behind.

Where a rank fails the last lines say which one and why, and for megasync.train how to go on, in place of torchrun's traceback.

python -m megasync.launch.torchrun --nproc-per-node 2 -m megasync.train CONFIG.yaml [key=value ...]
"""

from __future__ import annotations

import logging
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from bridge.transport.channel import open_store
from megasync.config.load import load_config
from megasync.launch.last_words import last_words
from megasync.launch.processes import REFUSED, run_and_leave
from megasync.launch.scope import LOOPBACK, run_scope

BACKEND = "loopback"
TRAINER = "megasync.train"
OF_MACHINE = (signal.SIGKILL, signal.SIGBUS)  # of Linux, where memory, or /dev/shm, is used up
MACHINE = ": is there too little memory? `megasync doctor CONFIG` looks at this machine"


class LoopbackRendezvous(StaticTCPRendezvous):
    """Of one torchrun: there is nobody to wait for. The ranks use its store, too."""

    def __init__(self, run_id: str) -> None:
        store = open_store(LOOPBACK)
        super().__init__(LOOPBACK, store.port, rank=0, world_size=1, run_id=run_id, timeout=60)
        self._store = store

    def get_backend(self) -> str:
        return BACKEND


def main(arguments: Sequence[str]) -> int:
    """The exit code of the rank that failed, 1 where a signal ended it; 128 and its number where one ended this process."""
    rendezvous_handler_registry.register(BACKEND, lambda parameters: LoopbackRendezvous(parameters.run_id))
    logging.disable(logging.ERROR)  # torchrun's own words on failed ranks
    code, problem = 0, ""
    with run_scope():
        try:
            run.main(["--rdzv-backend", BACKEND, "--rdzv-endpoint", f"{LOOPBACK}:0", "--local-addr", LOOPBACK, *arguments])
        except ChildFailedError as error:
            code, problem = likely_cause(error.failures)
        except SignalException as error:
            code, problem = 128 + error.sigval, f"ended by {error.sigval.name}"
    if code not in (0, REFUSED):
        print(problem, file=sys.stderr)
        if TRAINER in arguments:
            config, *overrides = arguments[arguments.index(TRAINER) + 1 :]
            command = shlex.join([sys.executable, "-m", "megasync.launch.torchrun", *arguments])
            print(last_words(load_config(config, overrides), command), file=sys.stderr)
    return code


def likely_cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, str]:
    """Exit code and words for the rank that a signal ended, else for the one that failed first."""
    rank, failure = min(failures.items(), key=lambda item: (item[1].exitcode > 0, item[1].timestamp))
    if failure.exitcode < 0:
        return 1, f"rank {rank} was ended by {failure.signal_name()}{MACHINE if -failure.exitcode in OF_MACHINE else ''}"
    message: Any = failure.message  # annotated as text, but what a rank has recorded is a dict
    if isinstance(message, dict):
        return failure.exitcode, f"rank {rank} failed: {message['message'].splitlines()[0]}"
    return failure.exitcode, f"rank {rank} ended with exit code {failure.exitcode}"


if __name__ == "__main__":
    run_and_leave(main)
