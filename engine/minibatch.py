"""Samples become mini-batches: this rank's share of an optimizer step, and the counts of all ranks.

No collective: each rank cuts the same table and packs its own part. Leaves out old and reference log-probs (engine.py).
Try it: tests/engine/test_engine.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch

from engine.objective import advantages, loss
from engine.attention import context
from engine.runtime.parallel import Layout
from engine.moe import router
from engine.batch.batch import MicroBatch, SampleTable, pack
from engine.batch.plan import Balance, padding_fraction, plan_microbatches
from engine.config import AlgorithmConfig, EngineConfig


@dataclass
class MiniBatch:
    """One optimizer step's samples on this rank; the counts are over all ranks, and only of samples in the loss."""

    microbatches: list[MicroBatch]
    num_tokens: int  # sampled tokens
    num_members: int  # responses, or episodes with all of their branches
    first_sample: int = 0  # of the batch, whose samples are consecutive here
    padding: float = 0.0  # share of the tokens of all ranks' micro-batches


def with_advantages(table: SampleTable, algorithm: AlgorithmConfig, max_new_tokens: int) -> SampleTable:
    """The table with the advantage of each sample's member."""
    members = table.members
    _, firsts = np.unique(members, return_index=True)
    rewards, groups = (table.columns[name][firsts].tolist() for name in ("reward", "group"))
    if algorithm.truncated == "penalise":
        lengths = [int(number) for number in np.bincount(members, table.sampled_lengths)]
        rewards = advantages.penalised_rewards(rewards, lengths, max_new_tokens, algorithm.overlong_buffer)
    found = advantages.group_advantages(rewards, groups, algorithm.normalize_advantage_by_std, algorithm.baseline)
    return dataclasses.replace(table, advantages=np.array(found)[members])


@dataclass(frozen=True)
class Cutter:
    """Cuts batches for this rank; what all batches of an engine have in common."""

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
