"""The table of faults: its cases, what it finds wrong, and a run of it; who is silent; what becomes of a rank that is stopped.

    python -m pytest tests/test_faults.py
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.config import ReplicaConfig
from bridge.replicas.actors import ReplicaActor, ReplicaActors, TooFewReplicasError
from bridge.replicas.answers import no_answer
from bridge.transport.channel import open_store
from megasync.bench.config import BenchRoot
from megasync.bench.faults import judge
from megasync.bench.faults.cases import PHASES, SIGNALS, UNDISTURBED, Case, all_cases, chosen_cases
from megasync.bench.faults.run import prepare, run_one
from megasync.config.errors import ConfigError
from megasync.config.load import load_config
from megasync.heartbeat import Heartbeat, LastSeen, watched_ranks
from megasync.rollouts.progress import load_progress
from tests.ranks import ROOT, run_ranks
from tests.train_cases import write_config

CONFIG = ROOT / "configs" / "bench_faults.yaml"
EXPECTED = judge.Expected(num_steps=2, batch_size=2, max_staleness=1, num_replicas=2)


# Cases.


def test_the_table_has_each_phase_each_signal_and_ranks_in_turns() -> None:
    cases = all_cases(20, 6, 3, seed=0)
    replicas = [case for case in cases if case.kind == "replica"]
    assert {(case.phase, case.signal) for case in replicas} == {(phase, kind) for phase in PHASES for kind in SIGNALS}
    ranks = [case for case in cases if case.kind == "rank"]
    assert [case.number == 0 for case in ranks] == [True, False] * 10
    assert {(case.number > 0, case.signal) for case in ranks} == {(other, kind) for other in (True, False) for kind in SIGNALS}
    assert all(-1 <= case.step < 6 and 0 <= case.offset < 1 for case in ranks)
    assert len({case.name for case in cases}) == len(cases)
    assert [case.name for case in chosen_cases(cases, ["rank0-00", "pausing-core-SIGSTOP"])] == [
        UNDISTURBED, "replica-pausing-core-SIGSTOP", "rank0-00-SIGKILL"
    ]  # fmt: skip
    assert chosen_cases(cases, ["all"]) == cases
    assert Case.from_json(cases[-1].to_json()) == cases[-1]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("bench_faults.cases=[pausng]", "bench_faults.cases: pausng is no case"),
        ("bench_faults.num_ranks=1", "at least 2"),
        ("rollout.replicas=1", "write rollout.replicas=2"),
        ("algorithm.name=sft", "write algorithm.name=grpo"),
    ],
)
def test_a_table_that_cannot_be_starts_nothing(override: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare(load_config(CONFIG, [f"run.dir={tmp_path}", override], BenchRoot))


# What is found wrong.


def line(step: int, ordinal: int, *versions: int) -> dict[str, object]:
    samples = [{"tokens": [5] * len(versions), "log_probs": [-1.0] * len(versions), "versions": list(versions)}]
    return {"step": step, "ordinal": ordinal, "prompt": [1, 2], "samples": samples}


WHOLE = [line(0, 0, 0, 0), line(0, 2, 0), line(1, 1, 0, 1, 1), line(1, 3, 1)]


def test_a_run_that_is_right_has_no_problem() -> None:
    assert judge.find_untrained(WHOLE, EXPECTED) == []
    assert judge.find_wrong_versions(WHOLE, 1) == []
    assert judge.largest_gap(WHOLE, lambda version, text: [-1.0] * (len(text) - 1)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("lines", "problems"),
    [
        (WHOLE[:3], ["prompt 3 was never trained", "step 1 has 1 prompts"]),
        ([*WHOLE[:3], line(1, 2, 1)], ["prompt 3 was never trained", "prompt 2 was trained 2 times"]),
        ([*WHOLE, line(1, 4, 1)], ["prompt 4 is beyond the run", "step 1 has 3 prompts"]),
    ],
)
def test_prompts_that_are_lost_or_trained_twice_are_found(lines, problems) -> None:
    assert judge.find_untrained(lines, EXPECTED) == problems


def test_a_start_takes_back_the_steps_that_it_does_again() -> None:
    notes = [{"begin": 0}, line(0, 0), line(0, 2), line(1, 1), {"begin": 2}, line(1, 3), line(1, 1)]
    assert [each["ordinal"] for each in judge.trained_lines(notes, batch_size=2)] == [0, 2, 3, 1]


def test_versions_that_go_back_or_do_not_fit_are_found() -> None:
    found = judge.find_wrong_versions([line(1, 0, 1, 0), line(2, 1, 0), line(2, 2, 3)], max_staleness=1)
    assert [text.partition(": ")[2] for text in found] == [
        "versions go back within a sample: [1, 0]", "versions 0 to 0", "versions 3 to 3"
    ]  # fmt: skip
    commits = [{"replica": 0, "pid": 7, "version": version} for version in (0, 1, 1, 0)]
    commits.append({"replica": 0, "pid": 8, "version": 1})
    assert judge.find_steps_back(commits) == ["replica 0 went from version 1 to 0"]


def test_a_token_of_other_weights_and_a_restart_of_a_healthy_replica_are_found() -> None:
    own, other = judge.largest_gap(WHOLE, lambda version, text: [-1.0 - version] * (len(text) - 1))
    assert (own, other) == (1.0, 0.0)
    starts = [{"replica": replica} for replica in (0, 1, 0, 1)]
    case = Case("a", "replica", number=1)
    assert judge.count_starts(starts, case, EXPECTED)[1] == ["replica 0, which was not hit, was started 2 times"]
    assert judge.count_starts(starts, Case("b", "rank"), EXPECTED) == ({0: 2, 1: 2}, [])


# Who is silent.


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 4.9), st.sets(st.integers(0, 3))), max_size=40))
def test_silent_is_who_has_not_counted_up_for_the_limit(looks) -> None:
    """The looker comes by at least every 4.9 of 10 seconds, and each time some of four have counted up."""
    seen, now = LastSeen(range(4), 10.0, 0.0), 0.0
    counts, last = dict.fromkeys(range(4), 0), dict.fromkeys(range(4), 0.0)
    for place, (seconds, active) in enumerate(looks):
        now += seconds
        for rank in active | (set(range(4)) if place == 0 else set()):
            counts[rank], last[rank] = counts[rank] + 1, now
        assert seen.look(dict(counts), now) == [rank for rank in range(4) if now - last[rank] > 10]


def test_who_was_held_up_itself_blames_nobody() -> None:
    seen = LastSeen([1, 2], 10.0, 0.0)
    assert seen.look({}, 4.0) == seen.look({}, 8.0) == seen.look({}, 12.0) == [], "they were never there"
    assert seen.look({1: 5, 2: 5}, 13.0) == []
    assert seen.look({1: 5, 2: 5}, 60.0) == []
    assert seen.look({1: 6, 2: 5}, 64.0) == []
    assert seen.look({1: 7, 2: 5}, 68.0) == []
    seen.forget(1)
    assert seen.look({2: 5}, 71.0) == [2]


@pytest.mark.parametrize("world_size", [2, 3, 8, 9, 200])
def test_each_rank_is_watched_by_others(world_size) -> None:
    watched = [watched_ranks(rank, world_size) for rank in range(world_size)]
    assert all(rank not in own and len(own) <= 9 for rank, own in enumerate(watched))
    watchers = [sum(rank in own for own in watched) for rank in range(world_size)]
    assert min(watchers) >= min(7, world_size - 1)


def test_messages_name_who_is_waited_for() -> None:
    assert no_answer([1], "pause", 6.0) == "replica 1 gave no answer for 6 s to pause"
    assert no_answer([0, 2], "commit of version 3", 0.5) == "replicas 0, 2 gave no answer for 0.5 s to commit of version 3"


# Replicas that do not come back.


class Unstartable(ReplicaActors):
    """Of which no start works before the one of that number."""

    def __init__(self, works_at: int) -> None:
        super().__init__(ReplicaConfig("nowhere"), 2)
        self.works_at, self.num_launches = works_at, 0
        self._actors = {0: ReplicaActor(None), 1: ReplicaActor(None)}

    def _launch(self, replicas, *, serves_folder: bool) -> dict[int, ReplicaActor]:
        self.num_launches += 1
        if self.num_launches < self.works_at:
            raise RuntimeError(f"no memory at start {self.num_launches}")
        return {replica: ReplicaActor(None) for replica in replicas}

    def _end(self, actors, seconds: float = 0.0) -> None:
        """There is no Ray."""


def test_a_start_that_fails_is_tried_again_and_told() -> None:
    actors = Unstartable(works_at=3)
    actors.replace(1)
    assert actors.rejoin(2, 30.0) and actors.members == [0, 1]
    told = actors.take_start_problems()
    assert [text.partition(";")[0] for text in told] == [f"replica 1 did not start, attempt {n} of 3" for n in (1, 2)]
    assert told[0].endswith("it is tried again: no memory at start 1") and actors.take_start_problems() == []


def test_a_replica_that_never_starts_is_given_up() -> None:
    actors = Unstartable(works_at=99)
    actors.replace(1)
    with pytest.raises(TooFewReplicasError, match="1 of 2 replicas run, 2 are needed; replica 1: no memory at start 3"):
        actors.rejoin(2, 30.0)
    assert actors.num_launches == 3 and "the run goes on without it" in actors.take_start_problems()[-1]
    assert actors.rejoin(1, 0.0) and actors.members == [0]


def publish_to_nobody(path: str) -> tuple[str, str, list[str]]:
    """A session whose replicas are all gone after its first step: what it raises, its last checkpoint, the lines of its log."""
    from bridge.replicas.pool import ReplicaPool
    from megasync import weights
    from megasync.files import METRICS_FILE
    from megasync.rank_zero import TooFewReplicasError
    from megasync.session import Session

    config = load_config(path)
    session = Session(config, None)
    try:
        pool = session.weights.pool = ReplicaPool(weights.replica_config(config), 1)
        session.weights.publisher = weights.build_publisher(session.weights.sync_exporter, pool, config)
        next(iter(session.steps()))
        try:
            session.publish(version=1, trained={"reward/mean": 0.5})
        except TooFewReplicasError as error:
            lines = (config.run.folder / METRICS_FILE).read_text().splitlines()
            return str(error), str(session.last_checkpoint), lines
        return "", "", []
    finally:
        session.close()


def test_without_replicas_a_run_writes_what_it_has_and_stops(tmp_path: Path) -> None:
    path = write_config(tmp_path, engine={"wrap": "ddp"}, rollout={"restart_timeout_seconds": 0.1}, checkpoint={"every_steps": 0})
    ((problem, checkpoint, lines),) = run_ranks(1, "tests.test_faults:publish_to_nobody", {"path": str(path)}, alone=True)
    assert problem.startswith("0 of 1 replicas run, 1 are needed") and Path(checkpoint).name == "step_00000001"
    saved = load_progress(Path(checkpoint))
    assert saved is not None and saved.num_trained == 8
    assert [json.loads(line)["reward/mean"] for line in lines] == [0.5]


# A rank that is stopped.


def stop_rank_one() -> None:
    """Rank 1 stops in the midst of a step; rank 0 waits for it in a collective."""
    from engine import parallel
    from engine.config import ParallelConfig
    from megasync.heartbeat import Heartbeat
    from megasync.rank_zero import on_rank_zero

    rank = parallel.initialize(ParallelConfig(), seed=0).rank
    heartbeat = Heartbeat(rank, 2, limit_seconds=3.0)
    heartbeat.phase = "train, step 3" if rank else "rollout, step 3"
    heartbeat.start()
    on_rank_zero(lambda: None)
    time.sleep(1.5)  # until each has been seen
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait()


def test_a_stopped_rank_is_named_and_ends_all() -> None:
    said = r"rank 1 \(train, step 3\): no sign of life for 3 s .* seen from rank 0 \(rollout, step 3\); the run ends"
    with pytest.raises(AssertionError, match=f"failed:[\\s\\S]*{said}"):
        run_ranks(2, "tests.test_faults:stop_rank_one", {}, alone=True)


def test_whoever_has_come_to_its_end_watches_the_others_until_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("127.0.0.1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    first, second = (Heartbeat(rank, 2, limit_seconds=300.0) for rank in range(2))
    first.start()
    second.start()
    leaving = threading.Thread(target=first.leave)
    leaving.start()
    leaving.join(0.5)
    assert leaving.is_alive()
    second.leave()
    leaving.join(60.0)
    assert not leaving.is_alive()


# The table itself.


def test_a_replica_that_is_stopped_in_a_pause_costs_no_prompt(tmp_path: Path) -> None:
    """One case, with one rank; the table is for `python -m megasync.bench faults`."""
    overrides = [f"run.dir={tmp_path}", "run.steps=4", "rollout.answer_timeout_seconds=10", "sync.timeout_seconds=60"]
    overrides += ["bench_faults.limit_seconds=600", "rollout.start_timeout_seconds=600"]  # on a busy machine
    config = prepare(load_config(CONFIG, overrides, BenchRoot))
    config = config.model_copy(update={"bench_faults": config.bench_faults.model_copy(update={"num_ranks": 1})})
    (case,) = [case for case in all_cases(1, 4, 2, 0) if case.name == "replica-pausing-core-SIGSTOP"]
    seen, verdict = run_one(case, config, None)
    assert (seen.exit_codes, seen.left, verdict.problems) == ([0], [], [])
    assert verdict.num_starts[0] == 1 and verdict.other_gap > judge.MOST_GAP
