"""ServedModel: a model beside the policy whose weights stay as they are, as a pool of replicas or as an endpoint.

Leaves out both forms (pool.py, endpoint.py), and its callers (rollouts/teachers.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from bridge.generation import Sampling, TokenScores

CALLS, RETRIES, FAILURES = "calls", "retries", "failures"  # names in `ServedModel.counts`


class ServedError(RuntimeError):
    """A served model cannot answer. The text begins with the config's key that names it."""


class LostError(ServedError):
    """It gave no answer for as long as it was tried."""


class RefusedError(ServedError):
    """It refuses this request, and would refuse it again: too many tokens, a template that fails, no such model."""


class ServedModel(Protocol):
    """Methods are called on one event loop, many at a time. Lost requests are sent again; no answer is given twice."""

    counts: Counter[str]  # CALLS: requests; RETRIES: of them, sent again; FAILURES: given up

    async def prompt_log_probs(self, sequences: Sequence[Sequence[int]], top_k: int) -> list[TokenScores]:
        """For each sequence the scores of its tokens from the second on, with the `top_k` most likely tokens at each place.

        Raises:
            LostError, RefusedError: for any of the sequences.
        """
        ...

    async def chat(self, messages: Sequence[Mapping[str, Any]], sampling: Sampling, seed: int = 0) -> str:
        """The model's answer, by its own chat template and tokenizer. `sampling` of one sample.

        A server leaves special tokens out. Replicas of ours keep them but for the last, and thinking begins with its tag, such as
        <think>, also where the template has written that.

        Raises:
            LostError, RefusedError: as above.
        """
        ...

    async def close(self) -> None:
        """Safe to repeat."""
        ...
