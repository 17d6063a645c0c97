"""Losses of episodes, whose given tokens are masked and whose branches share a member, beside plain loops. No ranks."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from engine.batch.batch import MicroBatch, SampleTable, pack
from engine.batch.plan import BY_TOKENS, plan_microbatches, split_evenly, split_members
from engine.config import EngineConfig
from engine.algorithm import AlgorithmConfig
from engine.minibatch import Cutter, set_advantages, with_advantages
from engine.objective.own import OwnFunctions
from engine.objective.loss import aggregation_weights, grpo_loss, leave_out
from engine.runtime.parallel import Layout
from engine.sample import Sample
from tests.engine.objective.test_losses import CPU, MAX_NEW_TOKENS, Response, add, algorithms, plain_loss, responses


@dataclass
class Branch:
    """`sampled` alone counts; before its token i are `given[i]` given ones, and the last of `given` comes after all."""

    sampled: Response
    given: list[int]
    member: int

    @property
    def mask(self) -> list[bool]:
        """Of the response, which begins with the first sampled token."""
        pieces = [[False] * (number if place else 0) + [True] for place, number in enumerate(self.given[:-1])]
        return [*(value for piece in pieces for value in piece), *[False] * self.given[-1]]

    @property
    def sample(self) -> Sample:
        mask = np.array(self.mask)
        log_probs = np.full(len(mask), -123.0, np.float32)  # has no meaning where a token is given
        log_probs[mask] = self.sampled.rollout
        prompt = (5,) * (self.sampled.prompt_length + self.given[0])
        return Sample(prompt, (7,) * len(mask), log_probs, member=self.member, is_sampled=mask)


@st.composite
def episodes(draw: st.DrawFn) -> list[Branch]:
    """Of several members, each with one to three branches, which share its advantage and whether it is in the loss."""
    found = []
    for member in range(draw(st.integers(1, 4))):
        branches = draw(st.lists(responses(), min_size=1, max_size=3))
        for one in branches:
            one.advantage, one.is_in_loss = branches[0].advantage, branches[0].is_in_loss
            given = draw(st.lists(st.integers(0, 3), min_size=len(one.current) + 1, max_size=len(one.current) + 1))
            found.append(Branch(one, given, member))
    return found


def table_of(branches: list[Branch]) -> SampleTable:
    table = SampleTable.from_samples([branch.sample for branch in branches])
    return dataclasses.replace(table, advantages=np.array([branch.sampled.advantage for branch in branches]))


def placed(values: list[list[float]], branches: list[Branch], micro: MicroBatch, elsewhere: float) -> torch.Tensor:
    """`values` where the sampled tokens of the micro-batch's branches are predicted."""
    result = torch.full((micro.num_tokens,), elsewhere)
    for index, start in zip(micro.samples, micro.starts, strict=False):  # a stand-in has no samples
        sample, mask = branches[index].sample, torch.tensor(branches[index].mask)
        first = start + len(sample.prompt_ids) - 1
        result[first : first + len(mask)][mask] = torch.tensor(values[index])
    return result


def engine_loss(
    branches: list[Branch], bins: list[list[int]], config: AlgorithmConfig
) -> tuple[float, list[list[float]], dict[str, float]]:
    """As the engine has it: packed in `bins`, with the mini-batch's sizes."""
    table = table_of(branches)
    counted = [branch for branch in branches if branch.sampled.is_in_loss]
    sizes = sum(len(branch.sampled.current) for branch in counted), len({branch.member for branch in counted})
    total, gradients, sums = 0.0, [list[float]() for _ in branches], dict[str, float]()
    for indices in bins:
        micro = pack(table, indices, 4, CPU)
        micro.old_log_probs = placed([branch.sampled.old for branch in branches], branches, micro, elsewhere=0.9)
        micro.reference_log_probs = placed([branch.sampled.reference for branch in branches], branches, micro, elsewhere=-0.3)
        leave_out(micro, [branches[index].sampled.is_in_loss for index in indices])
        log_probs = placed([branch.sampled.current for branch in branches], branches, micro, elsewhere=-1.5).requires_grad_()
        weights = aggregation_weights(micro, *sizes, config.loss_aggregation, MAX_NEW_TOKENS)
        loss, found = grpo_loss(log_probs, micro, weights, config)
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
        gradient = log_probs.grad
        assert gradient is not None and not bool(gradient[micro.mask == 0].any()), "given tokens and padding have no gradient"
        for index, start in zip(micro.samples, micro.starts, strict=False):  # a stand-in has no samples
            first = start + len(branches[index].sample.prompt_ids) - 1
            gradients[index] = gradient[first : first + len(branches[index].mask)][torch.tensor(branches[index].mask)].tolist()
        add(sums, found)
    return total, gradients, sums


@settings(deadline=None, max_examples=80)
@given(episodes(), algorithms, st.data())
def test_only_sampled_tokens_count_each_once_and_members_alike(
    branches: list[Branch], config: AlgorithmConfig, data: st.DataObject
) -> None:
    """The sum over branches of their loss by plain loops, which see the sampled tokens alone; wherever branches are packed."""
    place = data.draw(st.lists(st.integers(0, 2), min_size=len(branches), max_size=len(branches)))
    bins = [[index for index, own in enumerate(place) if own == number] for number in range(3)]
    loss, gradients, sums = engine_loss(branches, bins, config)
    counted = [branch for branch in branches if branch.sampled.is_in_loss]
    num_tokens, num_members = sum(len(b.sampled.current) for b in counted), len({b.member for b in counted})
    of_member = Counter(branch.member for branch in branches for _ in branch.sampled.current)
    expected, expected_sums = 0.0, dict[str, float]()
    for branch, found in zip(branches, gradients, strict=True):
        length = len(branch.sampled.current)
        shares = {
            "token_mean": length / max(num_tokens, 1),
            "sequence_mean": length / of_member[branch.member] / max(num_members, 1),
            "constant_length": 1 / max(num_members, 1),
        }
        share = shares[config.loss_aggregation] if branch.sampled.is_in_loss else 0.0
        alone, (wanted,), reported = plain_loss([branch.sampled], config)
        expected += alone * share
        assert found == pytest.approx([value * share for value in wanted], rel=2e-5, abs=2e-6)
        for name, value in reported.items():
            expected_sums[name] = expected_sums.get(name, 0.0) + value * (share if name in ("loss", "policy") else 1.0)
    assert loss == pytest.approx(expected, rel=2e-5, abs=2e-5)
    for name, value in expected_sums.items():
        assert sums[name] == pytest.approx(value, rel=1e-5, abs=2e-5), name
    assert sums["tokens"] == num_tokens


@settings(deadline=None, max_examples=40)
@given(episodes(), st.integers(1, 5))
def test_mini_batches_hold_members_whole(branches: list[Branch], num_parts: int) -> None:
    """As evenly as members go; where each has one sample the cut is that of samples."""
    table = table_of(branches)
    numbers = sorted({branch.member for branch in branches})
    parts = split_members(table.members, num_parts)
    assert [index for part in parts for index in part] == list(range(len(branches)))
    held = [sorted({branches[index].member for index in part}) for part in parts]
    assert held == [numbers[own.start : own.stop] for own in split_evenly(len(numbers), num_parts)]
    assert split_members(np.arange(len(branches)), num_parts) == split_evenly(len(branches), num_parts)
    plan = plan_microbatches(table.lengths, 2, 20)
    assert sorted(index for own in plan for micro in own for index in micro) == list(range(len(branches)))


def test_samples_without_a_member_are_their_own() -> None:
    """Also where group and reward are equal; a member's samples are those that lie side by side."""
    samples = [Sample((1,), (2,), group=group, member=member) for group, member in ((0, -1), (0, -1), (0, 2), (0, 2), (1, 2))]
    assert SampleTable.from_samples(samples).members.tolist() == [0, 1, 2, 2, 3]
    assert SampleTable.from_samples([]).members.tolist() == []


def test_a_mask_of_sampled_tokens_alone_is_none() -> None:
    """So that nothing is packed, sent or stored for it."""
    assert len(Sample((1,), (2, 3), is_sampled=(True, True)).is_sampled) == 0
    mixed = Sample((1,), (2, 3, 4), is_sampled=(True, False, True))
    assert mixed.num_sampled == 2 and mixed.is_sampled.tolist() == [True, False, True]


# group, member, reward, finish reason, of each sample: branches of one member lie side by side
EPISODES = [
    *((0, 0, 1.0, "stop"), (0, 1, 0.0, "stop"), (0, 1, 0.0, "length"), (0, 1, 0.0, "stop")),
    *((1, 0, 5.0, "stop"), (1, 0, 5.0, "stop"), (1, 1, 2.0, "stop"), (1, 2, 2.0, "length")),
]


def table_of_episodes() -> SampleTable:
    samples = [
        Sample((1, 2), (3,) * (place + 1), reward=reward, group=group, member=member, finish_reason=reason)
        for place, (group, member, reward, reason) in enumerate(EPISODES)
    ]
    return SampleTable.from_samples(samples)


def test_each_branch_has_the_advantage_of_its_own_member() -> None:
    """The mean of a group is over members, not over branches."""
    algorithm = AlgorithmConfig(normalize_advantage_by_std=False)
    found = with_advantages(table_of_episodes(), algorithm, MAX_NEW_TOKENS, OwnFunctions()).advantages
    assert found.tolist() == [0.5, -0.5, -0.5, -0.5, 2.0, 2.0, -1.0, -1.0]


@pytest.mark.parametrize(("truncated", "kept"), [("keep", range(8)), ("mask", (0, 4, 5, 6))])
def test_all_branches_of_a_member_that_was_cut_off_leave_the_loss(truncated: str, kept: Sequence[int]) -> None:
    """And what the loss is divided by."""
    algorithm, layout = AlgorithmConfig(truncated=truncated), Layout(0, 1, 0, 1, 0, 1, 0, 1, 1, 0)
    mini = Cutter(EngineConfig(tokens_per_microbatch=20), algorithm, layout, BY_TOKENS, False, CPU).cut(table_of_episodes())
    tokens = Counter[int]()
    for micro in mini.microbatches:
        for place, mask in zip(micro.segment.tolist(), micro.mask.tolist(), strict=True):
            tokens[micro.samples[place]] += int(mask)
    assert {index: count for index, count in tokens.items() if count} == {index: index + 1 for index in kept}
    assert mini.num_tokens == sum(index + 1 for index in kept)
    assert mini.num_members == len({EPISODES[index][:2] for index in kept})


# a group: of each member its rewards, and of each of its branches the turn of each response token, None where it is given
TURNS: list[tuple[list[float], list[list[int | None]]]] = [
    ([1.0, 0.0, 2.0], [[0, 0, None, 2], [None, 1, 1]]),  # a sub-agent's turn in a branch of its own
    ([0.5], [[0, 0, 0]]),
    ([0.0, 1.0], [[0, None, 1]]),
]


def table_of_turns(*, by_turn: bool = True) -> SampleTable:
    samples = []
    for member, (rewards, branches) in enumerate(TURNS):
        returns = [sum(rewards[turn:]) for turn in range(len(rewards))]
        for branch in branches:
            spans = [(turn, branch.index(turn), branch.count(turn)) for turn in range(3) if turn in branch]
            own = {"turn_returns": returns, "turn_spans": spans} if by_turn else {}
            mask = [turn is not None for turn in branch]
            samples.append(Sample((1, 2), (3,) * len(branch), reward=sum(rewards), member=member, is_sampled=mask, **own))
    return SampleTable.from_samples(samples)


@pytest.mark.parametrize("tokens", [8, 12, 100])
@pytest.mark.parametrize(("penalty", "of_members"), [("", (0.0,) * 3), ("overlong", (-0.5, 0.0, 0.0)), ("kl", (-0.25, -1, -0.5))])
def test_each_sampled_token_has_the_advantage_of_its_own_turn(tokens: int, penalty: str, of_members: Sequence[float]) -> None:
    """In whichever branch, wherever it is packed, in whichever mini-batch; penalties are the last turn's."""
    truncated = "penalise" if penalty == "overlong" else "keep"
    options: dict[str, Any] = {"credit": "turn", "truncated": truncated, "overlong_buffer": 4}
    algorithm, table = AlgorithmConfig(normalize_advantage_by_std=False, **options), table_of_turns()
    made = with_advantages(table, algorithm, 7, OwnFunctions())
    totals = [sum(rewards) + own for (rewards, _), own in zip(TURNS, of_members, strict=True)]
    earlier = [[sum(rewards[:turn]) for rewards, _ in TURNS if turn < len(rewards)] for turn in range(3)]
    wanted = [
        [total - sum(totals) / 3 - sum(rewards[:turn]) + float(np.mean(earlier[turn])) for turn in range(len(rewards))]
        for (rewards, _), total in zip(TURNS, totals, strict=True)
    ]
    layout = Layout(0, 1, 0, 1, 0, 1, 0, 1, 1, 0)
    cutter = Cutter(EngineConfig(tokens_per_microbatch=tokens), algorithm, layout, BY_TOKENS, False, CPU)
    minis = [cutter.cut(made.part(part), part.start) for part in (range(2), range(2, 4))]
    if penalty == "kl":  # of each branch
        set_advantages(minis, with_advantages(table, algorithm, 7, OwnFunctions(), np.array([0.125, 0.125, 1.0, 0.5])))
    expected = [(member, branch) for member, (_, branches) in enumerate(TURNS) for branch in branches]
    for mini in minis:
        for micro in mini.microbatches:
            for index, start in zip(micro.samples, micro.starts, strict=True):
                member, branch = expected[mini.first_sample + index]
                for place, turn in enumerate(branch, start=start + 1):
                    assert micro.mask[place] == (turn is not None)
                    assert turn is None or float(micro.advantages[place]) == pytest.approx(wanted[member][turn], abs=1e-6)
                    assert turn is not None or micro.advantages[place] == 0


def test_samples_without_turns_are_refused() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.credit"):
        with_advantages(table_of_turns(by_turn=False), AlgorithmConfig(credit="turn"), 7, OwnFunctions())
