"""Faults: the cases, what is found wrong, and runs of them.

All runs of the table take an hour on two cores; MEGASYNC_FAULTS chooses cases by names or parts of names:

    python -m pytest tests/runs/test_faults.py
    MEGASYNC_FAULTS=all python -m pytest tests/runs/test_faults.py -k survives -s
    MEGASYNC_FAULTS=pausing,rank0 python -m pytest tests/runs/test_faults.py -k survives -s
"""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path

import pytest

from bridge.config import ReplicaConfig
from bridge.replicas.actors import ReplicaActors, TooFewReplicasError
from bridge.replicas.launched import ReplicaActor, no_answer
from megasync.config.load import load_config
from megasync.rollouts.progress import load_progress
from tests.faults import judge
from tests.faults.cases import NUM_FAILURES, OF_EPISODES, PHASES, SIGNALS, UNDISTURBED, Case
from tests.faults.cases import all_cases, chosen_cases, episode_cases
from tests.faults.episodes import DEEDS
from tests.faults.run import prepare, prepare_episodes, problems, run_one
from tests.faults.watch import Watched
from tests.support.ranks import run_ranks
from tests.runs.train_cases import write_config

pytestmark = [pytest.mark.long, pytest.mark.vllm_on_cpu]

TABLE = all_cases(num_points=20, num_steps=24, num_ranks=2, seed=0)
EPISODES = episode_cases(num_steps=12, num_ranks=2, seed=0)
NAMES = [name for name in os.environ.get("MEGASYNC_FAULTS", "").split(",") if name]
OF_EPISODE_RUNS = [name for name in NAMES if name == "all" or name.startswith("episode")]
CHOSEN = [name for name in NAMES if not name.startswith("episode")]
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
        "replica-pausing-core-SIGSTOP", "rank0-00-SIGKILL"
    ]  # fmt: skip
    with pytest.raises(ValueError, match="pausng is no case"):
        chosen_cases(cases, ["pausng"])
    assert chosen_cases(cases, ["all"]) == cases
    assert Case.from_json(cases[-1].to_json()) == cases[-1]


def test_the_table_of_episodes_has_tools_turns_and_ranks() -> None:
    assert len({case.name for case in EPISODES}) == len(EPISODES) == 1 + len(NUM_FAILURES) + 4 + 2
    assert {case.episode for case in EPISODES} == {"", *NUM_FAILURES} and NUM_FAILURES.keys() == DEEDS.keys()
    assert {(case.part, case.signal) for case in EPISODES if case.kind == "replica"} == set(product(("core", "actor"), SIGNALS))


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


def test_given_tokens_are_not_scored_and_failures_that_nobody_ordered_are_found() -> None:
    sample = {"prompt": [1], "tokens": [5, 6, 7], "log_probs": [-1.0, 0.0, -1.0], "versions": [0, 0, 0]}
    sample["sampled"] = [True, False, True]
    branch = {"step": 0, "ordinal": 0, "prompt": [1, 2], "samples": [sample]}
    assert judge.largest_gap([branch], lambda version, text: [-1.0] * (len(text) - 1)) == (0.0, 0.0)
    metrics = [{"episode/failures": 1.0}, {"episode/failures": 0.0}]
    assert judge.find_wrong_failures(metrics, Case("a", "none", episode="hangs")) == []
    assert judge.find_wrong_failures(metrics, Case("a", "none")) == ["1 episodes failed, 0 were to"]


def test_a_token_of_other_weights_and_a_restart_of_a_healthy_replica_are_found() -> None:
    own, other = judge.largest_gap(WHOLE, lambda version, text: [-1.0 - version] * (len(text) - 1))
    assert (own, other) == (1.0, 0.0)
    starts = [{"replica": replica} for replica in (0, 1, 0, 1)]
    case = Case("a", "replica", number=1)
    assert judge.count_starts(starts, case, EXPECTED)[1] == ["replica 0, which was not signalled, was started 2 times"]
    assert judge.count_starts(starts, Case("b", "rank"), EXPECTED) == ({0: 2, 1: 2}, [])


def test_messages_name_who_is_waited_for() -> None:
    assert no_answer([1], "pause", 6.0) == "replica 1 gave no answer for 6 s to pause"
    assert no_answer([0, 2], "commit of version 3", 0.5) == "replicas 0, 2 gave no answer for 0.5 s to commit of version 3"


# Replicas that do not come back.


class Unstartable(ReplicaActors):
    """Of which no start works before the one of that number."""

    def __init__(self, works_at: int) -> None:
        super().__init__(ReplicaConfig("nowhere"), 2)
        self.works_at, self.num_launches = works_at, 0
        self._take_as_members({0: ReplicaActor(None), 1: ReplicaActor(None)})

    def _begin_launch(self, replicas, *, serves_folder: bool) -> dict[int, ReplicaActor]:
        self.num_launches += 1
        if self.num_launches < self.works_at:
            raise RuntimeError(f"no memory at start {self.num_launches}")
        return {replica: ReplicaActor(None) for replica in replicas}

    def _finish_launch(self, actors) -> None:
        """At once."""

    def _end(self, actors, seconds: float = 0.0) -> None:
        """There is no Ray."""


def test_a_start_that_fails_is_tried_again_and_reported() -> None:
    actors = Unstartable(works_at=3)
    actors.replace(1)
    assert actors.rejoin(2, 30.0) and actors.members == [0, 1]
    reported = actors.drain_notes()
    assert [text.partition(";")[0] for text in reported] == [f"replica 1 did not start, attempt {n} of 3" for n in (1, 2)]
    assert reported[0].endswith("it is tried again: no memory at start 1") and actors.drain_notes() == []


def test_a_replica_that_never_starts_is_given_up() -> None:
    actors = Unstartable(works_at=99)
    actors.replace(1)
    with pytest.raises(TooFewReplicasError, match="1 of 2 replicas run, 2 are needed; replica 1: no memory at start 3"):
        actors.rejoin(2, 30.0)
    assert actors.num_launches == 3 and "the run goes on without it" in actors.drain_notes()[-1]
    assert actors.rejoin(1, 0.0) and actors.members == [0]


def publish_to_nobody(path: str) -> tuple[str, str, list[str]]:
    """A session whose replicas are all gone after its first step: what it raises, its last checkpoint, the lines of its log."""
    from bridge.replicas.pool import ReplicaPool
    from megasync.config.files import METRICS_FILE
    from megasync.data.load import load_data
    from megasync.run.heartbeat import Heartbeat
    from megasync.run.replica_start import ReplicaStart, replica_config
    from megasync.run.rollout_session import RolloutSession
    from megasync.run.session import ExitCallbacks

    class NoReplicas(ReplicaStart):
        def finish(self) -> ReplicaPool:
            return ReplicaPool(replica_config(self.config), 1)

    config = load_config(path)
    with ExitCallbacks() as ends:
        session = RolloutSession(config, load_data(config), NoReplicas(config), Heartbeat(0, 1, 300.0), ends)
        next(iter(session.steps()))
        try:
            session.publish(version=1, trained={"reward/mean": 0.5})
        except TooFewReplicasError as error:
            lines = (config.run.folder / METRICS_FILE).read_text().splitlines()
            return str(error), str(session.checkpoints.last), lines
        return "", "", []


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_without_replicas_a_run_writes_what_it_has_and_stops(placement: str, tmp_path: Path) -> None:
    rollout = {"restart_timeout_seconds": 0.1, "placement": placement}
    sections = {"model": {"dtype": "bfloat16"}, "engine": {"wrap": "ddp"}, "checkpoint": {"every_steps": 0}}
    path = write_config(tmp_path, rollout=rollout, **sections)
    ((problem, checkpoint, lines),) = run_ranks(1, "tests.runs.test_faults:publish_to_nobody", {"path": str(path)}, alone=True)
    assert problem.startswith("0 of 1 replicas run, 1 are needed") and Path(checkpoint).name == "step_00000001"
    saved = load_progress(Path(checkpoint))
    assert saved is not None and saved.num_trained == 0
    assert [json.loads(line)["reward/mean"] for line in lines] == [0.5]


# Runs.


def test_a_replica_that_is_stopped_in_a_pause_costs_no_prompt(tmp_path: Path) -> None:
    """One case, with one rank, and limits for a busy machine."""
    overrides = [
        "run.steps=4",
        "rollout.answer_timeout_seconds=10",
        "sync.timeout_seconds=60",
        "rollout.start_timeout_seconds=600",
    ]
    (case,) = chosen_cases(TABLE, ["replica-pausing-core-SIGSTOP"])
    seen, verdict = run_one(case, prepare(tmp_path, overrides), tmp_path, None, num_ranks=1, limit_seconds=600.0)
    assert problems(case, seen, verdict) == []
    assert verdict.num_starts[0] == 1 and verdict.other_gap > judge.MAX_GAP


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    folder = tmp_path_factory.mktemp("undisturbed")
    case = TABLE[0]
    assert case.name == UNDISTURBED
    seen, verdict = run_one(case, prepare(folder), folder, None)
    assert problems(case, seen, verdict) == []
    return seen


@pytest.mark.parametrize("case", chosen_cases(TABLE[1:], CHOSEN), ids=lambda case: case.name)
def test_a_run_survives(case: Case, undisturbed: Watched, tmp_path: Path) -> None:
    seen, verdict = run_one(case, prepare(tmp_path), tmp_path, undisturbed)
    lost = seen.seconds - undisturbed.seconds
    print(f"{case.name}: exit codes {seen.exit_codes}, {lost:.0f} s lost, largest gap {verdict.gap:.1e}")
    assert problems(case, seen, verdict) == []


@pytest.fixture(scope="module")
def undisturbed_episodes(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    folder = tmp_path_factory.mktemp("undisturbed_episodes")
    assert EPISODES[0].name == OF_EPISODES
    seen, verdict = run_one(EPISODES[0], prepare_episodes(folder), folder, None, limit_seconds=600.0)
    assert problems(EPISODES[0], seen, verdict) == []
    return seen


@pytest.mark.parametrize("case", chosen_cases(EPISODES[1:], OF_EPISODE_RUNS), ids=lambda case: case.name)
def test_a_run_of_episodes_survives(case: Case, undisturbed_episodes: Watched, tmp_path: Path) -> None:
    seen, verdict = run_one(case, prepare_episodes(tmp_path), tmp_path, undisturbed_episodes, limit_seconds=600.0)
    lost = seen.seconds - undisturbed_episodes.seconds
    print(f"{case.name}: exit codes {seen.exit_codes}, {lost:.0f} s lost, largest gap {verdict.gap:.1e}")
    assert problems(case, seen, verdict) == []
