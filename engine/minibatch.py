"""Samples become mini-batches: this rank's share of an optimizer step, and the counts of all ranks.

Each rank cuts the same table and packs its own part. Leaves out old and reference log-probs (engine.py).
Try it: tests/engine/test_engine.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from engine.objective import advantages, loss
from engine.objective.advantages import Numbers
from engine.attention import context
from engine.runtime.parallel import Layout
from engine.moe import router
from engine.batch.batch import MicroBatch, SampleTable, pack
from engine.batch.plan import Balance, padding_fraction, plan_microbatches
from engine.config import EngineConfig, is_own
from engine.algorithm import AlgorithmConfig
from engine.objective.own import OwnFunctions


@dataclass
class MiniBatch:
    """One optimizer step's samples on this rank; the counts are over all ranks, and only of samples in the loss."""

    microbatches: list[MicroBatch]
    num_tokens: int  # sampled tokens
    num_members: int  # responses, or episodes with all of their branches
    first_sample: int = 0  # of the batch, whose samples are consecutive here
    padding: float = 0.0  # share of the tokens of all ranks' micro-batches


def with_advantages(
    table: SampleTable, algorithm: AlgorithmConfig, max_new_tokens: int, own: OwnFunctions, penalties: Numbers | None = None
) -> SampleTable:
    """The table with the advantage of each sample's member, with `algorithm.credit=turn` of each of its turns. `penalties`: of
    each sample, taken from its member's reward.

    Raises:
        ValueError: a function of the user's own raised, or returned something else than finite numbers; samples have no
            `turn_returns`, which `algorithm.credit=turn` needs.
    """
    members = table.members
    _, firsts = np.unique(members, return_index=True)
    rewards, lengths = table.columns["reward"][firsts], np.bincount(members, table.sampled_lengths).astype(np.int64)
    if algorithm.truncated == "penalise":
        given = rewards.tolist(), lengths.tolist()
        rewards = np.array(advantages.penalised_rewards(*given, max_new_tokens, algorithm.overlong_buffer))
    if penalties is not None:
        rewards = rewards - np.bincount(members, penalties)
    batch = advantages.AdvantageInput(
        rewards=np.asarray(rewards, np.float64),
        groups=table.columns["group"][firsts],
        lengths=lengths,
        config=algorithm,
        parts=table.columns["reward_parts"][firsts],
        part_weights=own.part_weights,
        greedy_rewards=table.columns["greedy_reward"][firsts],
    )
    by_turn = algorithm.credit == "turn"
    found = _of_turns(batch, table.columns["turn_returns"][firsts]) if by_turn else _of_members(batch, own)
    return dataclasses.replace(table, advantages=found[members])


def _of_turns(batch: advantages.AdvantageInput, returns: Numbers) -> Numbers:
    if not returns.size:
        raise ValueError("algorithm.credit = turn: samples have no turn_returns")
    how = batch.config.normalize_advantage_by_std, batch.config.baseline
    return advantages.turn_advantages(batch.rewards, returns[:, :1] - returns, batch.groups.tolist(), *how)


def _of_members(batch: advantages.AdvantageInput, own: OwnFunctions) -> Numbers:
    name = batch.config.advantage
    try:
        return advantages.checked_advantages(own.advantage_of(batch.config)(batch), len(batch.rewards))
    except Exception as error:
        if not is_own(name):
            raise
        raise ValueError(f"algorithm.advantage = {name}: {type(error).__name__}: {error}") from error


def kl_penalties(
    minibatches: Sequence[MiniBatch], num_samples: int, algorithm: AlgorithmConfig, device: torch.device
) -> Numbers:
    """For each sample of a batch the sum of its tokens' KL estimates by the old log-probs, times the coefficient; on every rank.

    Collective. `minibatches`: of the whole batch, [] on ranks that report nothing.
    """
    found = torch.zeros(num_samples, dtype=torch.float64, device=device)
    for mini in minibatches:
        for micro in mini.microbatches:
            assert micro.old_log_probs is not None
            tokens = loss.loss_tokens(micro.old_log_probs, micro, algorithm, None)
            kl = loss.kl_estimate(micro.old_log_probs, micro, algorithm.kl_estimator) * micro.mask
            places = torch.tensor(micro.samples, dtype=torch.int64, device=device) + mini.first_sample
            found[places] = tokens.sums(kl)[: len(places)]
    dist.all_reduce(found)
    return algorithm.kl_coefficient * found.cpu().numpy()


def set_advantages(minibatches: Sequence[MiniBatch], table: SampleTable) -> None:
    """Write the advantages of the table, of the whole batch, into micro-batches that are packed already."""
    for mini in minibatches:
        for micro in mini.microbatches:
            if micro.samples:
                values = np.zeros(micro.num_tokens, np.float32)
                for index, begin in zip(micro.samples, micro.starts, strict=True):
                    own = table.token_advantages(mini.first_sample + index)
                    values[begin : begin + len(own)] = own
                micro.advantages = torch.from_numpy(values).to(micro.advantages.device)


@dataclass(frozen=True)
class Cutter:
    """Cuts batches for this rank, with settings that all batches of an engine share."""

    config: EngineConfig
    algorithm: AlgorithmConfig
    layout: Layout
    balance: Balance
    has_experts: bool
    device: torch.device

    def cut(self, table: SampleTable, first_sample: int = 0) -> MiniBatch:
        """All samples of the table as one mini-batch; they follow each other in their batch, beginning with `first_sample`."""
        split, chunks = self.config.parallel, context.num_chunks(self.config.parallel)
        bins = plan_microbatches(table.lengths, self.layout.data_size, self.config.tokens_per_microbatch, self.balance)
        multiple = chunks * (split.tensor if split.sequence else 1)
        microbatches = [pack(table, indices, multiple, self.device, chunks) for indices in bins[self.layout.data_rank]]
        members, counted = table.members, table.sampled_lengths > 0
        if self.algorithm.truncated == "mask":
            is_cut = table.columns["finish_reason"] == "length"
            counted = counted & ~np.isin(members, members[is_cut])
        for micro in microbatches:
            loss.leave_out(micro, counted[micro.samples].tolist())
            if self.has_experts:
                num_microbatches = len(microbatches) * self.layout.data_size
                router.set_routing(micro, table, num_microbatches, replay=self.algorithm.router_replay == "rollout")
        microbatches = context.shard_microbatches(microbatches, split)
        padding = padding_fraction(table.lengths, bins, multiple, chunks)
        num_tokens, num_members = int(table.sampled_lengths[counted].sum()), len(np.unique(members[counted]))
        return MiniBatch(microbatches, num_tokens, num_members, first_sample, padding)
