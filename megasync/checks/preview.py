"""The preview of `--check`: rendered prompts, the tokens that end a response, and the rewards of the data's own answers.

    print(preview(config, data))

Leaves out the run's summary (banner.py). No torch in here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from megasync.checks.own_answers import reward_input, score_own_answers, try_judges
from megasync.config.schema import Config
from megasync.data.data import Example
from megasync.data.load import RunData
from megasync.data.prompts import Prompts
from megasync.rewards.answers.read import after_thinking, opens_thinking
from megasync.rewards.failures import shown

NUM_PROMPTS = 5


def preview(config: Config, data: RunData) -> str:
    """Several lines. ConfigError where a reward fails on an answer of the data."""
    prompts, order = data.prompts, data.order(config)
    examples = [data.train[order.index(ordinal)] for ordinal in range(min(NUM_PROMPTS, len(data.train)))]
    is_sft = config.algorithm.name == "sft"
    described = [_trained(prompts, each) if is_sft else _prompt(config, prompts, each) for each in examples]
    lines = [f"the first {len(examples)} {'samples' if is_sft else 'prompts'}, added tokens between \u00ab and \u00bb:"]
    lines += [f"  data {example.place}: {line}" for example, line in zip(examples, described, strict=True)]
    lines.append(f"a response ends with {_ends(config, prompts)}")
    if is_sft:
        lines += _open_thinking(prompts, examples)
    else:
        lines += [line for scores in score_own_answers(config, data) for line in scores.lines()]
        lines += try_judges(config, data)
    return "\n".join(lines)


def _prompt(config: Config, prompts: Prompts, example: Example) -> str:
    """The rendered prompt, and the reference answer as the reward sees it."""
    ids, own = prompts.prompt_ids(example), config.rollout
    seen = reward_input(example, prompts, own.stop, own.max_new_tokens).response
    answer = f"answer {shown(example.answer)}, the reward sees {shown(seen)}"
    return f"{shown(marked(prompts, ids))} ({len(ids)} tokens; {answer})"


def _open_thinking(prompts: Prompts, examples: Sequence[Example]) -> list[str]:
    """A line where an answer is trained within the thinking that its prompt begins."""
    for example in examples:
        for sample in prompts.samples(example):
            prompt, answer = (prompts.detokenizer.whole(ids.tolist()) for ids in (sample.prompt_ids, sample.response_ids))
            if opens_thinking(prompt) and after_thinking(answer, in_thinking=True) is None:
                return [f"data {example.place}: the prompt begins the thinking, and the answer does not end it"]
    return []


def _trained(prompts: Prompts, example: Example) -> str:
    """Each sample of the example, its trained runs of tokens apart from the others."""
    described = []
    for sample in prompts.samples(example):
        is_trained = sample.is_sampled if len(sample.is_sampled) else np.ones(len(sample.response_ids), np.bool_)
        cuts = [0, *(np.flatnonzero(np.diff(is_trained)) + 1).tolist(), len(is_trained)]
        runs = [
            f"{'trained' if is_trained[begin] else 'given'} {shown(marked(prompts, sample.response_ids[begin:end].tolist()))}"
            for begin, end in pairwise(cuts)
        ]
        described.append(f"given {shown(marked(prompts, sample.prompt_ids.tolist()))}, {', '.join(runs)}")
    return "; ".join(described)


def marked(prompts: Prompts, ids: Sequence[int]) -> str:
    """The text of token ids, each added token (special or not) between \u00ab and \u00bb."""
    added = prompts.tokenizer.added_tokens_decoder
    texts = prompts.token_texts(list(ids))
    return "".join(f"\u00ab{text}\u00bb" if token in added else text for token, text in zip(ids, texts, strict=True))


def _ends(config: Config, prompts: Prompts) -> str:
    ids = prompts.stop_token_ids
    tokens = ", ".join(f"{text} ({token})" for token, text in zip(ids, prompts.token_texts(ids), strict=True))
    texts = ", ".join(map(repr, config.rollout.stop)) if config.algorithm.name == "grpo" else ""
    return f"the token {tokens}" + (f", or the text {texts}" if texts else "")
