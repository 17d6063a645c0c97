"""Lengths of responses with a long tail, as reasoning models have them. Pure functions."""

from __future__ import annotations

import math
import random
from statistics import NormalDist


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
