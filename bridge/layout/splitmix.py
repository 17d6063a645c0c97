"""SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): pseudo-random 64-bit numbers that depend on no library's generator. No torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

GAMMA = 0x9E3779B97F4A7C15  # odd; 2**64 over the golden ratio
FOLD_FACTOR = 0x5BD1E995  # of the digest: odd, so that a word's two halves count with different numbers

Words = npt.NDArray[np.uint64]


def splitmix64(counter: Words) -> Words:
    """Output number `counter` of the generator with seed 0, for each counter."""
    return mix64((counter + np.uint64(1)) * np.uint64(GAMMA))


def mix64(words: Words) -> Words:
    """The generator's output for each state; one to one."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
