"""Records of steps: what was trained comes back as it was, once a step; what goes on from a checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.generation import Completion, GenerationRequest
from megasync.config.schema import Config
from megasync.config.errors import ConfigError
from megasync.episodes.record import Answers, Asked, EnvironmentAnswer, History, as_json, recorded, turns_of
from megasync.episodes.segments import Turn
from megasync.episodes.task import EpisodeResult
from megasync.rewards.pool import Scored
from megasync.rollouts.group import Group
from megasync.rollouts.records import Records, load_record, paths_of
from megasync.rollouts.samples import samples_of
from megasync.tools.replay.command import chosen_members
from megasync.tools.replay.sampled import Piece, first_difference, largest_gap, pieces_of, requests_of

PROMPT = (1, 2, 3)
REQUEST = GenerationRequest(PROMPT, num_samples=2, seed=7, max_new_tokens=9, stop=("z",), stop_token_ids=(0,))


def turn(*ids: int, versions: tuple[int, ...] = ()) -> Turn:
    return Turn(ids, -np.arange(len(ids)) / 7, versions or (4,) * len(ids), "length")


def group(key: int = 5) -> Group:
    """Of an episode of three turns in two branches, and one that was dropped."""
    made = Group(key, REQUEST)
    asked = [(Asked(number, 70 + number, 9 - number, ("z", "y")[: number + 1]), *pair) for number, pair in enumerate(TURNS)]
    branches, turns = recorded(asked)
    answers = (EnvironmentAnswer(1, "step", "x", ["no", 0.5, False, {"a": 1}]), EnvironmentAnswer(2, "step", "y", None, False))
    result = EpisodeResult(branches, 0.5, num_turns=3, turns=turns, answers=answers, metrics={"calls": 2.0}, info={"text": "ä"})
    made.complete(0, result)
    made.complete(1, EpisodeResult(reward=0.0, is_dropped=True, num_failures=1))
    made.scored = [Scored(0.5, {}), Scored(0.0, {})]
    return made


def single() -> Group:
    """Of samples of one turn."""
    made = Group(8, REQUEST)
    for member, ids in enumerate([(8, 9, 6), (8,)]):
        one = turn(*ids, versions=(4, 4, 5)[: len(ids)])
        made.complete(member, Completion(one.token_ids, one.log_probs, one.weight_versions, "stop"))
    made.scored = [Scored(1.0, {}), Scored(0.0, {})]
    return made


ARRAYS = ("token_ids", "log_probs", "weight_versions")
TURNS = [(PROMPT, turn(7, 8)), ((*PROMPT, 7, 8, 9), turn(5, versions=(4,))), ((*PROMPT, 7, 8, 6), turn(5, 5, versions=(4, 5)))]


def test_what_was_trained_comes_back(tmp_path: Path) -> None:
    records, made = Records(tmp_path, 0), group()
    records.write(1, [made, group(6)], {"episode": "a:b"})
    records.write(2, [group(7)], {"episode": "a:b"})
    records.close()
    assert list(paths_of(tmp_path)) == [1, 2] and len(list((tmp_path / "episodes").iterdir())) == 2
    record = load_record(paths_of(tmp_path)[1])
    assert (record.step, record.head) == (1, {"episode": "a:b"}) and [one.key for one in record.groups] == [5, 6]
    back = record.groups[0]
    assert back.request == made.request and back.rewards == {0: 0.5, 1: 0.0}
    again = Group(back.key, back.request)
    for member, done in back.members.items():
        again.complete(member, done)
    again.scored = made.scored
    for mine, theirs in zip(samples_of(again, 0), samples_of(made, 0), strict=True):
        for name in ("prompt_ids", "response_ids", "rollout_log_probs", "weight_versions", "is_sampled"):
            assert np.array_equal(getattr(mine, name), getattr(theirs, name)), name
    played, own = back.members[0], made.completions[0]
    assert isinstance(played, EpisodeResult) and isinstance(own, EpisodeResult)
    assert (played.turns, played.answers, played.info) == (own.turns, own.answers, own.info)
    for (prompt, one), (ids, sampled) in zip(turns_of(played.branches, played.turns), TURNS, strict=True):
        assert prompt.tolist() == list(ids) and one.token_ids.tolist() == sampled.token_ids.tolist()


def test_a_resumed_run_writes_what_it_trains_again(tmp_path: Path) -> None:
    for first_step, steps in ((0, (1, 2, 3)), (1, (2,))):
        records = Records(tmp_path, first_step)
        for step in steps:
            records.write(step, [group(10 * first_step + step)], {})
        records.close()
    assert {step: load_record(path).groups[0].key for step, path in paths_of(tmp_path).items()} == {1: 1, 2: 12}


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    records = Records(tmp_path, 0)
    records.write(1, [group()], {})
    records.close()
    path = paths_of(tmp_path)[1]
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ConfigError, match=r"step_00000001.npz: cannot be read as a record"):
        load_record(path)
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot be read as a record"):
        load_record(path)


def test_a_record_of_another_version_is_named(tmp_path: Path) -> None:
    """It asks for what this one does not know, or is something else."""
    records = Records(tmp_path, 0)
    records.write(1, [group()], {})
    records.close()
    path = paths_of(tmp_path)[1]
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    head = json.loads(arrays["head"].tobytes())
    newer = {**head, "requests": [{**request, "typical_p": 0.9} for request in head["requests"]]}
    for other in (newer, {**head, "requests": None}, [], {}):
        np.savez(path, **arrays | {"head": np.frombuffer(json.dumps(other).encode(), np.uint8)})
        with pytest.raises(ConfigError, match="cannot be read as a record"):
            load_record(path)


def test_an_error_of_the_disk_is_raised_by_the_next_call(tmp_path: Path) -> None:
    (tmp_path / "episodes").write_text("")
    records = Records(tmp_path, 0)
    records.write(1, [group()], {})
    with pytest.raises(OSError, match="episodes"):
        records.wait()
    records.close()


# ------------------------------------------------------------------------------------------------------- sampled again


def pieces(tmp_path: Path, of: Group | None = None) -> list[Piece]:
    records = Records(tmp_path, 0)
    records.write(1, [of or group()], {})
    records.close()
    return pieces_of(chosen_members(load_record(paths_of(tmp_path)[1]), []), Config())


def test_each_turn_is_asked_for_as_it_was(tmp_path: Path) -> None:
    found = pieces(tmp_path) + pieces(tmp_path, single())
    assert [(one.group, one.member, one.turn, one.version, one.num_later) for one in found] == [
        (5, 0, 1, 4, 0), (5, 0, 2, 4, 0), (5, 0, 3, 4, 1), (8, 0, 1, 4, 1), (8, 1, 1, 4, 0),
    ]  # fmt: skip
    requests = [one.request for one in found]
    assert [one.prompt_ids for one in requests] == [*(tuple(ids) for ids, _ in TURNS), PROMPT, PROMPT]
    assert [one.seed for one in requests] == [70, 71, 72, 7, 7] and [one.max_new_tokens for one in requests] == [9, 8, 7, 9, 9]
    assert [one.stop for one in requests] == [("z",), ("z", "y"), ("z", "y"), ("z",), ("z",)]
    assert [one.num_samples for one in requests] == [1, 1, 1, 2, 2] and [one.sample for one in found[3:]] == [0, 1]
    assert all(one.stop_token_ids == (0,) for one in requests) and len(requests_of(found)) == 4
    assert found[2].token_ids.tolist() == [5] and found[3].token_ids.tolist() == [8, 9], "up to the update"


def completion(*ids: int) -> Completion:
    return Completion(np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32), np.full(len(ids), -1, np.int32), "stop")


def test_what_differs_first_is_named(tmp_path: Path) -> None:
    first, _, third = pieces(tmp_path)
    assert first_difference(first, completion(7, 8)) is None and largest_gap(first, completion(7, 8)) == 0.5
    other = first_difference(first, completion(7, 9))
    assert other is not None and (other.group, other.member, other.turn, other.token) == (5, 0, 1, 2)
    assert (other.sampled, other.now, other.now_log_prob) == (8, 9, -0.5) and other.sampled_log_prob == pytest.approx(-1 / 7)
    for ids, token, sampled, now in (((7,), 2, 8, None), ((7, 8, 3), 3, None, 3), ((), 1, 7, None)):
        found = first_difference(first, completion(*ids))
        assert found is not None and (found.token, found.sampled, found.now) == (token, sampled, now)
    assert first_difference(third, completion(5, 1, 2)) is None, "what an update left is not compared"
    assert largest_gap(first, completion(9, 8)) == 0, "tokens before the first that differs"


def test_an_episode_that_is_not_there_is_named(tmp_path: Path) -> None:
    pieces(tmp_path)
    record = load_record(paths_of(tmp_path)[1])
    assert list(chosen_members(record, ["5/1"])) == [(5, 1)] and len(chosen_members(record, ["5"])) == 2
    with pytest.raises(ConfigError, match=r"--episode 5/3: step 1 has no such episode\n.*there: +5/0, 5/1"):
        chosen_members(record, ["5/3"])


# ---------------------------------------------------------------------------------------------------- what goes on


ids = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(ids, ids, st.booleans()), min_size=1, max_size=6))
def test_turns_come_back_from_branches(made: list[tuple[list[int], list[int], bool]]) -> None:
    """Whatever continues what: few different tokens, so that prompts are often alike."""
    asked, tokens = [], list[int]()
    for number, (given_ids, sampled, continues) in enumerate(made):
        prompt = [*tokens, *given_ids] if continues else given_ids
        asked.append((Asked(number, number, 4, ()), prompt, turn(*sampled)))
        tokens = [*prompt, *sampled]
    branches, records = recorded(asked)
    for (how, prompt, one), record, (ids_, back) in zip(asked, records, turns_of(branches, records), strict=True):
        assert Asked(*record[4:]) == how and ids_.tolist() == prompt
        assert all(np.array_equal(getattr(back, name), getattr(one, name)) for name in ARRAYS)
    assert sum(int(branch.is_sampled.sum()) for branch in branches) == sum(len(one.token_ids) for _, _, one in asked)


def test_former_answers_come_again_as_long_as_the_same_is_asked_for() -> None:
    kept = History()

    def play(former: History, asks: list[tuple[str, object]]) -> tuple[list[object], Answers]:
        def send(place: int, answer: EnvironmentAnswer, state: object, is_other: bool) -> None:
            kept.keep_answer(place, answer, state, is_other=is_other)

        answers = Answers(former.answers, former.state, send=send)
        known_values = []
        for what, asked in asks:
            place, known = answers.next(what, asked)
            known_values.append(known.value if known else None)
            if known is None:
                answers.keep(place, what, asked, [asked], {"place": place})
        return known_values, answers

    assert play(History(), [("reset", 1), ("step", "a"), ("step", "b")])[0] == [None] * 3
    assert kept.state == {"place": 2} and [one.value for one in kept.answers_in_order] == [[1], ["a"], ["b"]]
    known_values, answers = play(kept, [("reset", 1), ("step", "a"), ("step", "b"), ("step", "c")])
    assert known_values == [[1], ["a"], ["b"], None] and answers.state == {"place": 2} and len(kept.answers) == 4
    known_values, answers = play(kept, [("reset", 1), ("step", "z"), ("step", "b")])
    assert known_values == [[1], None, None] and answers.state is None, "what came after it is no answer to what is asked now"
    assert [one.asked for one in kept.answers_in_order] == [1, "z", "b"]
    kept.forget()
    assert kept.is_restart and not kept.answers and kept.state is None


def test_what_json_has_not_is_shown_and_does_not_come_again() -> None:
    assert as_json({"a": (1, 2)}) == ({"a": [1, 2]}, True) and as_json({1, 2}) == ("{1, 2}", False)
    assert as_json("x" * 2_000_000)[1] is False
    answers = Answers({0: EnvironmentAnswer(0, "call f", [[], {}], "{1, 2}", is_whole=False)})
    assert answers.next("call f", [[], {}]) == (0, None)
