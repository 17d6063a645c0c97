"""One example on its way: what a replica is asked for it, what the reward gets of an answer, and its line in samples.jsonl.

Leaves out who asks and when (rollout.py, evaluation.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from bridge.generation import Completion, GenerationRequest, Sampling
from megasync.config.data_section import TRAIN_SET
from megasync.data.data import Example
from megasync.episodes.task import Played, Task
from megasync.rewards.functions import RewardInput
from megasync.rollouts.token_lines import episode_line

if TYPE_CHECKING:
    from megasync.config.data_section import EvalSet
    from megasync.config.schema import Config, RolloutConfig
    from megasync.data.prompts import Prompts
    from megasync.rewards.pool import RewardPool

SEED_STRIDE = 1_000_003


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


def request_digest(request: GenerationRequest, *, returns_experts: bool, task: Task | None = None, played_by: object = "") -> int:
    """Of what a response depends on: prompt tokens and sampling, without its seed and without how many samples there are.

    An episode depends on its task, too: its own code may score by the answer, and a group's members share the seed.
    `played_by`: what tells the episodes of this config from those of another.
    """
    parts: tuple[object, ...] = (replace(request, num_samples=1, seed=0), returns_experts)
    return digest_of(parts if task is None else (*parts, played_by, task))


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
            num_tokens=len(completion.final_ids if isinstance(completion, Played) else completion.token_ids),
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
    common = {"set": of, "line": example.line, "prompt": prompts.prompt_text(example)}
    if isinstance(completion, Played):
        return common | episode_line(prompts, completion, answer=example.answer, reward=reward)
    return {
        **common,
        "response": prompts.text(completion.token_ids),
        "answer": example.answer,
        "reward": reward,
        "tokens": len(completion.token_ids),
        "versions": [int(min(completion.weight_versions)), int(max(completion.weight_versions))],
        "finish_reason": completion.finish_reason,
    }
