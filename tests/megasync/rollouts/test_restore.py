"""What a resumed run makes of the groups of its checkpoint where data, reward or limits are others than they were."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.generation import Completion, GenerationRequest
from megasync.config.schema import RolloutConfig
from megasync.data.data import Example, PromptOrder
from megasync.episodes.record import Asked, EnvironmentAnswer, recorded
from megasync.episodes.segments import Branch, Turn
from megasync.episodes.task import EpisodeResult, Task
from megasync.rollouts.group import Group, StreamSettings
from megasync.rollouts.restore import Restored, order_notes, restore_groups
from megasync.rollouts.progress import FILE, OF_EPISODES, Progress, SavedGroup, SavedSample, load_progress, save_progress
from megasync.rollouts.requests import request_digest, reward_digest
from megasync.rollouts.attempt import STATE, first_attempt, unfinished
from megasync.rewards.pool import RewardPool

STEP = 5
REQUEST = GenerationRequest((1, 2, 3), num_samples=2, max_new_tokens=8, seed=4)


def sample(index: int, version: int) -> SavedSample:
    ids, log_probs, versions = np.zeros(3, np.int32), np.zeros(3, np.float32), np.full(3, version, np.int32)
    return SavedSample(index, Completion(ids, log_probs, versions, "stop"), 1.0)


def saved(*versions: int) -> Progress:
    """Groups of two samples whose tokens are of these versions; their digests are their ordinals."""
    groups = [SavedGroup(key, (sample(0, version), sample(1, version)), key, key) for key, version in enumerate(versions)]
    return Progress(40, len(versions), None, tuple(groups))


def restored(
    progress: Progress, staleness: int, batch_size: int, digests: Callable[[int], tuple[int, int]] | None = None
) -> Restored:
    settings = StreamSettings(staleness, batch_size, 20, None, 1.0, 1.0)
    return restore_groups(progress, STEP, settings, lambda key: Group(key, REQUEST, *(digests(key) if digests else (key, key))))


def keys(found: Restored) -> list[int]:
    return [group.key for group in found.groups]


def test_under_the_same_config_all_go_on_and_nothing_is_said() -> None:
    found = restored(saved(4, 4, 5, 5), 1, 2)
    assert (keys(found), found.again, found.notes) == ([0, 1, 2, 3], [], [])
    assert all(group.is_done for group in found.groups)


def test_changed_requests_start_again_and_changed_rewards_are_scored_again() -> None:
    found = restored(saved(4, 4, 5, 5), 1, 2, lambda key: (key + (key == 1), key + (key >= 2)))
    assert (keys(found), found.again) == ([0, 2, 3], [1])
    assert [group.rewards for group in found.groups] == [[1.0, 1.0], [None, None], [None, None]]
    expected = (
        "of 4 prompts that had begun and were not trained 1 start again, since their prompt, sampling parameters "
        "or episode have changed; "
        "2 are scored again, since their answer or rollout.reward has changed"
    )
    assert found.notes == [expected]


@pytest.mark.parametrize(
    ("versions", "staleness", "batch_size", "kept"),
    [
        ([4, 4, 5, 5], 1, 1, [0, 2]),  # with smaller batches no step has room for the others
        ([3, 4, 5, 5], 1, 2, [1, 2, 3]),  # with less staleness the first is too old
        ([3, 4, 5, 5], 0, 1, [2]),
        ([4, 4, 4, 5], 1, 2, [0, 1, 3]),
        ([4, 4, 5, 5], 8, 8, [0, 1, 2, 3]),
    ],
)
def test_groups_that_no_step_could_train_in_time_start_again(
    versions: list[int], staleness: int, batch_size: int, kept: list[int]
) -> None:
    found = restored(saved(*versions), staleness, batch_size)
    assert keys(found) == kept and sorted([*kept, *found.again]) == list(range(4))
    late = len(found.again)
    limits = f"rollout.max_staleness={staleness}, data.batch_size={batch_size} and run.steps=20"
    expected = f"of 4 prompts that had begun and were not trained {late} start again, since with {limits} no step"
    expected += " could train them in time"
    assert found.notes == ([expected] if late else [])


def test_a_group_without_samples_starts_again_without_a_note() -> None:
    found = restored(Progress(0, 1, None, (SavedGroup(0),)), 1, 1, lambda key: (7, 7))
    assert (found.groups, found.again, found.notes) == ([], [0], [])


def test_a_sample_without_a_reward_has_none_afterwards() -> None:
    group = SavedGroup(0, (replace(sample(0, 5), reward=math.nan),))
    (found,) = restored(Progress(0, 1, None, (group,)), 1, 1).groups
    assert found.rewards == [None, None] and found.missing == (1,)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_ids": (1, 2, 4)}, {"max_new_tokens": 9}, {"temperature": 0.5}, {"top_p": 0.5}, {"top_k": 1}, {"min_p": 0.1},
        {"stop": ("x",)}, {"stop_token_ids": (2,)},
    ],
)  # fmt: skip
def test_a_response_depends_on_its_prompt_and_on_how_it_is_sampled(change: dict[str, Any]) -> None:
    own = request_digest(REQUEST, returns_experts=False)
    assert request_digest(replace(REQUEST, **change), returns_experts=False) != own
    assert request_digest(REQUEST, returns_experts=True) != own
    assert request_digest(replace(REQUEST, seed=5, num_samples=3), returns_experts=False) == own, "other samples of the same"


@pytest.mark.parametrize(
    "change",
    [{"answer": "3"}, {"extra": {}}, {"seed": 5}, {"line": 2}, {"turns": (("user", "1 + 1?"),)}, {"prompt": "1+1"}],
)
def test_an_episode_depends_on_its_task(change: dict[str, Any]) -> None:
    """Its own code may score by the answer, or draw a game from the seed: neither goes with another one's."""
    task = Task("1+1=", (1, 2, 3), "2", {"kind": "sum"}, 4, turns=(("user", "1+1="),), line=1)

    def digest(of: Task | None, played_by: object = "game 2") -> int:
        return request_digest(REQUEST, returns_experts=False, task=of, played_by=played_by)

    own = digest(task)
    assert digest(replace(task)) == own and digest(replace(task, **change)) != own
    assert digest(task, "game 3") != own and digest(None) == request_digest(REQUEST, returns_experts=False) != own


def test_a_reward_depends_on_names_weights_source_and_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "reward_of_a_test.py"
    source.write_text("def one(sample):\n    return 1.0\n\n\ndef together(samples: list):\n    return [1.0] * len(samples)\n")
    example = Example("1+1=", "2", 1, extra={"kind": "sum"})

    def digest(reward: str | dict[str, float], of: Example = example, num_samples: int = 2) -> int:
        with RewardPool(RolloutConfig(reward=reward)) as pool:
            return reward_digest(of, pool, num_samples)

    one, together = "reward_of_a_test:one", "reward_of_a_test:together"
    others = [replace(example, answer="3"), replace(example, extra={}), replace(example, line=2), replace(example, prompt="x")]
    found = [digest(one), digest(together), digest("exact_match"), digest({one: 2.0}), *(digest(one, other) for other in others)]
    assert digest(one) == found[0] and digest(one, num_samples=3) == found[0]
    assert digest(together, num_samples=3) != found[1]
    source.write_text(source.read_text().replace("1.0", "2.0"))
    assert len({*found, digest(one)}) == len(found) + 1


def test_an_episode_is_kept_with_its_branches(tmp_path: Path) -> None:
    """Beside others: one of two branches with experts, one that failed before it had tokens."""

    def branch(length: int, prompt: int) -> Branch:
        ids, mask = np.arange(length), np.arange(length) % 3 != 1
        mask[:prompt] = False
        experts = np.arange((length - 1) * 6).reshape(length - 1, 3, 2).astype(np.uint8)
        support = np.concatenate([mask * 2, np.arange(2 * mask.sum())])
        return Branch(ids, prompt, mask, -ids / 7, ids + 2, "length", experts, support)

    branches, returned = (branch(7, 2), branch(5, 1)), {"metrics": {"calls": 2.0}, "info": {"text": "ä"}}
    whole = EpisodeResult(branches, 0.5, "length", 3, 2.5, 1.25, 1, turn_rewards=(0.1, 0.4, 0.0), **returned)  # type: ignore[arg-type]
    nothing = EpisodeResult(reward=0.0, finish_reason="length", is_dropped=True, num_failures=3)
    groups = (SavedGroup(3, (SavedSample(0, whole, 0.5), SavedSample(2, nothing, 0.0)), 5, 6), SavedGroup(4))
    save_progress(tmp_path, Progress(7, 9, 2.0, groups))
    back = load_progress(tmp_path)
    assert back is not None and [(one.key, len(one.samples), one.request_digest) for one in back.groups] == [(3, 2, 5), (4, 0, 0)]
    first, second = back.groups[0].samples
    assert (first.index, first.reward, second.index, second.reward) == (0, 0.5, 2, 0.0)
    for kept, saved_one in ((first.completion, whole), (second.completion, nothing)):
        assert isinstance(kept, EpisodeResult)
        for name in (*OF_EPISODES, "turn_rewards", "num_sampled", "num_given", "oldest", "final_ids"):
            assert getattr(kept, name) == getattr(saved_one, name), name
        for mine, theirs in zip(kept.branches, saved_one.branches, strict=True):
            assert (mine.prompt_length, mine.finish_reason) == (theirs.prompt_length, theirs.finish_reason)
            for name in ("token_ids", "is_sampled", "log_probs", "weight_versions", "routed_experts", "support"):
                assert np.array_equal(getattr(mine, name), getattr(theirs, name)), name
                assert getattr(mine, name).dtype == getattr(theirs, name).dtype, name


def test_an_order_that_has_changed_is_reported(tmp_path: Path) -> None:
    """Where other examples fit, or are shuffled differently: the trained places are of the former order."""
    then = PromptOrder(10, seed=3)
    save_progress(tmp_path, Progress(12, 14, order=then))
    progress = load_progress(tmp_path)
    assert progress is not None and progress.order == then
    assert order_notes(progress, then, "") == order_notes(replace(progress, order=None), PromptOrder(8), "") == []
    (note,) = order_notes(progress, PromptOrder(8, seed=3, shuffle=False), "")
    assert "data.train has 8 examples that fit, then 10; data.shuffle is false, then true" in note and "run.seed" not in note
    assert order_notes(Progress(0, order=then), PromptOrder(8), "") == [], "nothing was trained"
    sampled = replace(progress, sampler='{"name": "difficulty"}')
    assert order_notes(sampled, then, "difficulty") == [] and len(order_notes(sampled, then, "")) == 1


@pytest.mark.parametrize("what", ["a field of episodes", "a reason to end", "an array less"])
def test_a_file_of_another_version_is_refused_by_its_name(what: str, tmp_path: Path) -> None:
    played = EpisodeResult((Branch(np.arange(4), 2, np.arange(4) > 1, np.zeros(4), np.zeros(4)),), 0.5)
    save_progress(tmp_path, Progress(7, 9, None, (SavedGroup(3, (SavedSample(0, played, 0.5),)),)))
    with np.load(tmp_path / FILE) as file:
        fields = dict(file)
    if what == "a field of episodes":
        text = fields["texts"].tobytes().replace(b"{", b'{"num_windows": 3, ', 1)
        fields |= {"texts": np.frombuffer(text, np.uint8), "text_bytes": np.array([len(text)])}
    elif what == "a reason to end":
        fields["finish_reasons"] += 7
    else:
        del fields["lengths"]
    np.savez(tmp_path / FILE, **fields)
    with pytest.raises(ValueError, match=r"rollouts\.npz: cannot be read: .* another version wrote it"):
        load_progress(tmp_path)


def test_a_file_of_before_turns_had_rewards_is_read(tmp_path: Path) -> None:
    """The last turn has the reward."""
    branch = Branch(np.arange(4), 2, np.arange(4) > 1, np.zeros(4), np.zeros(4))
    played = EpisodeResult((branch,), 0.5, num_turns=2)
    save_progress(tmp_path, Progress(7, 9, None, (SavedGroup(3, (SavedSample(0, played, 0.5),)),)))
    with np.load(tmp_path / FILE) as file:
        fields = dict(file)
    text = json.loads(fields["texts"].tobytes())
    del text["turn_rewards"]
    data = json.dumps(text).encode()
    np.savez(tmp_path / FILE, **{**fields, "texts": np.frombuffer(data, np.uint8), "text_bytes": np.array([len(data)])})
    back = load_progress(tmp_path)
    assert back is not None
    (sample,) = back.groups[0].samples
    assert isinstance(sample.completion, EpisodeResult) and sample.completion.turn_returns(0.5) == (0.5, 0.5)


@pytest.mark.parametrize("is_restart", [False, True])
def test_a_restart_has_the_name_of_former_files(is_restart: bool, tmp_path: Path) -> None:
    branch = Branch(np.arange(4), 2, np.arange(4) > 1, np.zeros(4), np.zeros(4))
    played = EpisodeResult((branch,), 0.5, is_restart=is_restart)
    save_progress(tmp_path, Progress(7, 9, None, (SavedGroup(3, (SavedSample(0, played, 0.5),)),)))
    with np.load(tmp_path / FILE) as file:
        assert json.loads(file["texts"].tobytes())["is_anew"] is is_restart
    back = load_progress(tmp_path)
    assert back is not None and [sample.completion.is_restart for sample in back.groups[0].samples] == [is_restart]


def test_an_episode_that_goes_on_is_kept_with_its_turns(tmp_path: Path) -> None:
    """Beside a member that has ended and one that has not begun."""
    request = replace(REQUEST, num_samples=3)
    turn = Turn([7, 8], [-0.5, -0.25], [3, 4])
    branches, turns = recorded([(Asked(0, 11, 8, ("x",)), (1, 2, 3), turn), (Asked(2, 13, 4, ()), (1, 2), turn)])
    answers = (EnvironmentAnswer(0, "reset", 4, "ä"), EnvironmentAnswer(1, "step", "78", ["no", 0.5, False, {}]))
    midst = EpisodeResult(branches, turns=turns, answers=answers, num_failures=1, info={STATE: {"left": 2}})
    over = EpisodeResult((), 0.0, is_dropped=True, num_failures=1)
    saved_group = SavedGroup(3, (SavedSample(0, over, 0.0), SavedSample(2, midst, math.nan, is_over=False)), 5, 6)
    save_progress(tmp_path, Progress(7, 9, None, (saved_group,)))
    progress = load_progress(tmp_path)
    assert progress is not None
    own = StreamSettings(2, 1, 20, None, 1.0, 1.0)
    (group,) = restore_groups(progress, STEP, own, lambda key: Group(key, request, 5, 6)).groups
    assert (group.oldest, group.missing, group.rewards) == (3, (1, 2), [0.0, None, None])
    attempt = first_attempt(group, 2)
    assert (attempt.number, attempt.history.state, attempt.asked[2]) == (1, {"left": 2}, Asked(2, 13, 4, ()))
    assert attempt.history.answers == dict(enumerate(answers)) and list(attempt.history.turns) == [0, 2]
    prompt, back = attempt.history.turns[2]
    assert (prompt.tolist(), back.token_ids.tolist(), back.weight_versions.tolist()) == ([1, 2], [7, 8], [3, 4])
    assert not first_attempt(group, 1).history.turns
    again = group.saved({2: unfinished(attempt)}).samples[1]
    assert isinstance(again.completion, EpisodeResult) and (again.is_over, again.index) == (False, 2)
    for name in ("turns", "answers", "num_failures", "info"):
        assert getattr(again.completion, name) == getattr(midst, name), name
    late = restore_groups(progress, STEP + 1, own, lambda key: Group(key, request, 5, 6))
    assert (late.groups, late.again) == ([], [3]), "no step can train it in time"
    other = restore_groups(progress, STEP, own, lambda key: Group(key, request, 4, 6))
    assert (other.groups, other.again) == ([], [3]), "its request has changed"
