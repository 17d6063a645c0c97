"""Changes the number of replicas of an active run: writes a request, and prints the run's answers until it is done.

The run reads the request at its next sync. New replicas start in the background and join at the first sync after their start.
Leaving replicas get no more groups, and end when their running groups are done. Leaves out the trainer's side (run/scaling.py).

    megasync scale runs/rl --replicas 4
    megasync scale runs/rl --without node3      # before the node is shut down: its replicas leave and are not replaced

Exit codes: 0 done, or request written with --no-wait; 1 replicas did not start, or the run ended first; 2 refused.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megasync.config.errors import ConfigError, main_errors, nearest_name, refuse_if
from megasync.config.files import lock_holder
from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.report.log import CONFIG_FILE
from megasync.run.scaling import FAILED, Request, ask, is_replaced, read_answer

POLL_SECONDS = 0.3
NOTICE_SECONDS = 15.0  # without an answer, after which a line explains the wait


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megasync scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the folder of an active run")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--replicas", type=int, metavar="N", help="the new total number of replicas")
    what.add_argument("--without", default="", metavar="HOST", help="remove the replicas on this host")
    parser.add_argument("--no-wait", action="store_true", help="exit after writing the request")
    return parser.parse_args(list(arguments))


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    given = parse(arguments)
    with main_errors():
        config = run_config(given.run_folder)
        check(config, given)
        request = Request(secrets.token_hex(8), given.replicas or 0, given.without, config.rollout.replicas)
        ask(given.run_folder, request)
    if given.no_wait:
        print("asked; the run takes it at its next sync")
        return 0
    return wait(given.run_folder, request)


def run_config(run_folder: Path) -> Config:
    """The config of an active run.

    Raises:
        ConfigError: the folder is not a run's, or no run is active in it.
    """
    if not (run_folder / CONFIG_FILE).is_file():
        siblings = sorted(path.parent.name for path in run_folder.parent.glob(f"*/{CONFIG_FILE}"))
        near = nearest_name(run_folder.name, siblings)
        there, nearest = ", ".join(siblings[:12]), str(run_folder.parent / near) if near else ""
        remedy = "name a run's folder, which is run.dir/run.name of its config"
        raise ConfigError(f"{run_folder}: there is no such run folder", nearest=nearest, there=there, remedy=remedy)
    config = load_config(run_folder / CONFIG_FILE)
    remedy = f"write rollout.replicas=NUMBER (now {config.rollout.replicas}) when you start it"
    refuse_if(lock_holder(run_folder) is None, f"{run_folder}: no run goes on in this folder", remedy=remedy)
    return config


def check(config: Config, given: argparse.Namespace) -> None:
    """Checks the request against the run's config.

    Raises:
        ConfigError: the run would refuse the request.
    """
    message = f"{given.run_folder}: algorithm.name = {config.algorithm.name} has no replicas"
    refuse_if(config.algorithm.name != "grpo", message, remedy="name the folder of a run with rollouts")
    remedy = "start the run with rollout.placement=separate"
    message = "rollout.placement = colocated: replicas share the GPUs of the trainer's ranks, and their number is fixed"
    refuse_if(config.rollout.is_colocated, message, remedy=remedy)
    minimum = config.rollout.min_replicas
    message = f"--replicas {given.replicas}: fewer than rollout.min_replicas = {minimum}, below which the run stops"
    remedy = f"write --replicas {minimum} or more; touch {given.run_folder}/stop ends the run with a checkpoint"
    refuse_if(given.replicas is not None and given.replicas < minimum, message, remedy=remedy)


def wait(run_folder: Path, request: Request) -> int:
    """Prints the run's answers until the request is done; returns the exit code."""
    num_printed, begin, has_noticed = 0, time.monotonic(), False
    while True:
        is_over = lock_holder(run_folder) is None  # before reading the answer, so that the last answer is not missed
        answer = read_answer(run_folder)
        if answer is not None and answer.key == request.key:
            for line in answer.lines[num_printed:]:
                print(line, file=sys.stderr if answer.code else sys.stdout, flush=True)
            num_printed = len(answer.lines)
            if answer.code is not None:
                return answer.code
        if is_replaced(run_folder, request):
            print("another request has replaced this one", file=sys.stderr)
            return FAILED
        if is_over:
            print(f"{run_folder}: the run has ended", file=sys.stderr)
            return FAILED
        if not num_printed and not has_noticed and time.monotonic() - begin > NOTICE_SECONDS:
            print("asked; the run takes it at its next sync", flush=True)
            has_noticed = True
        time.sleep(POLL_SECONDS)
