"""Losses that a caller names, against their formulas written once more, with gradients."""

from __future__ import annotations

import pytest
import torch
from tests.engine.driven_cases import LOSSES, loss_by_hand

from engine.objective.token_losses import TOKEN_LOSSES


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_values_and_gradients(name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(50, generator=generator) for _ in range(4)]
    values = {"weights": draw[0], "advantages": draw[1], "logprobs": draw[2] - 3}
    found = []
    for by_hand in (False, True):
        log_probs = (draw[3] - 3).requires_grad_()
        loss, given = TOKEN_LOSSES[name], {"beta": 0.1} if name == "dro" else {}
        own = loss.value(log_probs, values, {**loss.options, **given})
        total = loss_by_hand(name, log_probs, values, given) if by_hand else own.sum()
        total.backward()
        found.append((total.detach(), log_probs.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)
