"""What goes to the replicas to be generated, and what comes back: requests, groups of samples, completions.

Leaves out who works on them (replicas/).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how to sample from it. Nothing but `stop_token_ids`, `stop` and the limit ends a completion.

    `top_k` 0 and `min_p` 0 leave no token out. `stop`: texts, for replicas that detokenise (ReplicaConfig).
    """

    prompt_ids: tuple[int, ...]
    num_samples: int = 1
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One sample of n tokens. A stop token, or the token that completed a stop text, is its last token.

    `log_probs` are natural logarithms at the request's temperature (plain at temperature 0), renormalised over the tokens
    that `top_p`, `top_k` and `min_p` leave. In `weight_versions` FOLDER_VERSION stands for the model folder's weights.
    """

    token_ids: npt.NDArray[np.int32]  # [n]
    log_probs: npt.NDArray[np.float32]  # [n]
    weight_versions: npt.NDArray[np.int32]  # [n]
    finish_reason: str  # stop | length
    # [prompt and response tokens - 1, layers, experts of a token], uint8 or int16, where ReplicaConfig.returns_experts is set
    routed_experts: npt.NDArray[Any] = field(default_factory=lambda: np.empty((0, 0, 0), np.uint8))

    def copy(self) -> Completion:
        """With arrays of its own: those that Ray hands out are views of its object store, which cannot free them before."""
        arrays = self.token_ids.copy(), self.log_probs.copy(), self.weight_versions.copy()
        return Completion(*arrays, self.finish_reason, self.routed_experts.copy())


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Samples of one prompt that are generated side by side: those of these indices, below the request's `num_samples`."""

    key: int  # the caller's
    request: GenerationRequest
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """Sample `sample` of group `key` has ended."""

    key: int
    sample: int
    completion: Completion


@dataclass(frozen=True, slots=True)
class Collected:
    """What a replica has finished since it was last asked.

    `silent_seconds`: how long vLLM's engine core has owed it an answer; none is due while it loads weights.
    """

    finished: tuple[Finished, ...]
    silent_seconds: float
