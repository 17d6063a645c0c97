"""What samples.jsonl keeps token by token: of a response, and of an episode's turns. No torch in here.

The trainer's log-probs of the same tokens are added once the batch was trained on. Leaves out the rest of a line (requests.py).

    line = sample_line(...) | token_fields(prompts, completion)
    with_trainer_log_probs(line, [log_probs])      # one array a response, or a branch of an episode
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megasync.episodes.task import Played

if TYPE_CHECKING:
    from bridge.generation import Completion
    from megasync.data.prompts import Prompts
    from megasync.episodes.segments import Branch

MAX_LOGGED_TOKENS = 1024  # of a response, or a branch; what there is of each token is left out after these


def token_fields(prompts: Prompts, done: Completion | Played) -> dict[str, Any]:
    """Of the first MAX_LOGGED_TOKENS tokens of a response, and of the sampled pieces of an episode's branches.

    Their texts, special tokens included; vLLM's log-probs; and their versions as runs, [version, number of tokens] each.
    """
    if isinstance(done, Played):
        return {"branches": [_pieces(prompts, branch, with_tokens=True) for branch in done.branches]}
    return _fields(prompts, done.token_ids, done.log_probs, done.weight_versions, 0)


def episode_line(prompts: Prompts, played: Played, *, answer: str, reward: float) -> dict[str, Any]:
    """With its branches as pieces of text, each sampled or given; the response is what follows the first branch's prompt."""
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
        "branches": [_pieces(prompts, branch) for branch in played.branches],
        "metrics": dict(played.metrics),
        "info": dict(played.info),
        "failures": played.num_failures,
    }


def with_trainer_log_probs(line: Mapping[str, Any], log_probs: Sequence[npt.NDArray[np.float32]]) -> dict[str, Any]:
    """The line of a sample that was trained on, with the trainer's old log-probs of the same tokens.

    `log_probs`: of all tokens of the response, or of those behind the prompt of each branch.
    """
    if "branches" not in line:
        return {**line, "trainer_log_probs": rounded(log_probs[0][:MAX_LOGGED_TOKENS])}
    pairs = zip(line["branches"], log_probs, strict=bool(line["branches"]))  # a sample without tokens stands for none
    return {**line, "branches": [_told(pieces, of_branch) for pieces, of_branch in pairs]}


def _told(pieces: Sequence[Mapping[str, Any]], log_probs: npt.NDArray[np.float32]) -> list[dict[str, Any]]:
    """The first piece is the prompt, which has no log-probs."""
    made, begin = list[dict[str, Any]](), -int(pieces[0]["tokens"])
    for piece in pieces:
        own = log_probs[max(begin, 0) :][: len(piece.get("token_texts", ()))]
        made.append({**piece, "trainer_log_probs": rounded(own)} if len(own) else dict(piece))
        begin += int(piece["tokens"])
    return made


def _pieces(prompts: Prompts, branch: Branch, *, with_tokens: bool = False) -> list[dict[str, Any]]:
    """Runs of sampled and of given tokens in turns, special tokens shown."""
    cuts = [0, *(np.flatnonzero(np.diff(branch.is_sampled)) + 1).tolist(), len(branch.token_ids)]
    made, logged = list[dict[str, Any]](), 0
    for begin, end in pairwise(cuts):
        ids, is_sampled = branch.token_ids[begin:end], bool(branch.is_sampled[begin])
        piece = {"sampled": is_sampled, "text": prompts.tokenizer.decode(ids.tolist()), "tokens": end - begin}
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
    """Where in a batch the samples of the first member of each of the first `number` groups are; a dropped episode has none.

    `groups`, `members`: of each sample, in order.
    """
    return [np.flatnonzero((groups == place) & (members == 0)).tolist() for place in range(number)]
