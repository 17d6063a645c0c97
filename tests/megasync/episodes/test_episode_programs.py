"""Programs that an episode has started end with its process, and that with the trainer, however either is ended. Real processes.

python -m pytest tests/megasync/episodes/test_episode_programs.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megasync.tools.assets.command import build_tokenizer

LIMIT_SECONDS = 60.0
ROOT = Path(__file__).resolve().parents[3]
TRAINER = """
import asyncio, sys
from megasync.config.schema import Config, DataConfig, ModelConfig, RolloutConfig
from megasync.episodes.pool import EpisodePool
from megasync.episodes.segments import Turn
from megasync.episodes.task import Task

async def ask(asked):
    return Turn([5], [-0.5], [4], "stop")

rollout = RolloutConfig(episode="tests.support.episodes:programs", episode_processes=1)
pool = EpisodePool(Config(model=ModelConfig(path=sys.argv[1]), data=DataConfig(), rollout=rollout))
print(asyncio.run(pool.run(Task(sys.argv[2], (7,), ""), ask))[0].failure, flush=True)
pool.close()
"""

JOBS = """
import subprocess
from megasync.workers.children import CURRENT_JOB, Children

def start(job):
    CURRENT_JOB.set(job)
    return subprocess.Popen(["sleep", "60"])

def lives(program):
    try:
        return program.wait(0.3) is None
    except subprocess.TimeoutExpired:
        return True

children = Children()
first, second = start(1), start(2)
children.end(1)
print(lives(first), lives(second))
with children.of(3):
    third = start(3)
children.end(3)
print(lives(first), lives(second), lives(third))
children.end_all()
print(lives(first), lives(second))
"""


def until(condition: Callable[[], object]) -> bool:
    """Whether it comes true in time."""
    end = time.monotonic() + LIMIT_SECONDS
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return bool(found)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_program_that_may_be_another_jobs_lives_until_no_job_runs() -> None:
    """Two jobs start one each, from threads, before anyone looks for new children."""
    said = subprocess.run([sys.executable, "-c", JOBS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["True True", "True True False", "False False"]


@pytest.mark.parametrize("ended", ["trainer", "process"])
def test_no_program_outlives_the_process_of_its_episode(tmp_path: Path, ended: str) -> None:
    """A child, one in a session of its own, a daemon that has left its parent, and one that is stopped."""
    build_tokenizer().save_pretrained(tmp_path)
    pids = tmp_path / "pids"
    command = [sys.executable, "-c", TRAINER, str(tmp_path), str(pids)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as trainer:
        try:
            assert until(pids.exists)
            process, *programs = map(int, pids.read_text(encoding="utf-8").split())
            assert len(programs) == 4 and all(map(lives, (process, *programs)))
            os.kill(trainer.pid if ended == "trainer" else process, signal.SIGKILL)
            said, _ = trainer.communicate(timeout=60)
            assert ended == "trainer" or "had its process killed by SIGKILL" in said
            left = (process, *programs)
            assert until(lambda: not any(map(lives, left))), [pid for pid in left if lives(pid)]
        finally:
            trainer.kill()
            for pid in map(int, pids.read_text(encoding="utf-8").split() if pids.exists() else []):
                if lives(pid):
                    os.kill(pid, signal.SIGKILL)
