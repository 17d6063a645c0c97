"""Samples become mini-batches: what of an optimizer step this rank computes, and the counts of all ranks.

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
    """What one optimizer step sees on this rank; the counts are over all ranks, of what is in the loss."""

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


def cut(
    table: SampleTable,
    first_sample: int,
    config: EngineConfig,
    algorithm: AlgorithmConfig,
    layout: Layout,
    balance: Balance,
    *,
    has_experts: bool,
    device: torch.device,
) -> MiniBatch:
    """All samples of the table, which begins with that one of its batch, as one mini-batch."""
    bins = plan_microbatches(table.lengths, layout.data_size, config.tokens_per_microbatch, balance)
    split, chunks = config.parallel, context.num_chunks(config.parallel)
    multiple = chunks * (split.tensor if split.sequence else 1)
    microbatches = [pack(table, indices, multiple, device, chunks) for indices in bins[layout.data_rank]]
    members, counted = table.members, table.sampled_lengths > 0
    if algorithm.truncated == "mask":
        is_cut = table.columns["finish_reason"] == "length"
        counted = counted & ~np.isin(members, members[is_cut])
    for micro in microbatches:
        loss.leave_out(micro, counted[micro.samples].tolist())
        if has_experts:
            num_microbatches = len(microbatches) * layout.data_size
            router.set_routing(micro, table, num_microbatches, replay=algorithm.router_replay == "rollout")
    microbatches = context.shard_microbatches(microbatches, split)
    padding = padding_fraction(table.lengths, bins, multiple, chunks)
    num_tokens, num_members = int(table.sampled_lengths[counted].sum()), len(np.unique(members[counted]))
    return MiniBatch(microbatches, num_tokens, num_members, first_sample, padding)
