"""Sample: one prompt with one response, the unit that rollouts hand to training. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids and what is known of them.

    Supervised examples leave the rollout's fields empty; their `advantage` is not used.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    rollout_log_probs: tuple[float, ...] = ()  # one a response token, by vLLM at sampling time, natural log
    weight_versions: tuple[int, ...] = ()  # one a response token
    reward: float = 0.0
    advantage: float = 0.0
    group: int = 0  # samples of one prompt share it

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)
