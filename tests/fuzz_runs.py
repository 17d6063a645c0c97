"""Whole tiny runs on a CPU, under random kills and stops and resumed by random other configs, for as long as one likes.

Of half of the runs samples are episodes (tests/support/fuzzed.py), whose processes are killed, too.

    python -m tests.fuzz_runs --minutes 60 --seed 0        # each run prints its seed
    python -m tests.fuzz_runs --runs 1 --seed 17           # that run alone

Each process has a time limit and leaves nothing behind; in the end every prompt in samples.jsonl stands beside its own answer and
reward, none was trained twice, every batch is whole, no sample is too old for its step, and no evaluation is missing or there
twice. A run that fails is reported with its folder, which stays, and the next one begins. Leaves out the stream on its own, which
test_stream_walks.py tries far more often.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bridge.versions.reader import VersionReader
from megasync.config.files import CHECKPOINTS, VERSIONS
from megasync.run.checkpoints import marked
from tests.support.fuzzed import worth
from tests.runs.train_cases import TORCHRUN, Run, leaves_nothing, metrics, processes_with, write_config

LIMIT_SECONDS = 600.0  # of one process of a run
NUM_STEPS, MOST_PROCESSES, MAX_NEW_TOKENS = 8, 5, 8
SUM = re.compile(r"(\d+)\+(\d+)=")
SPECIAL = re.compile("<[a-z]+>")
KINDS = ("nothing", "rank", "replica", "launcher", "terminate", "stop rank", "stop replica")
OF_EPISODES = ("episodes", "keeper")  # the processes that they are in, and their parents
EPISODES = ("", "long", "long", "short", "scored", "scored")  # tests/support/fuzzed.py; "": of one turn
MAY_GO_ON = ("nothing", "replica", "stop replica", *OF_EPISODES)  # as if nothing had been


@dataclass(frozen=True)
class Choice:
    """What may be another at each resume; `data`: how often a line had been taken out of the data."""

    batch_size: int
    max_staleness: int
    on_update: str
    evaluate_every_steps: int
    filter_groups: bool
    group_size: int
    reward: str
    data: int
    episode: str
    max_turns: int
    takes_newest: bool  # the weights of steps after the checkpoint

    @staticmethod
    def draw(source: random.Random, data: int, algorithm: str, *, plays: bool, keeps_versions: bool) -> Choice:
        """`plays`: whether its samples may be episodes. `keeps_versions`: whether the run has a log of its weights."""
        return Choice(
            batch_size=source.choice((4, 7, 8)),
            max_staleness=source.choice((0, 1, 2)),
            on_update=source.choice(("drain", "continue", "restart")),
            evaluate_every_steps=source.choice((0, 2, 3)),
            filter_groups=source.random() < 0.5 and algorithm != "sft",  # which has no groups
            group_size=source.choice((2, 4)),
            reward=source.choice(("exact_match", "token_count", "token_count")),
            data=data,
            episode=source.choice(EPISODES) if plays else "",
            max_turns=source.choice((1, 2, 2, 2)),
            takes_newest=keeps_versions and source.random() < 0.5,
        )

    def overrides(self) -> list[str]:
        values: dict[str, Any] = {name: getattr(self, name) for name in ("max_staleness", "on_update", "group_size", "reward")}
        rollout = {"evaluate_every_steps": self.evaluate_every_steps, **values}
        if self.episode:
            rollout |= {"episode": f"tests.support.fuzzed:{self.episode}", "episode_max_turns": self.max_turns}
        filters = f"algorithm.filter_groups={str(self.filter_groups).lower()}"
        own = [f"data.batch_size={self.batch_size}", filters, *(f"rollout.{key}={value}" for key, value in rollout.items())]
        return [*own, "checkpoint.resume=newest_weights"] if self.takes_newest else own


def first_config(source: random.Random, folder: Path) -> tuple[Path, str, bool]:
    """And the algorithm, and whether the run keeps weights that it can go on from between checkpoints."""
    held_out = folder / "held_out.jsonl"
    held_out.write_text("".join(f'{{"question": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(8)))
    name = source.choice((*["grpo"] * 7, "sft"))
    limits = {"answer_timeout_seconds": 30, "start_timeout_seconds": 200}
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": NUM_STEPS, "log_samples": 1000, "hung_rank_timeout_seconds": 60},
        "engine": {"wrap": source.choice(("ddp", "megatron_fsdp")), "lora": {"rank": source.choice((0, 0, 4))}},
        "rollout": {"replicas": source.choice((1, 2)), "max_new_tokens": MAX_NEW_TOKENS, "max_model_len": 48, **limits},
        "algorithm": {"name": name},
        "data": {"eval": str(held_out)},
        "checkpoint": {"every_steps": source.choice((1, 2, 3, 5)), "asynchronous": source.random() < 0.3},
    }
    keeps_versions = name == "grpo" and not sections["engine"]["lora"]["rank"] and source.random() < 0.7
    if keeps_versions:
        sections["sync"] = {"log": "deltas", "log_full_every": 3, "log_keep": source.choice((1, 3, None))}
    print("   ", {section: sections[section] for section in ("engine", "rollout", "algorithm", "checkpoint")}, flush=True)
    return write_config(folder, **sections), name, keeps_versions


def first_step(run: Path, choice: Choice) -> int:
    """After which step a process of a run goes on."""
    saved = max((int(path.name.removeprefix("step_")) for path in (run / CHECKPOINTS).glob("step_*")), default=0)
    marker = marked(run) if saved and choice.takes_newest else None
    is_there = marker is not None and marker[0] in VersionReader(run / VERSIONS).versions
    return max(saved, marker[0]) if marker is not None and is_there else saved


def take_line_out(source: random.Random, folder: Path) -> None:
    """One of the first lines of the data, which shifts all that follow."""
    lines = (folder / "assets" / "train.jsonl").read_text().splitlines(keepends=True)
    del lines[source.randrange(20)]
    (folder / "assets" / "train.jsonl").write_text("".join(lines))


def num_steps_logged(run: Path, former: int) -> int | None:
    """None until this process has opened metrics.jsonl, which begins with a new file; `former`: the inode of the one before."""
    with suppress(FileNotFoundError):
        if inode_of(run) not in (0, former):
            return (run / "metrics.jsonl").read_bytes().count(b"\n")
    return None


def inode_of(run: Path) -> int:
    """Of metrics.jsonl; 0 where there is none."""
    path = run / "metrics.jsonl"
    return path.stat().st_ino if path.is_file() else 0


def disturb(source: random.Random, run: Run, former: int, kinds: tuple[str, ...]) -> str:
    """What `hit` does, at a random time of the start or after a random number of steps; or nothing."""
    kind, at_start, num_steps = source.choice(kinds), source.random() < 0.15, source.randrange(NUM_STEPS)
    delay, deadline = source.uniform(0, 30 if at_start else 3), time.monotonic() + LIMIT_SECONDS
    while kind != "nothing" and run.process.poll() is None and time.monotonic() < deadline:
        logged = num_steps_logged(run.folder, former)
        if at_start or (logged is not None and logged >= num_steps):
            time.sleep(delay)
            with suppress(psutil.Error, IndexError, ProcessLookupError):
                if kind == "stop rank" and (at_start or len(run.ranks()) == 1):
                    kind = "rank"  # nobody watches a single one, nor one that has not yet given a sign of life (heartbeat.py)
                hit(source, kind, run)
                return f"{kind}, with {logged} steps done"
            break
        time.sleep(0.1)
    return "nothing"


def hit(source: random.Random, kind: str, run: Run) -> None:
    """A kill or a stop of a rank or of a replica's engine, a kill of a process of episodes or of its parent, or the end of the
    launcher by a kill or in order.
    """
    number = signal.SIGSTOP if kind.startswith("stop") else signal.SIGKILL
    if kind.endswith("rank"):
        source.choice(run.ranks()).send_signal(number)
    elif kind.endswith("replica"):
        engines = [each for each in processes_with(run.marker) if "EngineCore" in " ".join(each.cmdline())]
        source.choice(engines).send_signal(number)
    elif kind in OF_EPISODES:
        keepers = [each for each in processes_with(run.marker) if "megasync.workers.fork_server" in " ".join(each.cmdline())]
        inner = [each for each in keepers if each.parent() in keepers]  # the process was forked from its keeper
        source.choice(inner if kind == "episodes" else [each for each in keepers if each not in inner]).kill()
    else:
        run.process.send_signal(signal.SIGKILL if kind == "launcher" else signal.SIGTERM)


def process(source: random.Random, config: Path, choice: Choice, *, is_last: bool) -> int:
    """One process of a run, from its start or a checkpoint to its end or a kill: its exit code."""
    said, ranks = config.parent / "said", source.choice((1, 2))
    former = inode_of(config.parent / "runs" / "run")
    with leaves_nothing(config) as own, said.open("ab") as output:
        command = [*TORCHRUN, str(config), *choice.overrides(), "--nproc", str(ranks)]
        launched = subprocess.Popen(command, env=own, stdout=output, stderr=output)
        run = Run(launched, config.parent / "runs" / "run", own["MEGASYNC_TEST_MARKER"], said)
        print("   ", " ".join(choice.overrides()), f"data {choice.data}, {ranks} ranks", flush=True)
        kinds = (*KINDS, *OF_EPISODES, *OF_EPISODES) if choice.episode else KINDS
        kind = "nothing" if is_last else disturb(source, run, former, kinds)
        try:
            code = launched.wait(LIMIT_SECONDS)
        finally:
            for each in processes_with(run.marker) if launched.poll() is None else ():
                each.send_signal(signal.SIGABRT)  # it says where it stands
        print(f"        {kind}: exit code {code}", flush=True)
    assert code == 0 or not kind.startswith(MAY_GO_ON), f"exit code {code}"
    return code


def reward_of(line: dict[str, Any], choice: Choice) -> float:
    """What it has to be."""
    response, num_tokens = line["response"], line["tokens"]
    if choice.episode:
        turns = [piece for piece in line["branches"][-1] if piece["sampled"]]
        assert len(turns) == line["turns"] == min(choice.max_turns, 2) and len(line["branches"]) == 1, line
        if choice.max_turns == 1:
            return 0.0  # its second turn was one too many
        assert line["info"]["answer"] == line["answer"], f"the answer of another: {line}"
        response, num_tokens = SPECIAL.sub("", turns[-1]["text"]), turns[-1]["tokens"]  # a reward sees the last turn
    is_exact = choice.reward == "exact_match"
    value = float(response.strip() == line["answer"]) if is_exact else num_tokens / MAX_NEW_TOKENS
    return worth(choice.episode, line, value) if choice.episode else value


def check_samples(run: Path, choices: dict[int, Choice]) -> None:
    """`choices`: by step."""
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["set"] == "train"]
    for line in lines:
        numbers = SUM.search(line["prompt"])
        assert numbers and int(numbers[1]) + int(numbers[2]) == int(line["answer"]), f"prompt and answer of others: {line}"
    for line in trained:
        choice, (oldest, newest) = choices[line["step"]], line["versions"]
        assert math.isclose(line["reward"], reward_of(line, choice)), f"the reward of another: {line}"
        version = line["step"] - 1
        assert version - choice.max_staleness <= oldest <= newest <= version, f"too old or too new: {line}"
    for step, choice in choices.items():
        num_lines = sum(line["step"] == step for line in trained)
        assert num_lines == choice.batch_size, f"step {step} has {num_lines} prompts in place of {choice.batch_size}"
    numbers_of = [(choices[line["step"]].data, line["line"]) for line in trained]
    assert len(set(numbers_of)) == len(numbers_of), "a prompt was trained twice"


def check_evaluations(run: Path, choices: dict[int, Choice]) -> None:
    """Each once, in order: those that were due, that before the first and that after the last step."""
    steps = [json.loads(line)["step"] for line in (run / "evaluations.jsonl").read_text().splitlines()]
    due = {step for step, choice in choices.items() if (every := choice.evaluate_every_steps) and step % every == 0}
    assert steps == sorted(set(steps)) and {0, NUM_STEPS, *due} <= set(steps), f"evaluations after {steps}, due after {due}"


def one_run(seed: int, folder: Path) -> None:
    source = random.Random(seed)
    config, algorithm, keeps_versions = first_config(source, folder)
    run, data = folder / "runs" / "run", 0
    plays = algorithm != "sft" and source.random() < 0.5
    choices: dict[int, Choice] = {}  # by step: those of the process that trained it last
    for number in range(MOST_PROCESSES):
        if number and source.random() < 0.3:
            take_line_out(source, folder)
            data += 1
        choice = Choice.draw(source, data, algorithm, plays=plays, keeps_versions=keeps_versions)
        choices |= dict.fromkeys(range(first_step(run, choice) + 1, NUM_STEPS + 1), choice)
        if process(source, config, choice, is_last=number == MOST_PROCESSES - 1) == 0:
            break
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1)), lines
    check_evaluations(run, choices)
    if algorithm != "sft":
        check_samples(run, choices)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz_runs", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--runs", type=int, default=sys.maxsize)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    os.environ.setdefault("PYTEST_XDIST_WORKER", "gw0")  # others run beside it (train_cases.py)
    end, failed = time.monotonic() + 60 * given.minutes, list[int]()
    for seed in range(given.seed, given.seed + given.runs):
        if time.monotonic() > end:
            break
        begin, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="fuzz-"))
        print(f"seed {seed}", flush=True)
        try:
            one_run(seed, folder)
        except (AssertionError, subprocess.TimeoutExpired):
            failed.append(seed)
            print(f"    WRONG after {time.monotonic() - begin:.0f} s, in {folder}: {traceback.format_exc()}", flush=True)
            continue
        print(f"    right after {time.monotonic() - begin:.0f} s", flush=True)
        shutil.rmtree(folder)
    print(f"failed: {failed or 'none'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
