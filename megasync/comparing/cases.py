"""A module that is wrong, what is known besides, and guesses of what it computed instead.

See kinds.py, which makes and tries guesses; linear_kinds.py makes those for linears.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from megasync.comparing.judge import by_bound
from megasync.comparing.reference import Reference, Side
from megasync.comparing.shape import Parameters, layer_of

WRONG_WEIGHTS, STALE_LAYER, STALE_KV = "wrong weights", "stale layer", "stale KV"
Adapter = dict[str, tuple[torch.Tensor, torch.Tensor, float]]  # A, B and the scale of each linear


class Kind(NamedTuple):
    name: str
    detail: str


class Guess(NamedTuple):
    name: str
    detail: str
    value: torch.Tensor  # what the module would have given


@dataclass(frozen=True)
class Known:
    """What guesses may be made of. `formers`: parameters of other versions by what they are called."""

    adapter: Adapter = field(default_factory=dict)
    formers: dict[str, Parameters] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    site: str
    reference: Reference
    side: Side
    known: Known
    out: torch.Tensor  # float64
    expected: torch.Tensor
    bound: torch.Tensor

    @property
    def error(self) -> torch.Tensor:
        return self.out - self.expected

    @cached_property
    def wrong(self) -> torch.Tensor:
        """Elements that are no rounding."""
        return by_bound(self.out, self.expected, self.bound) > 1

    @cached_property
    def where(self) -> torch.Tensor:
        """All elements of the rows and of the columns in which one is wrong."""
        wrong = self.wrong.reshape(len(self.wrong), -1)
        return (wrong.any(0) & wrong.any(1, keepdim=True)).view_as(self.wrong)

    def of(self, parameters: Parameters) -> torch.Tensor:
        """What these parameters would have given."""
        return Reference(self.reference.shape, parameters, self.reference.temperature).expected(self.site, self.side).value


def other_weights(case: Case) -> Iterator[Guess]:
    """Those of other versions, and of other layers."""
    for name, parameters in case.known.formers.items():
        yield Guess(WRONG_WEIGHTS, f"those of {name}", case.of(parameters))
    own, parameters = layer_of(case.site), case.reference.parameters
    for layer in range(case.reference.shape.num_layers if own is not None else 0):
        if layer != own:
            yield Guess("wrong layer", f"it has the weights of model.layers.{layer}", case.of(parameters.as_if_all_were(layer)))
