"""The policy's log-probs of a few samples, brought to rank 0, for whoever looks at single tokens.

Leaves out which samples those are.

    chosen_log_probs([(0, micro)], table, chosen=[0, 8], device)      # collective
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from engine.batch.batch import MicroBatch, SampleTable


def chosen_log_probs(
    packed: Iterable[tuple[int, MicroBatch]], samples: SampleTable, chosen: Sequence[int], device: torch.device
) -> list[npt.NDArray[np.float32]]:
    """For each of the `chosen` samples `policy_log_probs` of its response tokens; on other ranks than 0 [].

    One reduction of these tokens alone, to which each sample comes from one rank. `packed`: micro-batches of the ranks that
    speak for theirs, on others none, each with the place in the batch of its mini-batch's first sample.
    """
    if not chosen:
        return []
    lengths, prompts = samples.response_lengths[list(chosen)], samples.prompt_lengths
    ends = np.cumsum(lengths)
    places = dict(zip(chosen, zip((ends - lengths).tolist(), lengths.tolist(), strict=True), strict=True))
    flat = torch.zeros(int(lengths.sum()), device=device)
    for first_sample, micro in packed:
        for index, start in zip(micro.samples, micro.starts, strict=False):  # a stand-in has no samples
            sample = first_sample + index
            if sample in places:
                assert micro.policy_log_probs is not None, "the batch was not trained on"
                (place, length), begin = places[sample], start + int(prompts[sample]) - 1
                flat[place : place + length] = micro.policy_log_probs[begin : begin + length]
    dist.reduce(flat, dst=0)
    return np.split(flat.cpu().numpy(), ends[:-1]) if dist.get_rank() == 0 else []
