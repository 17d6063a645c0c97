"""Seconds of a replica's steps on CPUs: products are timed on this machine; attention, sampling and layers go by measured.json.

Leaves out how many steps there are, and of how many samples each (lengths.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.config import DTYPE_BYTES
from megasync.config.schema import Config
from megasync.planning.cpu.passes import host_share
from megasync.planning.cpu.together import seconds_of
from megasync.planning.hardware import seconds
from megasync.planning.meta.operations import Operation, Shape
from megasync.planning.model_costs import ModelCosts

PREFILLED_ROWS = 256  # tokens of prompts that a step of a replica is taken to have
READ_BYTES = 2**28  # of weights whose product is timed, more than any cache holds


class CpuDecoding:
    """Of a model with so many weights in all, which come from memory where they are more than caches hold."""

    def __init__(
        self,
        num_weights: float,
        size: int,
        dtype: str,
        *,
        num_layers: int,
        vocabulary: float,
        attention: float,
        most_rows: int,
        num_processes: int,
    ) -> None:
        """`size`: of a token's vector; `attention`: multiplications of a token with what it attends to, in all layers."""
        self._rows = [2**power for power in range(max(1, (most_rows - 1).bit_length()) + 1)]
        taken = _products([*self._rows, PREFILLED_ROWS], num_weights, size, dtype, num_processes)
        self._prefill = taken.pop() / PREFILLED_ROWS
        if DTYPE_BYTES[dtype] < 4:  # one row waits for memory, of which it reads half as much
            taken[0] = min(taken[0], _products([1], num_weights, size, "float32", num_processes)[0] / 2)
        self._products = least_convex(self._rows, taken)
        self._host = host_share(num_processes)
        self._layers = num_layers * seconds("decode_layer_cpu")
        per_product = seconds("decode_attention_cpu" if DTYPE_BYTES[dtype] == 4 else "decode_attention_cpu_16")
        self._sequence = seconds("decode_sequence_cpu") + vocabulary * seconds("sampled_id_cpu") + attention * per_product

    @staticmethod
    def of(config: Config, model: ModelCosts, context: float, most_rows: int, num_processes: int) -> CpuDecoding:
        """`context`: tokens that one attends to, mean."""
        return CpuDecoding(
            model.layers + model.output,
            model.hidden_size,
            config.model.dtype,
            num_layers=model.num_layers,
            vocabulary=model.output / model.hidden_size,
            attention=model.attention_of_token(context),
            most_rows=most_rows,
            num_processes=num_processes,
        )

    def step(self, running: int) -> float:
        """In which each of so many samples gets a token."""
        products = float(np.interp(running, self._rows, self._products))
        return products + self._host * (self._layers + running * self._sequence)

    def prefill(self, tokens: float, samples: float) -> float:
        """Of so many tokens of prompts, and what else so many samples take to begin and to end."""
        return self._prefill * tokens + self._host * samples * seconds("sample_cpu")

    def is_bound_by_host(self, running: int) -> bool:
        return False


def _products(rows: Sequence[int], num_weights: float, size: int, dtype: str, num_processes: int) -> list[float]:
    """Seconds of so many rows with all weights, as torch takes them."""
    numbers = getattr(torch, dtype)
    columns = max(1, round(min(num_weights, READ_BYTES / numbers.itemsize) / size))
    weights = Shape((size, columns), (1, size), numbers)
    asked = [Operation("mm", (Shape((each, size), (size, 1), numbers), weights), 0) for each in rows]
    found = seconds_of(asked, num_processes)
    return [found[each] * num_weights / (size * columns) for each in asked]


def least_convex(places: Sequence[float], values: Sequence[float]) -> list[float]:
    """Of each place the least that a line between two points has there: torch takes longer for 4 rows than for 16, vLLM, whose
    weights oneDNN has packed, does not.
    """
    points = [*zip(places, values, strict=True)]
    return [
        min(
            value + (after - value) * (here - place) / (beyond - place) if beyond > place else value
            for place, value in points
            for beyond, after in points
            if place <= here <= beyond
        )
        for here in places
    ]
