"""The requests of both rollout benches, and generators that take turns. Leaves out who generates (rollout.py)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import NormalDist
from typing import Any

from bench.config import BenchRoot
from bridge.generation import GenerationRequest
from megasync.models.folder import model_shape
from megasync.rollouts.requests import greedy_sampling, training_sampling

Tokens = Sequence[Sequence[int]]  # of each request's response
Generator = Callable[[], tuple[float, Tokens]]  # generates for all requests; the seconds that it took


def long_tail(number: int, median: float, longest: int, seed: int) -> list[int]:
    """`number` lengths from 1 to `longest` in any order: the quantiles of a lognormal around `median`, the last at `longest`.

    No numbers drawn at random: a small batch has the same tail as a large one.
    """
    assert 1 <= median <= longest
    ranks = [NormalDist().inv_cdf((place + 0.5) / number) for place in range(number)]
    width = math.log(longest / median) / ranks[-1] if ranks[-1] > 0 else 0.0
    lengths = [max(1, min(longest, round(median * math.exp(width * rank)))) for rank in ranks]
    random.Random(seed).shuffle(lengths)
    return lengths


def build_requests(config: BenchRoot, *, greedy: bool = False) -> list[GenerationRequest]:
    """One sample of each prompt; the same at every call. No end-of-sequence token ends a response before its length."""
    bench, rollout, draw = config.bench, config.rollout, random.Random(config.run.seed)
    vocabulary, longest = model_shape(config.model.path).vocab_size, rollout.max_new_tokens
    lengths = long_tail(bench.num_prompts, bench.median_tokens or longest, longest, config.run.seed)
    sampling = replace((greedy_sampling if greedy else training_sampling)(rollout), num_samples=1, stop=())
    return [
        GenerationRequest(
            tuple(draw.randrange(vocabulary) for _ in range(bench.prompt_tokens)),
            seed=number,
            **asdict(replace(sampling, max_new_tokens=length)),
        )
        for number, length in enumerate(lengths)
    ]


def take_turns(generators: Mapping[str, Generator], num_rounds: int) -> Iterator[tuple[list[dict[str, Any]], float]]:
    """After each round its figures by method, and the share of responses that are the same from all; the warm-up has none.

    The order changes from round to round, and while one generates the others are idle. Without generators nothing is done.
    """
    for number in range(-1, num_rounds):  # -1 warms up
        found: list[dict[str, Any]] = []
        tokens: list[Tokens] = []
        for method in list(generators)[:: -1 if number % 2 else 1]:
            seconds, responses = generators[method]()
            count = sum(map(len, responses))
            tokens.append([list(response) for response in responses])
            found.append({"round": number, "method": method, "seconds": seconds, "tokens": count, "samples": len(responses)})
            print(f"round {number + 1} of {num_rounds}  {method:<8}{count / seconds:.1f} tokens/s", flush=True)
        same = [all(other == first for other in others) for first, *others in zip(*tokens, strict=True)]
        yield (found if number >= 0 else []), sum(same) / max(1, len(same))
