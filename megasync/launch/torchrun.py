"""torchrun for the ranks of this machine: its store listens on the loopback alone, and nothing is left behind.

Where a rank fails the last lines name it and the cause, and for megasync.train the command that resumes, in place of torchrun's
traceback. The trainer's config is read once, before the first rank: later edits of the file are for other runs. Leaves out
several nodes (node.py), whose launchers call `run_ranks` with a rendezvous of their own.

python -m megasync.launch.torchrun --nproc-per-node 2 -m megasync.train CONFIG.yaml [key=value ...]
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGBUS, SIGKILL, SIGTERM, Signals
from typing import Any, NoReturn

import psutil
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from bridge.processes import MALLOC, MALLOC_ON_CPU, watched
from bridge.transport.store import open_store
from megasync.config.errors import main_errors, refuse_if
from megasync.config.files import is_asked_to_stop
from megasync.config.load import load_config, save_config
from megasync.config.schema import Config
from megasync.launch.devices import visible_devices
from megasync.launch.exit_summary import exit_summary
from megasync.launch.launcher import forget
from megasync.launch.processes import (
    PIDFD_REMEDY,
    REFUSED,
    STOPPED,
    hold_signals,
    ignores_hang_up,
    pidfd_problem,
    release_signals,
    run_and_leave,
    survive_closed_output,
)
from megasync.launch.scope import LOOPBACK, run_scope
from megasync.launch.stop_request import forget_former_stop

BACKEND = "megasync"
STORE_SECONDS = 60
RANKS_SECONDS = 2.0  # between two looks at the running ranks
LATE_SECONDS = 30.0  # for a report, where a rank has failed
TRAINER = "megasync.train"
MEMORY_SIGNALS = (SIGKILL, SIGBUS)  # of Linux, where memory, or /dev/shm, is used up
ENDED_WITH_OTHERS = (-SIGTERM, 128 + SIGTERM)  # before a rank has set its handler, and by that
MEMORY_HINT = ": is there too little memory? `megasync doctor CONFIG` looks at this machine"


class OneMachineRendezvous(StaticTCPRendezvous):
    """For one node: the store is this process's, on the loopback, and new at each restart, since torch would find the keys of the
    former ranks in it (distributed/rendezvous.py:189, torch 2.13).
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        super().__init__(LOOPBACK, 0, 0, 1, parameters.run_id, timeout=STORE_SECONDS)

    def next_rendezvous(self) -> RendezvousInfo:
        store = open_store(LOOPBACK)
        self._store, self.master_port = store, store.port
        return super().next_rendezvous()

    def get_backend(self) -> str:
        return BACKEND


def main(arguments: Sequence[str]) -> int:
    """The exit code of `run_ranks`; STOPPED where the run has stopped because it was asked to; REFUSED where the trainer's config
    is wrong, or its run is going on.
    """
    forget(os.environ)  # torchrun takes PET_ variables for options
    with main_errors():
        refuse_if(missing := pidfd_problem(), missing, remedy=PIDFD_REMEDY)
        config = trainer_config(arguments)
        if config is not None:
            forget_former_stop(config.run.folder)
    with run_scope():
        local = ["--rdzv-endpoint", f"{LOOPBACK}:0", "--local-addr", LOOPBACK]
        code, problem = run_ranks([*local, *with_copied_config(arguments, config)], config)
    if code == 0 and config is not None and is_asked_to_stop(config.run.folder):
        return STOPPED
    if code not in (0, REFUSED):
        print(problem, file=sys.stderr)
        if config is not None:
            command = shlex.join([sys.executable, "-m", "megasync.launch.torchrun", *arguments])
            print(exit_summary(config, command, code), file=sys.stderr)
    return code


def run_ranks(
    arguments: Sequence[str],
    config: Config | None,
    rendezvous: Callable[[RendezvousParameters], RendezvousHandler] = OneMachineRendezvous,
) -> tuple[int, str]:
    """Run torchrun with these arguments in this process.

    Returns the exit code of the rank that failed, 1 where a signal ended it, or 128 and its number where one ended this process;
    and the cause.
    """
    logging.disable(logging.ERROR)  # torchrun's own words on failed ranks
    rendezvous_handler_registry.register(BACKEND, rendezvous)
    if not visible_devices():
        os.environ.setdefault(MALLOC, MALLOC_ON_CPU)  # of the ranks
    with late_ranks_ended(LATE_SECONDS + config.run.hung_rank_timeout_seconds if config is not None else math.inf):
        try:
            release_signals(_raise)  # until torch has handlers of its own
            of_nohup = ["--signals-to-handle", "SIGTERM,SIGINT,SIGQUIT"] if ignores_hang_up() else []  # torch's have SIGHUP
            run.main(["--rdzv-backend", BACKEND, *of_nohup, *arguments])
        except ChildFailedError as error:
            return likely_cause(error.failures)
        except SignalException as error:
            return 128 + error.sigval, f"ended by {error.sigval.name}"
    return 0, ""


def _raise(number: int, _: object) -> NoReturn:
    raise SignalException("", Signals(number))


@contextmanager
def late_ranks_ended(limit_seconds: float) -> Iterator[None]:
    """Kills ranks that are still there `limit_seconds` after another one's end. All have reported that they leave by then
    (run/heartbeat.py), so that a rank that is stopped would not be noticed.
    """

    def ranks() -> set[psutil.Process]:
        found = set()
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                found |= {child} if TRAINER in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE else set()
        return found

    def watch(over: threading.Event) -> None:
        seen: set[psutil.Process] = set()
        since = math.inf  # when one was found to have ended
        while not over.wait(RANKS_SECONDS):
            alive = ranks()
            if alive - seen:  # a start, or a restart
                seen, since = alive, math.inf
            elif alive != seen:
                since = min(since, time.monotonic())
            for rank in alive if time.monotonic() - since > limit_seconds else ():
                limit = f"{limit_seconds:g} s after another rank's end ({LATE_SECONDS:g} and run.hung_rank_timeout_seconds)"
                print(f"process {rank.pid}, a rank, is still there {limit}: it is killed", file=sys.stderr, flush=True)
                with suppress(psutil.Error):
                    rank.kill()

    with watched(watch, "late-ranks"):
        yield


def trainer_config(arguments: Sequence[str]) -> Config | None:
    """The config of the trainer's program; None: the ranks run another program.

    Raises:
        ConfigError: it cannot be read.
    """
    if TRAINER not in arguments:
        return None
    refuse_if(arguments[-1] == TRAINER, f"{TRAINER}: no config is given", remedy=f"write -m {TRAINER} CONFIG.yaml")
    path, *overrides = arguments[arguments.index(TRAINER) + 1 :]
    return load_config(path, overrides)


def with_copied_config(arguments: Sequence[str], config: Config | None) -> Sequence[str]:
    """The same with a file of this process's in place of the config and its overrides."""
    if config is None:
        return arguments
    program = arguments.index(TRAINER)
    copy = Path(tempfile.gettempdir()) / Path(arguments[program + 1]).name
    save_config(config, copy)
    return [*arguments[: program + 1], str(copy)]


def likely_cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, str]:
    """Exit code and text for the rank that a signal ended, else for the one that failed first.

    SIGTERM comes last: torchrun ends the other ranks by it, and 30 seconds later by SIGKILL. A rank that has recorded why it
    failed was ended by that while it closed its replicas.
    """

    def recorded(failure: ProcessFailure) -> str:
        message: Any = failure.message  # annotated as text, but a rank records a dict
        return str(message["message"]).strip() or "no message" if isinstance(message, dict) else ""

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, int]:
        code = item[1].exitcode
        kind = 1 if recorded(item[1]) or code > 0 else 0
        return 2 if code in ENDED_WITH_OTHERS and not recorded(item[1]) else kind, item[1].timestamp

    rank, failure = min(failures.items(), key=order)
    if why := recorded(failure):
        return max(1, failure.exitcode), f"rank {rank} failed: {why.splitlines()[0]}"
    if failure.exitcode < 0:
        hint = MEMORY_HINT if -failure.exitcode in MEMORY_SIGNALS else ""
        return 1, f"rank {rank} was ended by {failure.signal_name()}{hint}"
    return failure.exitcode, f"rank {rank} ended with exit code {failure.exitcode}"


if __name__ == "__main__":
    hold_signals()
    survive_closed_output()
    run_and_leave(main)
