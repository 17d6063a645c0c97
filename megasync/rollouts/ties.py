"""Groups whose samples all have the same reward teach nothing: their share, and a hint once it has been all for some steps.

fraction = tied_fraction([[1.0, 1.0], [0.0, 1.0]])     # 0.5
hint = TieWatch().look(step=3, fraction=1.0, rewards=[0.0, 0.0])
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from engine.objective.advantages import is_group_worth_training

PATIENCE = 3  # steps in a row


def tied_fraction(groups: Sequence[Sequence[float]]) -> float:
    """From 0 to 1, of groups of rewards as the advantages are made of them."""
    return statistics.fmean(not is_group_worth_training(rewards) for rewards in groups)


class TieWatch:
    """Over the steps of a run. `filters_groups`: whether it already takes other prompts for tied ones."""

    def __init__(self, *, filters_groups: bool = False) -> None:
        self._filters_groups = filters_groups
        self._in_a_row = 0

    def look(self, step: int, fraction: float, rewards: Sequence[float]) -> str:
        """What to tell the user after `step` steps, once all groups were tied PATIENCE times in a row; else, and later, empty."""
        self._in_a_row = self._in_a_row + 1 if fraction == 1 else 0
        if self._in_a_row != PATIENCE:
            return ""
        if max(rewards) == min(rewards):
            what = f"every reward of step {step} is {rewards[0]:g}"
            look = "Compare responses and answers in samples.jsonl: does the reward read what the model writes, is it cut off?"
        else:
            what = "within each group all samples have the same reward"
            look = "Raise rollout.temperature or rollout.group_size."
        told = f"nothing is learnt since step {step - PATIENCE + 1}: {what}, so that every advantage is 0"
        told += f" (groups/tied_fraction = 1). {look}"
        if self._filters_groups:
            return f"{told} algorithm.filter_groups found no other prompts: some of middling difficulty are needed"
        return f"{told} Prompts of middling difficulty teach most; algorithm.filter_groups=true replaces tied groups"
