"""The response that both sides compute: one of samples.jsonl, as tokens, or one that a replica generates.

    response = recorded(run_folder, prompts, step=None, index=0)     # None where there is none

A line holds texts, which are tokenised again; its log-probs count where the result is the sampled tokens. Leaves out episodes, of
whose responses the lines hold pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.generation import GenerationRequest
from megasync.config.errors import ConfigError, refuse_if
from megasync.config.schema import Config
from megasync.report.log import read_samples

if TYPE_CHECKING:
    from bridge.replicas.pool import ReplicaPool
    from megasync.data.prompts import Prompts

NEW_PROMPT, NEW_TOKENS = "The quick brown fox jumps over the lazy dog.", 64


@dataclass(frozen=True)
class Response:
    """`rollout`, `trainer`: logged log-probs of the response's tokens, None where they are unknown."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    description: str
    rollout: list[float | None] | None = None
    trainer: list[float | None] | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.prompt_ids, *self.token_ids)


def recorded(run: Path, prompts: Prompts, step: int | None, index: int | None) -> Response | None:
    """The `index`-th response that was sampled with the weights after `step` steps; else of that step; else the last.

    Raises:
        ConfigError: there is no such index.
    """
    lines = [line for line in read_samples(run) if line.get("tokens") and "branches" not in line]
    of_step = [line for line in lines if line.get("versions") == [step, step]]
    found = of_step or [line for line in lines if line["step"] == step] or lines[-1:]
    if index is not None and not 0 <= index < len(found):
        remedy = "write --prompt with one of these, or leave it out" if found else "leave --prompt out: one is generated"
        there = f"0 to {len(found) - 1}" if found else "none"
        raise ConfigError(f"--prompt {index}: samples.jsonl has no such response", there=there, remedy=remedy)
    return _of_line(found[index or 0], prompts, step) if found else None


def check_length(response: Response, config: Config) -> None:
    """ConfigError where the replica does not take so many tokens."""
    length, limit = len(response.ids), config.rollout.max_model_len
    refuse_if(
        limit is not None and length > limit,
        f"{response.description}: with its prompt {length} tokens, more than rollout.max_model_len = {limit}",
        remedy=f"write rollout.max_model_len={length}, or --prompt with another one",
    )


def _of_line(line: dict[str, Any], prompts: Prompts, step: int | None) -> Response | None:
    texts: Sequence[str] = line.get("token_texts", ())
    prompt = prompts.tokenizer.encode(line["prompt"], add_special_tokens=False)
    whole = prompts.encoder.continuing.encode("".join(texts) or line["response"], add_special_tokens=False).ids
    is_same = bool(texts) and prompts.token_texts(whole) == list(texts)
    description = f"line {line['line']} of step {line['step']}, {len(whole)} tokens, sampled by versions {line['versions']}"
    known = is_same and (step is None or line["versions"] == [step, step])
    log_probs = (line.get("rollout_log_probs"), line.get("trainer_log_probs")) if known else (None, None)
    return Response(tuple(prompt), tuple(whole), description, *log_probs) if prompt and whole else None


def generated(pool: ReplicaPool, prompts: Prompts, config: Config) -> Response:
    """A replica's response at the run's temperature; of a prompt that is longer than the replica takes, the beginning."""
    ids = tuple(prompts.tokenizer.encode(NEW_PROMPT, add_special_tokens=False))
    most, limit = min(NEW_TOKENS, config.rollout.max_new_tokens), config.rollout.max_model_len
    ids = ids if limit is None else ids[: max(1, limit - most)]
    request = GenerationRequest(prompt_ids=ids, max_new_tokens=most, temperature=config.rollout.temperature)
    ((completion,),) = pool.generate([request]).result()
    tokens = tuple(int(token) for token in completion.token_ids)
    return Response(ids, tokens, f"{len(tokens)} tokens, generated for this comparison", rollout=completion.log_probs.tolist())
