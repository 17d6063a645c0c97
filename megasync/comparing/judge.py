"""Each module of both sides against its reference, and the sides against each other: where it first goes wrong, and how it grows.

    found = judge(shape.sites, {"trainer": (reference, side), "replica": (reference, side)})
    found.culprit        # the first that is off by more than rounding: its side, token and element; None: rounding alone

Leaves out why (kinds.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megasync.comparing.formulas import UNIT_FLOAT32
from megasync.comparing.reference import SUM_ROUNDINGS, Reference, Side, sources

DEVIATIONS = 8.0  # from the mean
TOGETHER = 8.0  # of the rms of what two passes differ by: as much as a bound of one element has at least
ROWS = 64  # of the output layer at a time: its float64 logits are large


@dataclass(frozen=True)
class Local:
    """One module of one side against its reference. `ratio`: the largest error by its bound, or that of all elements together;
    above 1 it is no rounding. `num_uncalled`: see the function; unless it is 0 `value` and `expected` are NaN.
    """

    site: str
    side: str
    ratio: float
    position: int  # of the token of that element
    element: tuple[int, ...]
    value: float
    expected: float
    relative_error: float  # rms of the error by rms of what is expected
    num_uncalled: int = 0

    @property
    def is_wrong(self) -> bool:
        return not self.ratio <= 1


@dataclass(frozen=True)
class Difference:
    """Between both sides, of the positions that both have."""

    site: str
    largest: float
    position: int
    element: tuple[int, ...]
    relative: float  # rms of the difference by that of the trainer's


@dataclass(frozen=True)
class Judgement:
    """`locals`: in order, the trainer's before the replica's."""

    locals: list[Local]
    differences: list[Difference]

    @property
    def wrong(self) -> list[Local]:
        return [each for each in self.locals if each.is_wrong]

    @property
    def culprit(self) -> Local | None:
        return next(iter(self.wrong), None)


def judge(sites: Sequence[str], sides: Mapping[str, tuple[Reference, Side]]) -> Judgement:
    """Of both sides `trainer` and `replica`, or of one alone. Those after a module that was not called are left out."""
    found = [local_error(site, *sides[name]) for site in sites for name in sides if _can_be_judged(site, *sides[name])]
    both = [side for _, side in sides.values()]
    common = [site for site in sites if not any(num_uncalled(site, side) for side in both)]
    return Judgement(found, [difference(site, both[0], both[1]) for site in common] if len(both) > 1 else [])


def _can_be_judged(site: str, reference: Reference, side: Side) -> bool:
    """Not where a module before it was not called: what this one should have given is not known then."""
    return not any(num_uncalled(source, side) for source in sources(site, reference.shape))


def num_uncalled(site: str, side: Side) -> int:
    """Tokens that it should have been called with and was not; below 0 where it was called again."""
    num_rows = len(side.positions)
    if site in ("lm_head", "log_probs"):
        num_rows -= side.num_prompt - 1 - int(side.positions[0])
    return num_rows - (len(side[site]) if site in side.tensors else 0)


def local_error(site: str, reference: Reference, side: Side) -> Local:
    """Of the output layer some rows at a time."""
    if missing := num_uncalled(site, side):
        return Local(site, side.name, math.inf, int(side.positions[0]), (), math.nan, math.nan, math.nan, missing)
    if site != "lm_head":
        return _local(site, reference, side, 0)
    starts = range(0, len(side["lm_head"]), ROWS)
    parts = [_local(site, reference, side.cut(slice(start, start + ROWS)), start) for start in starts]
    return max(parts, key=lambda part: part.ratio if part.ratio == part.ratio else torch.inf)


def _local(site: str, reference: Reference, side: Side, first_row: int) -> Local:
    value, bound = reference.expected(site, side)
    out = side.double(site).to(value)
    error = (out - value).abs()
    ratios = by_bound(out, value, bound)
    drift = 0.0
    if site.endswith("norm"):
        drift = systematic(out, [value, *reference.rounded_norms(site, side)], side[site].dtype, side.token_ids[side.positions])
    if site.endswith("self_attn.attn") and side.other_earlier:
        drift = beyond_passes(site, reference, side)
    row, *element = _place(ratios)
    scale = value.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    return Local(
        site=site,
        side=side.name,
        ratio=max(float(ratios.max()), drift),
        position=_position(side, site, row + first_row),
        element=tuple(element),
        value=float(out[(row, *element)]),
        expected=float(value[(row, *element)]),
        relative_error=float(error.square().mean().sqrt() / scale),
    )


def by_bound(out: torch.Tensor, value: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Errors by their bounds: infinite where `out` alone is not finite; 0 where `value` is not, as of a module that got NaN, for
    nothing can be said there.
    """
    found = torch.nan_to_num((out - value).abs() / bound, nan=0.0)
    found = torch.where(out.isfinite(), found, torch.inf)
    return torch.where(value.isfinite(), found, 0.0)


def systematic(out: torch.Tensor, right: Sequence[torch.Tensor], dtype: torch.dtype, token_ids: torch.Tensor) -> float:
    """How far `out` is a multiple of what is expected, by what rounding may make of it, which over many elements averages out.

    So another eps of a norm is seen that is less than a rounding at every element. Rows of one token, `token_ids` [rows], may be
    alike, and so rounded alike: between them nothing averages out. Nor does it where the inverse of a row's rms is nearly a power
    of two: what is multiplied by 1.002 in bfloat16 mostly rounds back to what it was. So `right` is what is expected, and after
    it what that rounds to, which a norm that is right gives but for a few elements. The nearest counts.
    """
    value = right[0]
    power = value.square().sum().clamp_min(torch.finfo(torch.float32).tiny)
    squares = value.square().flatten(1)
    tokens, of_row = torch.unique(token_ids, return_inverse=True)
    alike = squares.new_zeros(len(tokens), squares.shape[1]).index_add_(0, of_row, squares)
    deviation = torch.finfo(dtype).eps / 2 / math.sqrt(3) * alike.square().sum().sqrt() / power  # of the mean of such roundings
    factors = [DEVIATIONS, *[1.0] * (len(right) - 1)]
    return min(
        float(slope(out, each).abs() / (factor * deviation + SUM_ROUNDINGS * UNIT_FLOAT32))
        for each, factor in zip(right, factors, strict=True)
    )


def beyond_passes(site: str, reference: Reference, side: Side) -> float:
    """Attention after a cached prefix: the error of all elements together by what it would be had the other side's keys and
    values been in the cache, which are rounded otherwise, too. The bound of one element allows for the worst in all of them.
    """
    own = replace(side, apart={})
    value, bound = reference.expected(site, own)
    other = reference.expected(site, replace(own, earlier=side.other_earlier)).value
    allowed = TOGETHER * rms(other - value) + rms(bound.expand_as(value))
    return rms(side.double(site) - value) / allowed


def rms(tensor: torch.Tensor) -> float:
    return float(tensor.square().mean().sqrt())


def slope(out: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """By how much the best multiple of `value` exceeds it."""
    return ((out - value) * value).sum() / value.square().sum().clamp_min(torch.finfo(torch.float32).tiny)


def difference(site: str, own: Side, other: Side) -> Difference:
    first, a = _common(site, own, other)
    b = _common(site, other, own)[1]
    apart = (a - b.to(a)).abs()
    row, *element = _place(torch.nan_to_num(apart, nan=torch.inf))
    scale = a.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    relative = float(apart.square().mean().sqrt() / scale)
    return Difference(site, float(apart[(row, *element)]), first + row, tuple(element), relative)


def _common(site: str, own: Side, other: Side) -> tuple[int, torch.Tensor]:
    """The first position that both have, and the rows from there on; float32 of the logits, which are large."""
    dtype = torch.float32 if site == "lm_head" else torch.float64
    if site in ("lm_head", "log_probs"):
        return own.num_prompt - 1, own[site].to(dtype)
    first = max(int(own.positions[0]), int(other.positions[0]))
    return first, own[site][first - int(own.positions[0]) :].to(dtype)


def _position(side: Side, site: str, row: int) -> int:
    """The token that the row is computed of."""
    return side.num_prompt - 1 + row if site in ("lm_head", "log_probs") else int(side.positions[row])


def _place(values: torch.Tensor) -> tuple[int, ...]:
    """Of the largest."""
    return tuple(int(index) for index in torch.unravel_index(values.argmax(), values.shape))
