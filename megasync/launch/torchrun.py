"""torchrun for the ranks of this machine: its store listens on the loopback alone, and nothing is left behind.

Where a rank fails the last lines say which one and why, and for megasync.train how to go on, in place of torchrun's traceback. Of
several nodes (megasync/nodes/) each runs this, with the store that the head node has opened; who says last how to go on is then
its launcher, which finds the cause in the file that TOLD names. The trainer's config is read once, here, before the first rank:
what the user writes into the file later is for other runs.

python -m megasync.launch.torchrun --nproc-per-node 2 -m megasync.train CONFIG.yaml [key=value ...]
python -m megasync.launch.torchrun --nnodes 2 --rdzv-endpoint HOST:PORT --rdzv-conf node=1 --nproc-per-node 2 -m ...
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from torch import distributed
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from bridge.processes import MALLOC, MALLOC_ON_CPU
from bridge.transport.store import open_store
from megasync.config.errors import main_errors, refuse_if
from megasync.config.files import is_asked_to_stop
from megasync.config.load import load_config, save_config
from megasync.config.schema import Config
from megasync.launch.devices import visible_devices
from megasync.launch.last_words import last_words
from megasync.launch.launcher import forget
from megasync.launch.processes import PIDFD_REMEDY, REFUSED, STOPPED, go_on_unread, pidfd_problem, run_and_leave
from megasync.launch.scope import LOOPBACK, run_scope
from megasync.launch.stop_request import forget_former_stop

dist: Any = distributed  # its stores are not typed

BACKEND = "one-store"
ENDPOINT, NODE = "--rdzv-endpoint", "node"
TOLD = "MEGASYNC_TOLD"  # environment variable: where the cause of a failure is written, on one of several nodes
STORE_SECONDS = 60
RANKS_SECONDS = 2.0  # between two looks at which ranks are there
LAST_SECONDS = 30.0  # for a report, where a rank has failed
TRAINER = "megasync.train"
OF_MACHINE = (signal.SIGKILL, signal.SIGBUS)  # of Linux, where memory, or /dev/shm, is used up
ENDED_WITH_OTHERS = (-signal.SIGTERM, 128 + signal.SIGTERM)  # before a rank has come to its handler, and by that
MACHINE = ": is there too little memory? `megasync doctor CONFIG` looks at this machine"


class OneStoreRendezvous(StaticTCPRendezvous):
    """There is nobody to wait for: all nodes and ranks use the store at the endpoint; of one machine it is this process's."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        host, port = parse_rendezvous_endpoint(parameters.endpoint, 0)
        limit = timedelta(seconds=STORE_SECONDS)
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit) if port else open_store(host)
        node = int(parameters.get(NODE, 0))
        super().__init__(host, store.port, node, parameters.max_nodes, parameters.run_id, timeout=STORE_SECONDS)
        self._store = store

    def get_backend(self) -> str:
        return BACKEND


def main(arguments: Sequence[str]) -> int:
    """The exit code of the rank that failed, 1 where a signal ended it; 128 and its number where one ended this process; STOPPED
    where the run has stopped because it was asked to; REFUSED where the trainer's config is wrong, or its run is going on.
    """
    rendezvous_handler_registry.register(BACKEND, OneStoreRendezvous)
    logging.disable(logging.ERROR)  # torchrun's own words on failed ranks
    forget(os.environ)  # torchrun takes PET_ variables for options
    if not visible_devices():
        os.environ.setdefault(MALLOC, MALLOC_ON_CPU)  # of the ranks
    code, problem = 0, ""
    is_alone = ENDPOINT not in arguments
    with main_errors():
        refuse_if(missing := pidfd_problem(), missing, remedy=PIDFD_REMEDY)
        config = trainer_config(arguments)
        if config is not None and is_alone:
            forget_former_stop(config.run.folder)
    of_machine = [ENDPOINT, f"{LOOPBACK}:0", "--local-addr", LOOPBACK] if is_alone else []
    with run_scope(), late_ranks_ended(LAST_SECONDS + config.run.hung_rank_timeout_seconds if config is not None else math.inf):
        try:
            run.main(["--rdzv-backend", BACKEND, *of_machine, *for_ranks(arguments, config)])
        except ChildFailedError as error:
            code, problem = likely_cause(error.failures)
        except SignalException as error:
            code, problem = 128 + error.sigval, f"ended by {error.sigval.name}"
    if code == 0 and config is not None and is_asked_to_stop(config.run.folder):
        return STOPPED
    if code not in (0, REFUSED):
        print(problem, file=sys.stderr)
        if not is_alone and TOLD in os.environ:
            Path(os.environ[TOLD]).write_text(problem, encoding="utf-8")
        elif config is not None:
            command = shlex.join([sys.executable, "-m", "megasync.launch.torchrun", *arguments])
            print(last_words(config, command, code), file=sys.stderr)
    return code


@contextmanager
def late_ranks_ended(limit_seconds: float) -> Iterator[None]:
    """Kills ranks that are still there so long after another one's end. Before the first one ends all have said that they leave
    (run/heartbeat.py), so that nobody else would miss one that is stopped then.
    """
    over = threading.Event()

    def ranks() -> set[psutil.Process]:
        found = set()
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                found |= {child} if TRAINER in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE else set()
        return found

    def watch() -> None:
        seen: set[psutil.Process] = set()
        since = math.inf  # when one was found to have ended
        while not over.wait(RANKS_SECONDS):
            alive = ranks()
            if alive - seen:  # they start, or once more
                seen, since = alive, math.inf
            elif alive != seen:
                since = min(since, time.monotonic())
            for rank in alive if time.monotonic() - since > limit_seconds else ():
                told = f"{limit_seconds:g} s after another rank's end ({LAST_SECONDS:g} and run.hung_rank_timeout_seconds)"
                print(f"process {rank.pid}, a rank, is still there {told}: it is killed", file=sys.stderr, flush=True)
                with suppress(psutil.Error):
                    rank.kill()

    thread = threading.Thread(target=watch, name="late-ranks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def trainer_config(arguments: Sequence[str]) -> Config | None:
    """None: the ranks run another program.

    Raises:
        ConfigError: it cannot be read.
    """
    if TRAINER not in arguments:
        return None
    refuse_if(arguments[-1] == TRAINER, f"{TRAINER}: no config is given", remedy=f"write -m {TRAINER} CONFIG.yaml")
    given, *overrides = arguments[arguments.index(TRAINER) + 1 :]
    return load_config(given, overrides)


def for_ranks(arguments: Sequence[str], config: Config | None) -> Sequence[str]:
    """The same with a file of this process's in the place of the config's and its overrides."""
    if config is None:
        return arguments
    program = arguments.index(TRAINER)
    copy = Path(tempfile.gettempdir()) / Path(arguments[program + 1]).name
    save_config(config, copy)
    return [*arguments[: program + 1], str(copy)]


def likely_cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, str]:
    """Exit code and words for the rank that a signal ended, else for the one that failed first.

    SIGTERM comes last: torchrun ends the other ranks by it, and 30 seconds later by SIGKILL. A rank that has recorded why it
    failed was ended by that while it took down what it had.
    """

    def recorded(failure: ProcessFailure) -> str:
        message: Any = failure.message  # annotated as text, but what a rank has recorded is a dict
        return str(message["message"]).strip() or "no word" if isinstance(message, dict) else ""

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, int]:
        code = item[1].exitcode
        kind = 1 if recorded(item[1]) or code > 0 else 0
        return 2 if code in ENDED_WITH_OTHERS and not recorded(item[1]) else kind, item[1].timestamp

    rank, failure = min(failures.items(), key=order)
    if why := recorded(failure):
        return max(1, failure.exitcode), f"rank {rank} failed: {why.splitlines()[0]}"
    if failure.exitcode < 0:
        return 1, f"rank {rank} was ended by {failure.signal_name()}{MACHINE if -failure.exitcode in OF_MACHINE else ''}"
    return failure.exitcode, f"rank {rank} ended with exit code {failure.exitcode}"


if __name__ == "__main__":
    go_on_unread()
    run_and_leave(main)
