"""The training program: the same on every rank, under torchrun or in Ray actors. Rank 0 also talks to Ray.

Started by hand it checks the config, and becomes torchrun with ranks for this machine.

    megasync train CONFIG.yaml [key=value ...] [--nproc N]
    megasync train --check CONFIG.yaml [key=value ...]      # only says what that would start

Exit codes: 0 done, now or before; 2 the config is wrong or the run is going on, nothing was started; 1 failed while running.
Leaves out the loops (loop.py).
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megasync.checks.banner import banner
from megasync.checks.check import check_config
from megasync.checks.data import ask_vllm
from megasync.checks.own_answers import OwnScores, score_own_answers, try_judges
from megasync.checks.preview import preview
from megasync.checks.unused import unused_keys
from megasync.config.errors import DISK_FULL, main_errors
from megasync.config.files import lock, newest_checkpoint, refuse_if_locked
from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.data.load import RunData, load_data
from megasync.launch import launcher
from megasync.launch.devices import visible_devices
from megasync.launch.exit_summary import COMMAND
from megasync.launch.num_ranks import default_num_ranks
from megasync.launch.processes import end_on_sigterm, hold_signals, ignore_signals, run_and_leave, torchrun
from megasync.launch.scope import check_ray, is_one_machine, listen_on_loopback
from megasync.launch.stop_request import forget_former_stop, forget_stop_before_launch
from megasync.report.log import read_summary

if TYPE_CHECKING:
    from megasync.run.heartbeat import Heartbeat
    from megasync.run.replica_start import ReplicaStart
    from megasync.run.rollout_session import RolloutSession
    from megasync.run.session import ExitCallbacks, Session
    from megasync.run.supervised import SupervisedSession

FIRST_ANSWERS = 4  # of each data set, that rewards are tried on before a run starts; --check takes more
EXAMPLES = """examples:
  megasync train --check configs/smollm2.yaml                             # what would start; nothing does
  megasync train configs/smollm2.yaml                                     # on this machine's GPUs or CPU
  megasync train configs/smollm2.yaml run.name=slower engine.optimizer.learning_rate=1e-5"""


def main(arguments: Sequence[str]) -> int:
    """Check the config and run it. Returns the exit code."""
    given = parse(arguments)
    with main_errors():
        starts = not launcher.is_rank(os.environ, given.num_ranks) or given.check
    if starts:
        return start(given, arguments)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with main_errors(speak=True):
        launcher.await_store(os.environ)
    with main_errors(speak=is_first_of_node()):
        config = load_config(given.config, given.overrides)
        check_config(config, world_size, needs_data=False, makes_folder=True)
        if rank == 0:
            check_ray(config)
            lock(config.run.folder)
            forget_stop_before_launch(config.run.folder)
        if why := why_done(config):
            if rank == 0:
                print(f"{config.run.folder}: {why}")
            return 0
        if is_one_machine(config):
            listen_on_loopback()  # before anything imports ray
    end_on_sigterm(and_on_sigint=True)
    if config.run.deterministic:
        from engine.runtime.random_state import use_deterministic

        use_deterministic()  # also by its environment, which replicas inherit
    with starting_replicas(config, rank) as replicas:
        with main_errors(speak=is_first_of_node()):
            reads_data = rank == 0 or config.algorithm.name == "sft"  # rollouts are rank 0's
            data = load_data(config) if reads_data else None
        if rank == 0 and config.run.progress != "none":
            print(banner(config, world_size, data), flush=True)
        return run(config, data, replicas)


def is_first_of_node() -> bool:
    """Whether this rank prints errors that all ranks raise: each node's log has them before the head's launcher ends."""
    return os.environ["LOCAL_RANK"] == "0"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Flags may stand before, between and after the overrides."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="megasync train", description="Train by a YAML config.", epilog=EXAMPLES, formatter_class=raw
    )
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="such as engine.wrap=ddp")
    parser.add_argument("--check", action="store_true", help="only say what would start")
    help_ = "trainer ranks on this machine (default: the environment's NPROC; 2 without GPUs, else the GPUs less the replicas')"
    of_environment = (os.environ.get("NPROC") or None) if "LOCAL_RANK" not in os.environ else None
    flags = ("--nproc", "--world-size")
    parser.add_argument(*flags, dest="num_ranks", type=int, default=of_environment, metavar="N", help=help_)
    given = parser.parse_intermixed_args(list(arguments))
    if given.num_ranks is not None and given.num_ranks < 1:
        parser.error(f"--nproc {given.num_ranks}: at least 1")
    return given


def start(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    """By hand, not as a rank: check, and unless that is all, become torchrun, which Ctrl-C then reaches itself."""
    is_rank = launcher.is_rank(os.environ)  # that is only to be checked
    given.num_ranks = given.num_ranks or (int(os.environ["WORLD_SIZE"]) if is_rank else None)
    if left_out := "" if is_rank else launcher.forget(os.environ):
        print(f"{left_out} in the environment, of no rank: left out, this command starts the ranks", file=sys.stderr)
    with main_errors():
        config = load_config(given.config, given.overrides)
        num_ranks = given.num_ranks or default_num_ranks(config, len(visible_devices()))
        if sys.stderr.isatty() and config.run.progress != "none" and not given.check:  # a rank has imports to do
            ranks = f"{num_ranks} rank{'' if num_ranks == 1 else 's'}"
            print(f"checking {given.config}, its model and data, then starting {ranks}", file=sys.stderr, flush=True)
        data = check_config(config, num_ranks)
        check_ray(config)
        why = why_done(config)
        if given.check:
            refuse_if_locked(config.run.folder)
            ask_vllm(config)
    if why:
        print(f"{config.run.folder}: {why}")
        return 0
    if given.check:
        with main_errors():
            shown = [preview(config, data), *data.notes] if data is not None else []
        print("\n".join([banner(config, num_ranks, data), *shown, *unused_keys(config)]))
        return 0
    with main_errors():
        forget_former_stop(config.run.folder)
        scored, judged = list[OwnScores](), list[str]()
        if data is not None and config.algorithm.name == "grpo":
            scored = score_own_answers(config, data, FIRST_ANSWERS)
            judged = try_judges(config, data, FIRST_ANSWERS)
    for line in (*judged, *(line for scores in scored if scores.is_wrong for line in scores.lines())):
        print(line)
    by_hand = ["megasync"] if shutil.which("megasync") else [sys.executable, "-m", "megasync"]
    os.environ.setdefault(COMMAND, shlex.join([*by_hand, "train", *arguments]))
    command = torchrun(num_ranks, "megasync.train", given.config, *given.overrides)
    sys.stdout.flush()
    hold_signals()  # in the middle of imports they would print a traceback
    return os.execv(command[0], command)  # noqa: S606 # no shell is wanted


def why_done(config: Config) -> str:
    """Why a start has nothing to do; empty where it has.

    All steps, or the ones up to `run.stop_at_accuracy`, are done, and the summary and the exported weights are there.
    """
    run, folder = config.run, config.run.folder
    is_exported = not run.export_hf or (folder / "hf").is_dir()
    if not config.checkpoint.resumes or newest_checkpoint(folder) is None or not is_exported:
        return ""
    summary = read_summary(folder)
    steps, accuracy = summary.get("steps", 0), summary.get("eval_accuracy_after") or 0.0
    if steps >= run.steps:
        return f"all {run.steps} steps are done; for more of them write run.steps=NUMBER, for another run run.name=NAME"
    if 0 < run.stop_at_accuracy <= accuracy:
        return f"the accuracy is {accuracy:g} after {steps} steps; for more of them raise run.stop_at_accuracy"
    return ""


@contextmanager
def starting_replicas(config: Config, rank: int) -> Iterator[ReplicaStart | None]:
    """Rank 0's replicas, if the run has any: they begin to start before the trainer's imports.

    They have ended when the block is left.
    """
    if rank != 0 or config.algorithm.name != "grpo":
        yield None
        return
    from megasync.run.replica_start import ReplicaStart

    replicas = ReplicaStart(config)
    try:
        replicas.begin()
        yield replicas
    finally:
        replicas.close()


def run(config: Config, data: RunData | None, replicas: ReplicaStart | None) -> int:
    """Train by a checked config on this rank. Returns the exit code. `data`: None on ranks without; `replicas`: rank 0's."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    from engine.runtime import parallel
    from megasync.run.ending import finish
    from megasync.run.heartbeat import Heartbeat
    from megasync.run.session import ExitCallbacks

    rank = int(os.environ.get("RANK", "0"))
    heartbeat, ends = Heartbeat.of_process(config.run.hung_rank_timeout_seconds), ExitCallbacks()
    if replicas is not None:
        ends.callback(replicas.close)
    session, last_lines = None, ""
    try:
        heartbeat.start()
        with main_errors(speak=is_first_of_node(), of_files=False):  # errors of files may pass: a restart tries again
            session = build_session(config, data, replicas, heartbeat, ends)
        train(session)
        last_lines = finish(session)
        ends.is_done = True
    except Exception as error:
        ignore_signals()  # the other ranks have failed as well, and torchrun ends this one
        get_error_handler().record_exception(error)  # for the launcher's last lines
        if not is_known(error):
            raise
        if rank == 0:
            print_failure(config, session, error)
        return 1
    finally:
        if not ends.is_done:
            heartbeat.close()
        close(ends)
        parallel.shutdown()
        if ends.is_done:
            heartbeat.leave()
    if last_lines and config.run.progress != "none":
        print(last_lines, flush=True)  # after all parts that could write have ended
    return 0


def build_session(
    config: Config, data: RunData | None, replicas: ReplicaStart | None, heartbeat: Heartbeat, ends: ExitCallbacks
) -> RolloutSession | SupervisedSession:
    """Complete; collective. Its parts end with `ends`."""
    if config.algorithm.name == "sft":
        from megasync.run.supervised import SupervisedSession

        assert data is not None
        return SupervisedSession(config, data, heartbeat, ends)
    from megasync.run.rollout_session import RolloutSession

    return RolloutSession(config, data, replicas, heartbeat, ends)


def train(session: RolloutSession | SupervisedSession) -> None:
    """All steps."""
    from megasync.run.loop import train_grpo, train_sft
    from megasync.run.supervised import SupervisedSession

    if isinstance(session, SupervisedSession):
        train_sft(session)
    else:
        train_grpo(session)


def is_known(error: Exception) -> bool:
    """Whether its text says enough, without a traceback."""
    from bridge.messages import SyncError
    from bridge.replicas.actors import TooFewReplicasError
    from engine.checkpoint import CheckpointError
    from engine.objective.metrics import NonFiniteError
    from megasync.run.canary import CanaryError
    from megasync.run.rank_zero import RankZeroError
    from megasync.run.versions import VersionLogWriteError

    known = (NonFiniteError, SyncError, RankZeroError, TooFewReplicasError, CanaryError, CheckpointError, VersionLogWriteError)
    return isinstance(error, known) or (isinstance(error, OSError) and error.errno in DISK_FULL)


def print_failure(config: Config, session: Session | None, error: Exception) -> None:
    """`session`: None where it could not be built."""
    step = f"step {session.step + 1}: " if session is not None else ""
    hint = "\n`megasync doctor CONFIG` looks at this machine" if "did not start" in str(error) else ""
    print(f"{step}{error}{hint}", file=sys.stderr, flush=True)
    if session is not None:
        session.checkpoints.give_up()
    print(f"newest checkpoint: {newest_checkpoint(config.run.folder) or 'none'}", file=sys.stderr, flush=True)


def close(ends: ExitCallbacks) -> None:
    """After a failure an error because the disk is full does not hide the cause."""
    try:
        ends.close()
    except OSError as error:
        if ends.is_done or error.errno not in DISK_FULL:
            raise


if __name__ == "__main__":
    run_and_leave(main)
