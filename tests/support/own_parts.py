"""A loss, an advantage, a filter and a sampler as a user may write them, for whole runs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from engine.objective.advantages import AdvantageInput
    from engine.objective.policy import LossTokens
    from megasync.data.data import Example
    from megasync.rollouts.filters import FilterInput


def loss(tokens: LossTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """REINFORCE, which reports the advantage."""
    return -tokens.advantages * tokens.log_probs, {"own": tokens.advantages}


def advantage(batch: AdvantageInput) -> Any:
    """The reward less the group's mean."""
    return batch.by_group(lambda rewards: rewards - rewards.mean())


def keep(group: FilterInput) -> bool:
    """About three of four prompts."""
    return sum(map(ord, group.prompt)) % 4 > 0


class Sampler:
    """All examples in an order of its own for each pass."""

    def __init__(self, examples: Sequence[Example], seed: int, *, stride: int = 1) -> None:
        self.number, self.seed, self.stride, self.passes, self.place = len(examples), seed, stride, 0, 0

    def __iter__(self) -> Iterator[int]:
        order = list(range(0, self.number, self.stride))
        random.Random(f"{self.seed}/{self.passes}").shuffle(order)
        while self.place < len(order):
            self.place += 1
            yield order[self.place - 1]
        self.passes, self.place = self.passes + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes, self.place = state["passes"], state["place"]
