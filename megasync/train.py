"""The training program: the same on every rank, under torchrun or in Ray actors. Rank 0 also talks to Ray.

    python -m megasync.launch.torchrun --nproc-per-node 2 -m megasync.train CONFIG.yaml [key=value ...]
    python -m megasync.train --check --world-size 2 CONFIG.yaml [key=value ...]      # only says whether that would start

Exit codes: 0 done; 2 the config is wrong, nothing was started; 1 failed while running. Leaves out the loops (loop.py).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from megasync.config.check import check_config
from megasync.config.errors import main_errors
from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.launch.processes import end_on_sigterm, run_and_leave
from megasync.launch.scope import is_one_machine, listen_on_loopback
from megasync.rollouts.prompts import RunData, load_data


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
        if is_one_machine(config):
            listen_on_loopback()  # before anything imports ray
        reads_data = rank == 0 or config.algorithm.name == "sft"  # rollouts are rank 0's
        data = load_data(config) if reads_data and not given.check else None
    return 0 if given.check else run(config, data)


def run(config: Config, data: RunData | None) -> int:
    """Train by a checked config on this rank. Returns the exit code. `data`: None on the ranks that need none."""
    from bridge.messages import SyncError
    from engine import parallel
    from engine.checkpoint import CheckpointError
    from engine.metrics import NonFiniteError
    from megasync.canary import CanaryError
    from megasync.loop import train_grpo, train_sft
    from megasync.rank_zero import RankZeroError
    from megasync.session import Session

    rank = int(os.environ.get("RANK", "0"))
    end_on_sigterm()
    session, is_done = None, False
    try:
        with main_errors(speak=rank == 0):
            session = Session(config, data)
        (train_sft if config.algorithm.name == "sft" else train_grpo)(session)
        session.finish()
        is_done = True
    except (NonFiniteError, SyncError, RankZeroError, CanaryError, CheckpointError) as error:
        if rank == 0:
            last = session.last_checkpoint if session is not None else None
            at = f"step {session.step}: " if session is not None else ""
            print(f"{at}{error}\nlast checkpoint: {last or 'none'}", file=sys.stderr, flush=True)
        return 1
    finally:
        if session is not None:
            session.close(is_done=is_done)
        parallel.shutdown()
        if session is not None and is_done:
            session.heartbeat.leave()
    return 0


if __name__ == "__main__":
    run_and_leave(main)
