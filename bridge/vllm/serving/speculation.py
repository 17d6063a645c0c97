"""vLLM's `speculative_config`, with 0.26 and 0.32.

v1/sample/rejection_sampler.py accepts a drafted token with the model's probability of it, and otherwise samples from the model's
other tokens. So samples are distributed as without drafts, and their log-probs are the model's, at the request's temperature and
filters. Leaves out which other keys go with it (megasync/checks/speculation.py), and a draft model's weights while vLLM sleeps
(bridge/receive/receiver.py).
"""

from __future__ import annotations

from typing import Any

from bridge.config import ReplicaConfig


def engine_arguments(config: ReplicaConfig) -> dict[str, Any]:
    """Fields of EngineArgs."""
    own = config.speculation
    if not own.is_set:
        return {}
    fields: dict[str, Any] = {"method": own.method, "num_speculative_tokens": own.num_tokens}
    if own.method == "ngram":
        lookup = {"prompt_lookup_max": own.prompt_lookup_max, "prompt_lookup_min": own.prompt_lookup_min}
        return {"speculative_config": fields | lookup}
    fields |= {"model": own.path, "draft_tensor_parallel_size": config.tensor_parallel}
    return {"speculative_config": fields}
