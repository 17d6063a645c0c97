"""What teachers are asked for, and where their scores go: every branch, every source, and samples of a checkpoint once more."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.generation import Completion, GenerationRequest, TokenScores
from megasync.config.teacher_section import TeacherConfig
from megasync.episodes.segments import Branch
from megasync.episodes.task import EpisodeResult
from megasync.rewards.pool import Scored
from megasync.rollouts.group import Group
from megasync.rollouts.samples import samples_of
from megasync.rollouts.teachers import Teachers
from megasync.served.pool import chunks

PROMPT = (5, 6, 7)


class Half:
    """Every token has the log-prob -id / 2, and the tokens 0, 1, ... are the most likely."""

    def __init__(self) -> None:
        self.counts, self.asked = Counter[str](), list[list[int]]()

    async def prompt_log_probs(self, sequences: Sequence[Sequence[int]], top_k: int) -> list[TokenScores]:
        self.asked += [list(ids) for ids in sequences]
        tops = [np.tile(np.arange(top_k), (len(ids) - 1, 1)) for ids in sequences]
        return [TokenScores(-np.array(ids[1:]) / 2, top, -top / 8) for ids, top in zip(sequences, tops, strict=True)]


def response(ids: Sequence[int]) -> Completion:
    return Completion(ids, np.zeros(len(ids)), np.zeros(len(ids)))  # type: ignore[arg-type]


def branch(ids: Sequence[int], num_prompt: int) -> Branch:
    whole, zeros = np.array([*range(50, 50 + num_prompt), *ids], np.int32), np.zeros(num_prompt + len(ids), np.float32)
    mask = np.array([False] * num_prompt + [True] * len(ids))
    return Branch(whole, num_prompt, mask, zeros, zeros.astype(np.int32))


def scored(top_k: int, done: Sequence[Completion | EpisodeResult], source: str = "") -> list[tuple[TokenScores, ...]]:
    config = TeacherConfig(path="any", objective="top_k" if top_k else "sampled", top_k=top_k or 64)
    return asyncio.run(Teachers(config, {"": Half()}).score(source, PROMPT, done))  # type: ignore[dict-item]


@pytest.mark.parametrize("top_k", [0, 3])
def test_every_branch_has_its_scores(top_k: int) -> None:
    played = EpisodeResult((branch([8, 9], 2), branch([4], 5)))
    dropped, failed = EpisodeResult((branch([1], 1),), is_dropped=True), EpisodeResult(())
    done = [response([10, 11, 12]), played, dropped, failed]
    found = scored(top_k, done)
    group = Group(0, GenerationRequest(PROMPT, num_samples=len(done)))
    for place, (one, scores) in enumerate(zip(done, found, strict=True)):
        group.completions[place], group.scored[place] = one, Scored(1.0, {}, teacher=scores)
    samples = samples_of(group, 0)
    assert [sample.teacher_log_probs.tolist() for sample in samples] == [[-5.0, -5.5, -6.0], [-4.0, -4.5], [-2.0], []]
    for sample in samples[:-1]:
        assert sample.teacher_top_ids.shape == (len(sample.response_ids), top_k)
        assert sample.teacher_top_ids.tolist() == [list(range(top_k))] * len(sample.response_ids)


def test_each_source_has_its_teacher() -> None:
    models = {"maths": Half(), "code": Half()}
    teachers = Teachers(TeacherConfig(path={"maths": "a", "code": "b"}), models)  # type: ignore[arg-type]
    asyncio.run(teachers.score("code", PROMPT, [response([9])]))
    assert (models["maths"].asked, models["code"].asked) == ([], [[*PROMPT, 9]])


def test_samples_of_a_checkpoint_keep_their_reward_and_are_scored_again() -> None:
    first = Group(0, GenerationRequest(PROMPT, num_samples=2), has_teacher=True)
    first.complete(0, response([9]))
    first.scored[0] = Scored(0.25, {}, teacher=())
    again = Group(0, GenerationRequest(PROMPT, num_samples=2), has_teacher=True)
    again.restore(first.saved())
    assert again.unscored == [0] and again.rewarded[0].total == 0.25
    third = Group(0, GenerationRequest(PROMPT, num_samples=2), has_teacher=True)
    third.restore(again.saved())  # killed again before they were scored
    assert third.rewarded[0].total == 0.25


@given(st.lists(st.integers(0, 30)), st.integers(1, 40))
def test_chunks_hold_each_sequence_once(lengths: list[int], most: int) -> None:
    parts = chunks(lengths, most)
    assert [place for part in parts for place in part] == [place for place, length in enumerate(lengths) if length > 1]
    assert all(len(part) == 1 or sum(lengths[place] for place in part) <= most for part in parts)
