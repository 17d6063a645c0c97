"""One example on its way: its request to a replica, the input of its reward, and its line in samples.jsonl.

The trainer's log-probs of a line's tokens are added once the batch was trained on. Leaves out who asks and when (rollout.py,
evaluation.py). No torch in here.

    line = sample_line(...) | token_fields(prompts, completion)
    with_trainer_log_probs(line, [log_probs])      # one array a response, or a branch of an episode
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
from megasync.config.data_section import TRAIN_SET
from megasync.data.data import Example
from megasync.episodes.task import EpisodeResult, Task
from megasync.rewards.answers.read import opens_thinking
from megasync.rewards.functions import RewardInput

if TYPE_CHECKING:
    from megasync.config.data_section import EvalSet
    from megasync.config.schema import Config, RolloutConfig
    from megasync.data.prompts import Prompts
    from megasync.episodes.segments import Branch
    from megasync.rewards.pool import RewardPool

SEED_STRIDE = 1_000_003
PROMPT_END_TOKENS = 32  # in which <think> and the like stand, whatever the tokenizer makes of them
MAX_LOGGED_TOKENS = 1024  # of a response, or a branch; further tokens have no fields of their own


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
    """The request for the `ordinal`-th prompt of the run, counted from 0: step x data.batch_size + its place in the batch."""
    seed = (config.run.seed * SEED_STRIDE + ordinal * config.rollout.group_size) % 2**31
    request = make_request(prompts, example, training_sampling(config.rollout), seed)
    if config.algorithm.advantage != "remax":
        return request
    return replace(request, num_samples=request.num_samples + 1, first_is_greedy=True)


def make_request(prompts: Prompts, example: Example, sampling: Sampling, seed: int) -> GenerationRequest:
    return GenerationRequest(prompts.prompt_ids(example), seed, prompts.stop_token_ids, **asdict(sampling))


def task_of(prompts: Prompts, example: Example, request: GenerationRequest) -> Task:
    """For the members of a group."""
    ids, seed = request.prompt_ids, request.seed
    turns = tuple((turn["role"], turn.get("content") or "") for turn in prompts.turns(example))
    return Task(example.prompt, ids, example.answer, example.extra, seed, turns=turns, line=example.line)


def request_digest(
    request: GenerationRequest,
    *,
    returns_experts: bool,
    returns_support: bool = False,
    task: Task | None = None,
    played_by: object = "",
) -> int:
    """A digest of everything that a response depends on: prompt tokens and sampling, without the seed and the number of samples.

    An episode depends on its task, too: its own code may score by the answer, and a group's members share the seed.
    `played_by`: a key that differs between configs whose episodes are not interchangeable.
    """
    parts: tuple[object, ...] = (replace(request, num_samples=1, seed=0), returns_experts)
    parts += ("support",) if returns_support else ()
    return digest_of(parts if task is None else (*parts, played_by, task))


def reward_digest(example: Example, rewards: RewardPool, num_samples: int) -> int:
    """A digest of everything that the rewards of given responses depend on; `num_samples` of them where a reward sees a group."""
    together = num_samples if rewards.takes_groups else 1
    source: tuple[object, ...] = (example.source,) if example.source else ()
    source += (example.rewards,) if example.rewards else ()
    return digest_of((rewards.identity, together, example.prompt, example.answer, example.extra, example.line, *source))


def digest_of(value: object) -> int:
    """A signed 64-bit number of the text that represents `value`."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), signed=True)


def reward_inputs(
    example: Example,
    completions: Sequence[Completion | EpisodeResult],
    texts: Sequence[str],
    max_tokens: int,
    *,
    thinking: bool = False,
) -> list[RewardInput]:
    """`texts`: of the completions, of episodes of their last turns; `thinking`: the prompt began it."""
    return [
        RewardInput(
            prompt=example.prompt,
            response=text,
            answer=example.answer,
            num_tokens=len(completion.final_ids if isinstance(completion, EpisodeResult) else completion.token_ids),
            max_tokens=max_tokens,
            extra=example.extra,
            line=example.line,
            thinking=thinking,
            source=example.source,
            place=example.place,
            rewards=example.rewards,
        )
        for completion, text in zip(completions, texts, strict=True)
    ]


def begins_thinking(prompts: Prompts, example: Example) -> bool:
    """Whether the prompt, as the model gets it, ends within the thinking, as those of some chat templates do."""
    return opens_thinking(prompts.tokenizer.decode(list(prompts.prompt_ids(example)[-PROMPT_END_TOKENS:])))


def sample_line(
    prompts: Prompts, example: Example, completion: Completion | EpisodeResult, reward: float, of: str = TRAIN_SET
) -> dict[str, Any]:
    """A line of samples.jsonl without its step; `versions` are the oldest and the newest of the response's tokens."""
    source = {"source": example.source} if example.source else {}
    common = {"set": of, **source, "line": example.line, "prompt": prompts.prompt_text(example)}
    if isinstance(completion, EpisodeResult):
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


def token_fields(prompts: Prompts, done: Completion | EpisodeResult) -> dict[str, Any]:
    """Fields of the first MAX_LOGGED_TOKENS tokens of a response, and of the sampled pieces of an episode's branches.

    Their texts, special tokens included; vLLM's log-probs; and their versions as runs, [version, number of tokens] each.
    """
    if isinstance(done, EpisodeResult):
        return {"branches": [pieces(prompts, branch, with_tokens=True) for branch in done.branches]}
    return _fields(prompts, done.token_ids, done.log_probs, done.weight_versions, 0)


def episode_line(prompts: Prompts, played: EpisodeResult, *, answer: str, reward: float) -> dict[str, Any]:
    """With its branches as pieces of text, each sampled or given; the response is the text after the first branch's prompt."""
    versions = [branch.weight_versions[branch.is_sampled] for branch in played.branches]
    first = played.branches[0].token_ids[played.branches[0].prompt_length :] if played.branches else np.empty(0, np.int32)
    return {
        "response": prompts.text(first),
        "answer": answer,
        "reward": reward,
        "tokens": played.num_sampled,
        "versions": [int(min(map(min, versions))), int(max(map(max, versions)))] if versions else [],
        "finish_reason": played.finish_reason,
        "turns": played.num_turns,
        "branches": [pieces(prompts, branch) for branch in played.branches],
        "metrics": dict(played.metrics),
        "info": dict(played.info),
        "failures": played.num_failures,
    }


def with_trainer_log_probs(line: Mapping[str, Any], log_probs: Sequence[npt.NDArray[np.float32]]) -> dict[str, Any]:
    """The line of a sample, with the trainer's old log-probs of the same tokens.

    `log_probs`: of all tokens of the response, or of those behind the prompt of each branch; empty: it was not trained on.
    """
    if not log_probs:
        return dict(line)
    if "branches" not in line:
        return {**line, "trainer_log_probs": rounded(log_probs[0][:MAX_LOGGED_TOKENS])}
    pairs = zip(line["branches"], log_probs, strict=bool(line["branches"]))  # a sample without tokens stands for none
    return {**line, "branches": [_with_log_probs(pieces, of_branch) for pieces, of_branch in pairs]}


def _with_log_probs(pieces: Sequence[Mapping[str, Any]], log_probs: npt.NDArray[np.float32]) -> list[dict[str, Any]]:
    """The first piece is the prompt, which has no log-probs."""
    made, begin = list[dict[str, Any]](), -int(pieces[0]["tokens"])
    for piece in pieces:
        own = log_probs[max(begin, 0) :][: len(piece.get("token_texts", ()))]
        made.append({**piece, "trainer_log_probs": rounded(own)} if len(own) else dict(piece))
        begin += int(piece["tokens"])
    return made


def pieces(prompts: Prompts, branch: Branch, *, with_tokens: bool = False) -> list[dict[str, Any]]:
    """Runs of sampled and of given tokens in turns, special tokens shown."""
    cuts = [0, *(np.flatnonzero(np.diff(branch.is_sampled)) + 1).tolist(), len(branch.token_ids)]
    made, logged = list[dict[str, Any]](), 0
    for begin, end in pairwise(cuts):
        ids, is_sampled = branch.token_ids[begin:end], bool(branch.is_sampled[begin])
        text = prompts.detokenizer.text(ids.tolist()) if begin else prompts.detokenizer.whole(ids.tolist())
        piece = {"sampled": is_sampled, "text": text, "tokens": end - begin}
        if with_tokens and is_sampled and logged < MAX_LOGGED_TOKENS:
            piece |= _fields(prompts, ids, branch.log_probs[begin:end], branch.weight_versions[begin:end], logged)
            logged += end - begin
        made.append(piece)
    return made


def _fields(prompts: Prompts, token_ids: Any, log_probs: Any, weight_versions: Any, logged: int) -> dict[str, Any]:
    first = slice(MAX_LOGGED_TOKENS - logged)
    versions = groupby(weight_versions[first].tolist())
    return {
        "token_texts": prompts.token_texts(token_ids[first].tolist()),
        "rollout_log_probs": rounded(log_probs[first]),
        "version_runs": [[version, len(list(run))] for version, run in versions],
    }


def rounded(log_probs: npt.NDArray[np.float32]) -> list[float | None]:
    """To four decimals; None where it is no finite number, which JSON has not."""
    return [round(value, 4) if math.isfinite(value) else None for value in log_probs.tolist()]


def rows_of_first_members(groups: npt.NDArray[np.int64], members: npt.NDArray[np.int64], number: int) -> list[list[int]]:
    """Rows of a batch with the first member's samples, for each of the first `number` groups; a dropped episode has none.

    `groups`, `members`: of each sample, in order.
    """
    return [np.flatnonzero((groups == place) & (members == 0)).tolist() for place in range(number)]
