"""Losses that a caller names, against their formulas written once more, with gradients."""

from __future__ import annotations

import pytest
import torch
from tests.engine.driven_torch_cases import LOSSES, loss_by_hand

from engine.objective.token_losses import TOKEN_LOSSES


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_values_and_gradients(name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(50, generator=generator) for _ in range(5)]
    sequence = (torch.arange(50) >= 20).long()
    values = {"weights": draw[0], "advantages": draw[1], "logprobs": draw[2] - 3}
    values |= {"sequence": sequence, "sequence_ratio_mask": (draw[4] > 0).float()}
    found = []
    for by_hand in (False, True):
        log_probs = (draw[3] - 3).requires_grad_()
        loss, given = TOKEN_LOSSES[name], {"beta": 0.1} if name == "dro" else {}
        own = loss.value(log_probs, values, {**loss.options, **given})
        rows = [sequence == number for number in (0, 1)]
        parts = [loss_by_hand(name, log_probs[row], {key: each[row] for key, each in values.items()}, given) for row in rows]
        total = torch.stack(parts).sum() if by_hand else own.sum()
        total.backward()
        found.append((total.detach(), log_probs.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=2e-6)
