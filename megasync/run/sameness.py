"""model.exact: how many tokens of a step have the same log-prob in trainer and replica, bit for bit.

Only those count that were sampled with the weights that the step trains: all of their sequence up to them, by that version.
Leaves out the gap's mean and maximum, which the loss reports of all tokens (engine/objective/).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.sample import Sample


def compare(
    samples: Sequence[Sample | None], trained: Sequence[npt.NDArray[np.float32]], version: int, *, recomputes: bool
) -> dict[str, float]:
    """Tokens that count, and of these the ones that differ.

    Args:
        samples: of the step, all with their tokens.
        trained: of each sample the trainer's log-probs of its response's tokens, before the step.
        version: of the weights that the step trains.
        recomputes: whether what a sample had cached is computed anew where new weights come (rollout.cache_on_update).
    """
    compared = differing = 0
    for sample, log_probs in zip(samples, trained, strict=True):
        assert sample is not None
        is_sampled = sample.is_sampled if len(sample.is_sampled) else np.ones(len(sample.response_ids), np.bool_)
        is_own = (np.asarray(sample.weight_versions) == version) & is_sampled
        if not recomputes and (is_own != is_sampled).any():
            continue
        theirs = np.asarray(sample.rollout_log_probs)
        compared += int(is_own.sum())
        differing += int(((theirs != log_probs) & is_own).sum())
    return {"exact/compared_tokens": float(compared), "exact/differing_tokens": float(differing)}
