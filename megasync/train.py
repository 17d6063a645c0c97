"""The training program: the same on every rank, under torchrun or in Ray actors. Rank 0 also talks to Ray.

    python -m megasync.launch.torchrun --nproc-per-node 2 -m megasync.train CONFIG.yaml [key=value ...]
    python -m megasync.train --check --world-size 2 CONFIG.yaml [key=value ...]      # only says whether that would start

Exit codes: 0 done, now or before; 2 the config is wrong or the run is going on, nothing was started; 1 failed while running.
Leaves out the loops (loop.py).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from megasync.checks.check import check_config
from megasync.checks.unused import unused_keys
from megasync.config.errors import main_errors
from megasync.config.files import lock, newest_checkpoint
from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.data.prompts import RunData, load_data
from megasync.launch.processes import end_on_sigterm, run_and_leave
from megasync.launch.scope import is_one_machine, listen_on_loopback
from megasync.reporting.log import read_summary


def main(arguments: Sequence[str]) -> int:
    """Check the config and run it. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megasync.train", description="Train by a YAML config.")
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as engine.wrap=ddp")
    parser.add_argument("--check", action="store_true", help="only check the config")
    parser.add_argument("--world-size", type=int, help="with --check: the number of trainer ranks (default: WORLD_SIZE or 1)")
    given = parser.parse_intermixed_args(list(arguments))
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    with main_errors(speak=rank == 0):
        config = load_config(given.config, given.overrides)
        check_config(config, given.world_size or world_size, needs_data=given.check)
        if rank == 0 and not given.check:
            lock(config.run.folder)
        if not given.check and (why := why_done(config)):
            if rank == 0:
                print(f"{config.run.folder}: {why}")
            return 0
        if is_one_machine(config):
            listen_on_loopback()  # before anything imports ray
        reads_data = rank == 0 or config.algorithm.name == "sft"  # rollouts are rank 0's
        data = load_data(config) if reads_data and not given.check else None
    for note in unused_keys(config) if given.check else ():
        print(note)
    return 0 if given.check else run(config, data)


def why_done(config: Config) -> str:
    """What to say where a start would find nothing to do; empty where it would.

    All steps, or those that it took to `run.stop_at_accuracy`, what `Session.finish` writes last and the weights are there.
    """
    run, folder = config.run, config.run.folder
    is_exported = not run.export_hf or (folder / "hf").is_dir()
    if config.checkpoint.resume != "auto" or newest_checkpoint(folder) is None or not is_exported:
        return ""
    summary = read_summary(folder)
    steps, accuracy = summary.get("steps", 0), summary.get("accuracy_after") or 0.0
    if steps >= run.steps:
        return f"all {run.steps} steps are done; for more of them write run.steps=NUMBER"
    if 0 < run.stop_at_accuracy <= accuracy:
        return f"the accuracy is {accuracy:g} after {steps} steps; for more of them raise run.stop_at_accuracy"
    return ""


def run(config: Config, data: RunData | None) -> int:
    """Train by a checked config on this rank. Returns the exit code. `data`: None on the ranks that need none."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    from bridge.messages import SyncError
    from engine.checkpoint import CheckpointError
    from engine.objective.metrics import NonFiniteError
    from engine.runtime import parallel
    from megasync.run.canary import CanaryError
    from megasync.run.loop import train_grpo, train_sft
    from megasync.run.rank_zero import RankZeroError
    from megasync.run.session import Session

    rank = int(os.environ.get("RANK", "0"))
    end_on_sigterm()
    session, is_well = None, False
    try:
        with main_errors(speak=rank == 0):
            session = Session(config, data)
        (train_sft if config.algorithm.name == "sft" else train_grpo)(session)
        session.finish()
        is_well = True
    except Exception as error:
        get_error_handler().record_exception(error)  # for the launcher, which says it last
        if not isinstance(error, NonFiniteError | SyncError | RankZeroError | CanaryError | CheckpointError):
            raise
        at, last = (f"step {session.step}: ", session.last_checkpoint) if session is not None else ("", None)
        if rank == 0:
            print(f"{at}{error}\nlast checkpoint: {last or 'none'}", file=sys.stderr, flush=True)
        return 1
    finally:
        if session is not None:
            session.close(is_done=is_well)
        parallel.shutdown()
        if session is not None and is_well:
            session.heartbeat.leave()
    return 0


if __name__ == "__main__":
    run_and_leave(main)
