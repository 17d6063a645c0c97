"""Each module of both sides against its reference, and the sides against each other: the first fault, and how it grows.

    found = judge(sites, [(reference, trainer), (reference, replica)])
    found.culprit        # the first beyond the bound of rounding: its side, token and element; None: rounding alone

Leaves out what a module should give, and the bounds (reference.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megasync.tools.bisect.reference import SUM_ROUNDINGS, UNIT_FLOAT32, Reference
from megasync.tools.bisect.side import Side
from megasync.tools.bisect.sites import Operation, Site

DEVIATIONS = 8.0  # from the mean
TOGETHER = 8.0  # of the rms of the difference between two passes: as much as a bound of one element has at least
ROWS = 64  # of the output layer at a time: its float64 logits are large
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Local:
    """One module of one side against its reference. `ratio`: the largest error by its bound, or that of all elements together;
    above 1 it is no rounding. `num_uncalled`: see the function; unless it is 0 `value` and `expected` are NaN.
    """

    site: str
    side: str
    operation: str
    ratio: float
    position: int  # of the token of the element with the largest error by its bound
    element: tuple[int, ...]
    value: float
    expected: float
    relative_error: float  # rms of the error by rms of the expected values
    wrong_tokens: int = 0  # with an element beyond its bound
    first_wrong: int = -1  # the position of the first of them; -1: none
    wrong_elements: int = 0  # of a token's, beyond their bounds at any token
    num_uncalled: int = 0

    @property
    def is_wrong(self) -> bool:
        return not self.ratio <= 1


@dataclass(frozen=True)
class Difference:
    """Between two sides, over the positions that both have."""

    site: str
    largest: float
    position: int
    element: tuple[int, ...]
    relative: float  # rms of the difference by that of the first side's values


@dataclass(frozen=True)
class Judgement:
    """`locals`: by site in order, then by side. `differences`: between the first two sides."""

    locals: list[Local]
    differences: list[Difference]

    @property
    def wrong(self) -> list[Local]:
        return [each for each in self.locals if each.is_wrong]

    @property
    def culprit(self) -> Local | None:
        return next(iter(self.wrong), None)


def judge(sites: Sequence[Site], sides: Sequence[tuple[Reference, Side]]) -> Judgement:
    """Without the modules whose inputs come from one that was not called: their expected values are unknown."""
    found, differences = list[Local](), list[Difference]()
    for site in sites:
        found += [local_error(site, reference, side) for reference, side in sides if _has_inputs(site, reference, side)]
        first_two = [side for _, side in sides[:2]]
        if len(first_two) == 2 and not any(num_uncalled(site, side) for side in first_two):
            differences.append(difference(site, *first_two))
    return Judgement(found, differences)


def _has_inputs(site: Site, reference: Reference, side: Side) -> bool:
    return not any(num_uncalled(reference.sites[name], side) for name in site.inputs)


def num_uncalled(site: Site, side: Side) -> int:
    """Tokens that the module should have been called with and was not; below 0 where it was called twice."""
    num_rows = len(side.positions)
    if site.is_of_response:
        num_rows -= side.num_prompt - 1 - int(side.positions[0])
    return num_rows - (len(side[site.name]) if site.name in side.tensors else 0)


def local_error(site: Site, reference: Reference, side: Side) -> Local:
    """A module's error on one side; that of the output layer is computed some rows at a time."""
    if missing := num_uncalled(site, side):
        unknown = math.nan, math.nan, math.nan
        first = int(side.positions[0])
        return Local(site.name, side.name, site.operation, math.inf, first, (), *unknown, num_uncalled=missing)
    if site.name != "lm_head":
        return _local(site, reference, side, 0)
    starts = range(0, len(side["lm_head"]), ROWS)
    parts = [_local(site, reference, side.rows(slice(start, start + ROWS)), start) for start in starts]
    worst = max(parts, key=lambda part: part.ratio if part.ratio == part.ratio else torch.inf)
    first_wrong = next((part.first_wrong for part in parts if part.wrong_tokens), -1)
    return replace(worst, wrong_tokens=sum(part.wrong_tokens for part in parts), first_wrong=first_wrong)


def _local(site: Site, reference: Reference, side: Side, first_row: int) -> Local:
    value, bound = reference.expected(site, side)
    out = side.double(site.name).to(value)
    error = (out - value).abs()
    ratios = by_bound(out, value, bound)
    wrong = (ratios > 1).reshape(len(ratios), -1)
    wrong_rows = wrong.any(1).nonzero().flatten().tolist()
    row, *element = _place(ratios)
    return Local(
        site=site.name,
        side=side.name,
        operation=site.operation,
        ratio=max(float(ratios.max()), _over_all(site, reference, side, out, value)),
        position=_position(site, side, row + first_row),
        element=tuple(element),
        value=float(out[(row, *element)]),
        expected=float(value[(row, *element)]),
        relative_error=float(error.square().mean().sqrt() / value.square().mean().sqrt().clamp_min(TINY)),
        wrong_tokens=len(wrong_rows),
        first_wrong=_position(site, side, wrong_rows[0] + first_row) if wrong_rows else -1,
        wrong_elements=int(wrong.any(0).sum()),
    )


def by_bound(out: torch.Tensor, value: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Errors by their bounds: infinite where `out` alone is not finite; 0 where `value` is not, as of a module that got NaN, for
    nothing can be said there.
    """
    found = torch.nan_to_num((out - value).abs() / bound, nan=0.0)
    found = torch.where(out.isfinite(), found, torch.inf)
    return torch.where(value.isfinite(), found, 0.0)


def _over_all(site: Site, reference: Reference, side: Side, out: torch.Tensor, value: torch.Tensor) -> float:
    """The error of all elements together by its bound, of the operations that have such a bound."""
    if site.operation == Operation.NORM:
        right = [value, *reference.rounded_norms(site, side)]
        return systematic(out, right, side[site.name].dtype, side.token_ids[side.positions])
    if site.operation == Operation.ATTENTION and side.other_earlier:
        return beyond_passes(site, reference, side)
    return 0.0


def systematic(out: torch.Tensor, right: Sequence[torch.Tensor], dtype: torch.dtype, token_ids: torch.Tensor) -> float:
    """How far `out` is a multiple of the expected values, by what rounding may make of it, which over many elements averages out.

    So another eps of a norm is seen that is less than a rounding at every element. Rows of one token, `token_ids` [rows], may be
    alike, and so rounded alike: between them nothing averages out. Nor does it where the inverse of a row's rms is nearly a power
    of two: a bfloat16 value times 1.002 mostly rounds back to itself. So `right` holds the expected values, and
    after them their roundings, which a right norm gives but for a few elements. The nearest counts.
    """
    value = right[0]
    power = value.square().sum().clamp_min(TINY)
    squares = value.square().flatten(1)
    tokens, of_row = torch.unique(token_ids, return_inverse=True)
    alike = squares.new_zeros(len(tokens), squares.shape[1]).index_add_(0, of_row, squares)
    deviation = torch.finfo(dtype).eps / 2 / math.sqrt(3) * alike.square().sum().sqrt() / power  # of the mean of such roundings
    factors = [DEVIATIONS, *[1.0] * (len(right) - 1)]
    return min(
        float(_slope(out, each).abs() / (factor * deviation + SUM_ROUNDINGS * UNIT_FLOAT32))
        for each, factor in zip(right, factors, strict=True)
    )


def _slope(out: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """a - 1, for the scale a with which a * value is closest to `out`."""
    return ((out - value) * value).sum() / value.square().sum().clamp_min(TINY)


def beyond_passes(site: Site, reference: Reference, side: Side) -> float:
    """Attention after a cached prefix: the error of all elements together by that of attention over the other side's cached keys
    and values, which are rounded differently, too. The bound of one element allows for the worst in all of them.
    """
    own = replace(side, spread={})
    value, bound = reference.expected(site, own)
    other = reference.expected(site, replace(own, earlier=side.other_earlier)).value
    allowed = TOGETHER * _rms(other - value) + _rms(bound.expand_as(value))
    return _rms(side.double(site.name) - value) / allowed


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.square().mean().sqrt())


def difference(site: Site, own: Side, other: Side) -> Difference:
    first, a = _common(site, own, other)
    b = _common(site, other, own)[1]
    apart = (a - b.to(a)).abs()
    row, *element = _place(torch.nan_to_num(apart, nan=torch.inf))
    relative = float(apart.square().mean().sqrt() / a.square().mean().sqrt().clamp_min(TINY))
    return Difference(site.name, float(apart[(row, *element)]), first + row, tuple(element), relative)


def _common(site: Site, own: Side, other: Side) -> tuple[int, torch.Tensor]:
    """The first position that both have, and the rows from there on; float32 of the logits, which are large."""
    dtype = torch.float32 if site.name == "lm_head" else torch.float64
    if site.is_of_response:
        return own.num_prompt - 1, own[site.name].to(dtype)
    first = max(int(own.positions[0]), int(other.positions[0]))
    return first, own[site.name][first - int(own.positions[0]) :].to(dtype)


def _position(site: Site, side: Side, row: int) -> int:
    """The position of the token that the row is computed from."""
    return side.num_prompt - 1 + row if site.is_of_response else int(side.positions[row])


def _place(values: torch.Tensor) -> tuple[int, ...]:
    """Index of the largest value."""
    return tuple(int(index) for index in torch.unravel_index(values.argmax(), values.shape))
