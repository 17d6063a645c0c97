"""SupervisedSession: a run that trains on given answers; its batches, held-out metrics and logged samples.

Leaves out what every run has (session.py) and the steps (loop.py).

held_out_metrics(engine, prompts.supervised_batch(examples))    # {"eval/loss": 0.7, "eval/perplexity": 2.0, "eval/accuracy": 0.1}
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from engine.engine import Engine
from engine.sample import Sample
from megasync.config.data_section import TRAIN_SET
from megasync.config.schema import Config
from megasync.data.data import Example
from megasync.data.load import RunData
from megasync.data.prompts import Prompts
from megasync.episodes.segments import Branch
from megasync.rollouts.evaluation import error_metric
from megasync.rollouts.progress import Progress
from megasync.rollouts.requests import pieces
from megasync.run.heartbeat import Heartbeat
from megasync.run.session import ExitCallbacks, Session

MAX_EXPONENT = 700.0  # of a float64


class SupervisedSession(Session):
    """Every rank has the data."""

    def __init__(self, config: Config, data: RunData, heartbeat: Heartbeat, ends: ExitCallbacks) -> None:
        super().__init__(config, data, heartbeat, ends)
        self.data, self.order = data, data.order(config)

    def batch(self, step: int) -> list[Sample]:
        """The examples of a step, the same on every rank. Not collective."""
        size = self.config.data.batch_size
        first = self._num_trained(step)
        examples = [self.data.train[self.order.index(ordinal)] for ordinal in range(first, first + size)]
        if step == self.first_step:
            lines = list(sample_lines(self.data.prompts, examples[: self.config.run.log_samples]))
            self.log.samples(step + 1, lines)
        return self.data.prompts.supervised_batch(examples)

    def _num_trained(self, step: int) -> int:
        """Prompts before `step`."""
        return self.first_progress.num_trained + (step - self.first_step) * self.config.data.batch_size

    def progress(self) -> Progress:
        return Progress(self._num_trained(self.step + 1), order=self.order)

    def find_metrics(self, step: int) -> dict[str, float]:
        return held_out_metrics(self.engine, self.data.prompts.supervised_batch(self.data.held_out))


def held_out_metrics(engine: Engine, samples: Sequence[Sample]) -> dict[str, float]:
    """Loss and perplexity a trained token, and the share of examples whose trained tokens greedy decoding gives.

    Collective. `samples`: those of one example share their `group`.
    """
    found = engine.held_out(samples)
    num_tokens = max(1, sum(each.num_tokens for each in found))
    loss = -sum(each.log_prob for each in found) / num_tokens
    missed = {sample.group for sample, each in zip(samples, found, strict=True) if not each.is_match}
    groups = {sample.group for sample in samples}
    matches = [float(group not in missed) for group in groups]
    residuals = dict.fromkeys(groups, 0.0)  # of a ratio of sums over examples (Cochran, Sampling Techniques, chapter 6)
    for sample, each in zip(samples, found, strict=True):
        residuals[sample.group] -= (each.log_prob + loss * each.num_tokens) * len(groups) / num_tokens
    own = {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, MAX_EXPONENT)), "eval/accuracy": sum(matches) / len(matches)}
    return own | error_metric("eval/accuracy_error", matches) | error_metric("eval/loss_error", list(residuals.values()))


def sample_lines(prompts: Prompts, examples: Sequence[Example]) -> Iterator[dict[str, Any]]:
    """Lines of samples.jsonl without their step: each example's sequences in pieces; those marked sampled are trained."""
    for example in examples:
        samples = prompts.samples(example)
        turns = sum(max(1, int((np.diff(sample.is_sampled.astype(int), prepend=0) == 1).sum())) for sample in samples)
        yield {
            "set": TRAIN_SET,
            "line": example.line,
            "prompt": prompts.prompt_text(example),
            "answer": example.answer,
            "tokens": sum(sample.num_sampled for sample in samples),
            "turns": turns,
            "branches": [pieces(prompts, _branch(sample)) for sample in samples],
        }


def _branch(sample: Sample) -> Branch:
    size, num_prompt = sample.num_tokens, len(sample.prompt_ids)
    ids = np.concatenate([sample.prompt_ids, sample.response_ids])
    own = sample.is_sampled if len(sample.is_sampled) else np.ones(len(sample.response_ids), np.bool_)
    is_trained = np.concatenate([np.zeros(num_prompt, np.bool_), own])
    return Branch(ids, num_prompt, is_trained, np.zeros(size, np.float32), np.zeros(size, np.int32))
