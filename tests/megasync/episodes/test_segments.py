"""Turns become branches: exact tokens, each sampled one trained once, whatever tree of requests an episode makes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.episodes import record
from megasync.episodes.record import Asked, turns_of
from megasync.episodes.segments import Branch, Recorder, Turn

TOKENS = st.lists(st.integers(0, 3), max_size=4)  # few token ids, so that prefixes meet by chance


def turn_of(tokens: list[int], first: int, version: int, reason: str = "stop") -> Turn:
    """Log-probs that number the sampled tokens of the episode, so that each is known again."""
    return Turn(tokens, -np.arange(first, first + len(tokens)), [version] * len(tokens), reason)


def prefix(ids: list[int], of: list[int]) -> bool:
    return of[: len(ids)] == ids


@st.composite
def episodes(draw: st.DrawFn) -> list[tuple[list[int], Turn]]:
    """Requests: some continue an earlier one, some fork from it, some change its past, some start from nothing."""
    requests: list[tuple[list[int], Turn]] = []
    num_sampled = 0
    for number in range(draw(st.integers(1, 12))):
        past: list[int] = []
        if requests:
            prompt, turn = draw(st.sampled_from(requests))
            past = draw(st.sampled_from([[], prompt, [*prompt, *turn.token_ids.tolist()], prompt[:-1]]))
        prompt = past + draw(TOKENS) or [0]
        sampled = draw(TOKENS)
        requests.append((prompt, turn_of(sampled, num_sampled + 1, number, draw(st.sampled_from(["stop", "length"])))))
        num_sampled += len(sampled)
    return requests


def recorded(requests: list[tuple[list[int], Turn]]) -> list[Branch]:
    recorder = Recorder()
    for prompt, turn in requests:
        recorder.add(prompt, turn)
    return recorder.branches()


@settings(max_examples=100, deadline=None)
@given(episodes())
def test_each_sampled_token_is_trained_once_with_what_belongs_to_it(requests: list[tuple[list[int], Turn]]) -> None:
    wanted = sorted(
        (log_prob, token, version)
        for _, turn in requests
        for log_prob, token, version in zip(
            turn.log_probs.tolist(), turn.token_ids.tolist(), turn.weight_versions.tolist(), strict=True
        )
    )
    trained = []
    for branch in recorded(requests):
        mask = branch.is_sampled
        arrays = branch.log_probs[mask].tolist(), branch.token_ids[mask].tolist(), branch.weight_versions[mask].tolist()
        trained += list(zip(*arrays, strict=True))
        assert not branch.log_probs[~mask].any()
    assert sorted(trained) == wanted


@settings(max_examples=100, deadline=None)
@given(episodes())
def test_what_comes_before_a_sampled_token_is_what_the_replica_had(requests: list[tuple[list[int], Turn]]) -> None:
    """The context of each sampled token in its branch is the request's prompt and the tokens sampled before it."""
    context = {}
    for prompt, turn in requests:
        for place, log_prob in enumerate(turn.log_probs.tolist()):
            context[log_prob] = [*prompt, *turn.token_ids.tolist()[:place]]
    for branch in recorded(requests):
        for place in np.flatnonzero(branch.is_sampled):
            assert branch.token_ids[:place].tolist() == context[branch.log_probs[place]]


@settings(max_examples=100, deadline=None)
@given(episodes())
def test_a_branch_is_continued_where_its_tokens_begin_the_prompt(requests: list[tuple[list[int], Turn]]) -> None:
    """By a plain search over lists: the longest of the branches so far is the one that grows."""
    plain: list[list[int]] = []
    for prompt, turn in requests:
        tokens = turn.token_ids.tolist()
        if not tokens:
            continue
        fitting = [branch for branch in plain if prefix(branch, prompt)]
        if fitting:
            longest = max(fitting, key=len)
            longest[:] = [*prompt, *tokens]
        else:
            plain.append([*prompt, *tokens])
    # which of two equal branches goes on is free
    assert sorted(branch.token_ids.tolist() for branch in recorded(requests)) == sorted(plain)


@settings(max_examples=100, deadline=None)
@given(episodes())
def test_shapes_and_versions_of_given_tokens(requests: list[tuple[list[int], Turn]]) -> None:
    for branch in recorded(requests):
        n = len(branch.token_ids)
        assert n == len(branch.is_sampled) == len(branch.log_probs) == len(branch.weight_versions)
        assert 1 <= branch.prompt_length == int(np.argmax(branch.is_sampled)) < n
        assert branch.is_sampled[-1]
        versions, last = branch.weight_versions.tolist(), branch.weight_versions[branch.prompt_length]
        for place in range(n):
            last = versions[place] if branch.is_sampled[place] else last
            assert versions[place] == last
        assert [array.dtype for array in (branch.token_ids, branch.is_sampled, branch.log_probs, branch.weight_versions)] == [
            *(np.int32, np.bool_, np.float32, np.int32)
        ]


def test_a_conversation_is_one_branch() -> None:
    recorder = Recorder()
    recorder.add([1, 2], turn_of([3, 4], 1, 7))
    recorder.add([1, 2, 3, 4, 5], turn_of([6], 3, 8, "length"))
    recorder.add([1, 2, 3, 4, 5, 6], turn_of([9], 4, 9))  # goes on with what was cut off: nothing given between
    (branch,) = recorder.branches()
    assert branch.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 9]
    assert branch.is_sampled.tolist() == [False, False, True, True, False, True, True]
    assert branch.log_probs.tolist() == [0, 0, -1, -2, 0, -3, -4]
    assert branch.weight_versions.tolist() == [7, 7, 7, 7, 7, 8, 9]
    assert (branch.prompt_length, branch.finish_reason) == (2, "stop")


def test_agents_that_start_from_one_turn_fork() -> None:
    recorder = Recorder()
    recorder.add([1], turn_of([2], 1, 0))
    recorder.add([1, 2, 3], turn_of([4], 2, 0))
    recorder.add([1, 2, 5], turn_of([6], 3, 0))
    recorder.add([1, 2, 5, 6, 7], turn_of([8], 4, 0))
    one, two = recorder.branches()
    assert (one.token_ids.tolist(), one.is_sampled.tolist()) == ([1, 2, 3, 4], [False, True, False, True])
    assert (two.token_ids.tolist(), two.is_sampled.tolist()) == ([1, 2, 5, 6, 7, 8], [False, False, False, True, False, True])


def test_equal_samples_of_one_prompt_are_two_branches_and_one_goes_on() -> None:
    recorder = Recorder()
    for number in (1, 2):
        recorder.add([1], turn_of([2], number, 0))
    recorder.add([1, 2, 3], turn_of([4], 3, 0))
    assert [branch.log_probs.tolist() for branch in recorder.branches()] == [[0, -1, 0, -3], [0, -2]]


def test_experts_are_those_of_the_turn_that_first_went_through_a_token() -> None:
    def experts(tokens: int, value: int) -> np.ndarray:
        return np.full((tokens - 1, 2, 3), value, np.uint8)

    recorder = Recorder()
    recorder.add([1, 2], Turn([3, 4], [0, 0], [0, 0], "stop", experts(4, 1)))
    recorder.add([1, 2, 3, 4, 5], Turn([6], [0], [0], "stop", experts(6, 2)))
    (branch,) = recorder.branches()
    assert branch.routed_experts[:, 0, 0].tolist() == [1, 1, 1, 2, 2]
    recorder.add([1, 2, 3, 4, 5, 6], turn_of([7], 1, 0))
    assert not recorder.branches()[0].routed_experts.size


def test_kept_tokens_are_found_again_in_their_branch_and_turn() -> None:
    first = Turn([3, 4], [0, 0], [0, 0], support=[2, 1, 30, 31, 40])
    second = Turn([6], [0], [0], support=[3, 60, 61, 62])
    branches, turns = record.recorded([(Asked(0, 0, 8, ()), [1, 2], first), (Asked(1, 0, 8, ()), [1, 2, 3, 4, 5], second)])
    (branch,) = branches
    assert branch.support.tolist() == [0, 0, 2, 1, 0, 3, 30, 31, 40, 60, 61, 62]
    assert [turn.support.tolist() for _, turn in turns_of(branches, turns)] == [[2, 1, 30, 31, 40], [3, 60, 61, 62]]


def test_a_turn_of_no_token_leaves_no_trace() -> None:
    recorder = Recorder()
    recorder.add([1], turn_of([], 1, 0))
    assert recorder.branches() == []
    recorder.add([1], turn_of([2], 1, 0))
    recorder.add([1, 2, 3], turn_of([], 1, 0))
    recorder.add([1, 2, 4], turn_of([5], 2, 0))
    (branch,) = recorder.branches()
    assert branch.token_ids.tolist() == [1, 2, 4, 5]


def test_a_long_episode_of_many_branches_is_matched_by_hash() -> None:
    recorder, histories = Recorder(), [[branch] * 4000 for branch in range(50)]
    for turn in range(4):
        for history in histories:
            recorder.add(history, turn_of([turn], 0, 0))
            history += [turn, 99]
    branches = recorder.branches()
    assert [branch.token_ids.tolist() for branch in branches] == [history[:-1] for history in histories]
    assert all(branch.is_sampled.sum() == 4 for branch in branches)
