"""One example on its way: what a replica is asked for it, what the reward gets of an answer, and its line in samples.jsonl.

Leaves out who asks and when (rollout.py, evaluation.py).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bridge.generation import Completion, GenerationRequest, Sampling
from megasync.data.data import Example
from megasync.episodes.task import Played, Task
from megasync.reporting.log import TRAIN_SET
from megasync.rewards.functions import RewardInput

if TYPE_CHECKING:
    from megasync.config.schema import Config, EvalSet, RolloutConfig
    from megasync.data.prompts import Prompts
    from megasync.episodes.segments import Branch
    from megasync.rewards.pool import RewardPool

SEED_STRIDE = 1_000_003
MAX_LOGGED_TOKENS = 1024  # of a response; what there is of each token is left out after these


def training_sampling(rollout: RolloutConfig) -> Sampling:
    own = {"num_samples": rollout.group_size, "max_new_tokens": rollout.max_new_tokens}
    return Sampling(**own, temperature=rollout.temperature, **_filters(rollout), stop=rollout.stop)


def greedy_sampling(rollout: RolloutConfig) -> Sampling:
    return Sampling(max_new_tokens=rollout.max_new_tokens, temperature=0.0, stop=rollout.stop)


def set_sampling(rollout: RolloutConfig, given: EvalSet) -> Sampling:
    own = {"num_samples": given.samples, "max_new_tokens": given.max_new_tokens or rollout.max_new_tokens}
    return Sampling(**own, temperature=given.temperature, **_filters(given), stop=rollout.stop)


def _filters(given: RolloutConfig | EvalSet) -> dict[str, Any]:
    return {"top_p": given.top_p, "top_k": given.top_k, "min_p": given.min_p}


def training_request(config: Config, prompts: Prompts, example: Example, ordinal: int) -> GenerationRequest:
    """Of the `ordinal`-th prompt of the run, counted from 0: step x data.batch_size + its place in the batch."""
    seed = (config.run.seed * SEED_STRIDE + ordinal * config.rollout.group_size) % 2**31
    return make_request(prompts, example, training_sampling(config.rollout), seed)


def make_request(prompts: Prompts, example: Example, sampling: Sampling, seed: int) -> GenerationRequest:
    return GenerationRequest(prompts.prompt_ids(example), seed, prompts.stop_token_ids, **asdict(sampling))


def task_of(prompts: Prompts, example: Example, request: GenerationRequest) -> Task:
    """What the members of a group play."""
    ids, seed = request.prompt_ids, request.seed
    turns = tuple((turn["role"], turn["content"]) for turn in prompts.turns(example))
    return Task(example.prompt, ids, example.answer, example.extra, seed, turns=turns, line=example.line)


def request_digest(request: GenerationRequest, *, returns_experts: bool, episode: str = "") -> int:
    """Of what a response depends on: prompt tokens and sampling, without its seed and without how many samples there are.

    `episode`: what tells episodes apart, where members play them.
    """
    parts: tuple[object, ...] = (replace(request, num_samples=1, seed=0), returns_experts)
    return digest_of((*parts, episode) if episode else parts)


def reward_digest(example: Example, rewards: RewardPool, num_samples: int) -> int:
    """Of what the rewards of given responses depend on; `num_samples` of them are looked at together where a reward does so."""
    together = num_samples if rewards.takes_groups else 1
    return digest_of((rewards.identity, together, example.prompt, example.answer, example.extra, example.line))


def digest_of(value: object) -> int:
    """A signed 64-bit number of the text that represents `value`."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), signed=True)


def reward_inputs(
    example: Example, completions: Sequence[Completion | Played], texts: Sequence[str], max_tokens: int
) -> list[RewardInput]:
    """`texts`: of the completions, of episodes of their last turns."""
    return [
        RewardInput(
            prompt=example.prompt,
            response=text,
            answer=example.answer,
            num_tokens=completion.num_sampled if isinstance(completion, Played) else len(completion.token_ids),
            max_tokens=max_tokens,
            extra=example.extra,
            line=example.line,
        )
        for completion, text in zip(completions, texts, strict=True)
    ]


def sample_line(
    prompts: Prompts, example: Example, completion: Completion | Played, reward: float, of: str = TRAIN_SET
) -> dict[str, Any]:
    """A line of samples.jsonl without its step; `versions` are the oldest and the newest of the response's tokens."""
    if isinstance(completion, Played):
        return _episode_line(prompts, example, completion, reward, of)
    return {
        "set": of,
        "line": example.line,
        "prompt": prompts.prompt_text(example),
        "response": prompts.text(completion.token_ids),
        "answer": example.answer,
        "reward": reward,
        "tokens": len(completion.token_ids),
        "versions": [int(min(completion.weight_versions)), int(max(completion.weight_versions))],
        "finish_reason": completion.finish_reason,
    }


def token_fields(prompts: Prompts, completion: Completion) -> dict[str, Any]:
    """What samples.jsonl keeps of the first MAX_LOGGED_TOKENS tokens of a response.

    Their texts, special tokens included; vLLM's log-probs; and their versions as runs, [version, number of tokens] each.
    """
    first = slice(MAX_LOGGED_TOKENS)
    versions = groupby(completion.weight_versions[first].tolist())
    return {
        "token_texts": prompts.token_texts(completion.token_ids[first].tolist()),
        "rollout_log_probs": rounded(completion.log_probs[first]),
        "version_runs": [[version, len(list(run))] for version, run in versions],
    }


def with_trainer_log_probs(line: Mapping[str, Any], log_probs: npt.NDArray[np.float32]) -> dict[str, Any]:
    """The line of a sample that was trained on, with the trainer's old log-probs of the same tokens."""
    return {**line, "trainer_log_probs": rounded(log_probs[:MAX_LOGGED_TOKENS])}


def rounded(log_probs: npt.NDArray[np.float32]) -> list[float | None]:
    """To four decimals; None where it is no finite number, which JSON has not."""
    return [round(value, 4) if math.isfinite(value) else None for value in log_probs.tolist()]


def first_of_groups(groups: npt.NDArray[np.int64], number: int) -> list[int]:
    """Where the first sample of each of the first `number` groups is in a batch; `groups`: of each sample, in order."""
    _, places = np.unique(groups, return_index=True)
    return [int(place) for place in places[:number]]


def _episode_line(prompts: Prompts, example: Example, played: Played, reward: float, of: str) -> dict[str, Any]:
    """With its branches as pieces of text, each sampled or given; the response is what follows the first branch's prompt."""
    versions = [branch.weight_versions[branch.is_sampled] for branch in played.branches]
    first = played.branches[0].token_ids[played.branches[0].prompt_length :] if played.branches else np.empty(0, np.int32)
    return {
        "set": of,
        "line": example.line,
        "prompt": prompts.prompt_text(example),
        "response": prompts.text(first),
        "answer": example.answer,
        "reward": reward,
        "tokens": played.num_sampled,
        "versions": [int(min(map(min, versions))), int(max(map(max, versions)))] if versions else [],
        "finish_reason": played.finish_reason,
        "turns": played.num_turns,
        "branches": [_pieces(prompts, branch) for branch in played.branches],
        "metrics": dict(played.metrics),
        "info": dict(played.info),
        "failures": played.num_failures,
    }


def _pieces(prompts: Prompts, branch: Branch) -> list[dict[str, Any]]:
    """Runs of sampled and of given tokens in turns, special tokens shown."""
    cuts = [0, *(np.flatnonzero(np.diff(branch.is_sampled)) + 1).tolist(), len(branch.token_ids)]
    return [
        {
            "sampled": bool(branch.is_sampled[begin]),
            "text": prompts.tokenizer.decode(branch.token_ids[begin:end].tolist()),
            "tokens": end - begin,
        }
        for begin, end in pairwise(cuts)
    ]
