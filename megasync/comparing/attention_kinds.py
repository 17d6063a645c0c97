"""Guesses of what is wrong with attention, and with the rotary embedding before it.

See kinds.py. Pure functions of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from megasync.comparing import formulas
from megasync.comparing import reference as ref
from megasync.comparing.cases import Case, Guess
from megasync.comparing.judge import rms

FEW = 8  # rows that a search is made with
MOST_SHIFTED = 4096
SAME_THETA, SAME_FREQUENCY = 1e-3, 0.05


def rotary_guesses(case: Case) -> Iterator[Guess]:
    shape, positions = case.reference.shape, case.side.positions
    x = case.side.double(ref.rotary_input(case.site, shape))
    right = shape.frequencies.to(x)

    def turned(frequencies: torch.Tensor, scale: float = shape.rope_scale) -> torch.Tensor:
        return formulas.rotate(x, positions, frequencies, scale)

    yield Guess("wrong rope", "it is left out", x)
    if shape.rope_scale != 1:
        yield Guess("wrong rope", f"without the factor {shape.rope_scale:g} of cosine and sine", turned(right, 1.0))
    plain = _plain(shape.rope_theta, shape.head_size, x)
    if not torch.allclose(plain, right):
        for scale in {1.0, shape.rope_scale}:
            yield Guess("wrong rope", "the scaling of its frequencies is left out", turned(plain, scale))
    for size in (shape.head_size // 4, shape.head_size // 2, 3 * shape.head_size // 4):
        partial = turned(_plain(shape.rope_theta, size, x))
        yield Guess("wrong rope", f"{size} of {shape.head_size} elements of a head are turned", partial)
    neighbours = torch.cat([x[..., 0::2], x[..., 1::2]], -1)  # as halves
    interleaved = formulas.rotate(neighbours, positions, right, shape.rope_scale).chunk(2, -1)
    detail = "neighbouring elements are turned together, not halves"
    yield Guess("wrong rope", detail, torch.stack(interleaved, -1).flatten(-2))
    if (shift := _shift(case.expected, case.out, right)) != 0:
        moved = formulas.rotate(x, positions + shift, right, shape.rope_scale)
        yield Guess("wrong positions", f"{shift:+d} at every token", moved)
    if len(at := (positions == 1).nonzero()):
        yield from _other_frequencies(case, _angles(x, case.out)[int(at[0])], turned)


def _other_frequencies(case: Case, found: torch.Tensor, turned: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[Guess]:
    """`found`: the angles of position 1, which are the frequencies."""
    shape = case.reference.shape
    right = shape.frequencies.to(found)
    theta = _theta(found, shape.head_size)
    if theta is not None and abs(theta / shape.rope_theta - 1) > SAME_THETA:
        theta = _best(theta, 1.05, lambda each: rms(turned(_plain(each, shape.head_size, found)) - case.out))
        detail = f"theta {theta:.4g} in place of {shape.rope_theta:g}; it grows with the position"
        yield Guess("wrong rope", detail, turned(_plain(theta, shape.head_size, found)))
    factor = float((found[:FEW] / right[:FEW]).median())
    yield Guess("wrong positions", f"times {factor:.4g} at every token", turned(factor * right))
    is_other = (found - right).abs() > SAME_FREQUENCY * right
    if is_other.any() and not is_other.all():
        first = int(is_other.nonzero()[0])
        detail = f"{int(is_other.sum())} of {len(right)} pairs turn otherwise: [{first}] by {float(found[first]):.3g} a token"
        detail = f"{detail} in place of {float(right[first]):.3g}"
        yield Guess("wrong rope", detail, turned(torch.where(is_other, found, right)))


def _plain(theta: float, size: int, like: torch.Tensor) -> torch.Tensor:
    """Frequencies of the pairs of `size` elements, without scaling."""
    return theta ** -(torch.arange(0, size, 2, device=like.device).double() / size)


def _angles(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """By which each pair of elements was turned, [rows, pairs], of the head's median."""
    first, second = (torch.complex(*each.chunk(2, -1)) for each in (before, after))
    return torch.angle(second * first.conj()).median(1).values


def _shift(before: torch.Tensor, after: torch.Tensor, frequencies: torch.Tensor) -> int:
    """The number of positions by which pairs were turned on, of all rows and pairs together."""
    first, second = (torch.complex(*each.chunk(2, -1)) for each in (before, after))
    turned = (second * first.conj()).sum((0, 1))
    shifts = torch.arange(-MOST_SHIFTED, MOST_SHIFTED + 1, device=turned.device).double()
    fits = (turned * torch.polar(torch.ones_like(frequencies), -shifts[:, None] * frequencies)).real.sum(1)
    return int(shifts[fits.argmax()])


def _theta(angles: torch.Tensor, size: int) -> float | None:
    """Of the angles of position 1, which are the frequencies."""
    exponents = torch.arange(0, size, 2, device=angles.device).double() / size
    usable = (angles > 1e-4) & (exponents > 0)
    if not usable.any():
        return None
    return float(torch.exp((-angles[usable].log() / exponents[usable]).median()))


def _best(start: float, width: float, error: Callable[[float], float]) -> float:
    """The best of a grid from `start` / `width` to `start` * `width`, and the best of finer ones around it."""
    best, span = start, math.log(width)
    for _ in range(6):
        best = min((best * math.exp(span * step / 8) for step in range(-8, 9)), key=error)
        span /= 6
    return best


def attention_guesses(case: Case) -> Iterator[Guess]:
    query, key, value = ref.attention_inputs(case.site, case.side)
    shape, positions, window = case.reference.shape, case.side.positions, case.reference.shape.window(case.site)
    scale = shape.head_size**-0.5
    rows = case.wrong.flatten(1).any(1).nonzero().flatten()
    first = int(positions[rows[0]]) if len(rows) else 0

    def attended(window: int) -> torch.Tensor:
        return formulas.attend(query, key, value, positions, scale, window)[0]

    told = f"{window} tokens" if window else "all tokens"
    if window:
        yield Guess("wrong window", f"none, in place of {told}", attended(0))
    for other in {first, first + 1, window - 1, window + 1, 2 * window, window // 2} - {window}:
        if other > 0:
            yield Guess("wrong window", f"{other} tokens in place of {told}: off from position {first} on", attended(other))
    for name in ("bfloat16", "float16"):
        low, _ = formulas.attend(query, key, value, positions, scale, window, getattr(torch, name))
        yield Guess("precision", f"the softmax is rounded to {name}", low)
    low_key, low_value = (each.to(torch.float8_e4m3fn).double() for each in (key.float(), value.float()))
    low, _ = formulas.attend(query, low_key, low_value, positions, scale, window)
    yield Guess("precision", "keys and values are rounded to float8_e4m3fn", low)
    everything = formulas.attend(query, key, value, torch.full_like(positions, len(key) - 1), scale, 0)[0]
    yield Guess("wrong mask", "later tokens are attended to", everything)
    for told_scale, other_scale in (("1", 1.0), ("1 / head size", 1 / shape.head_size)):
        out = formulas.attend(query, key, value, positions, other_scale, window)[0]
        yield Guess("wrong scale", f"of the scores: {told_scale} in place of 1 / sqrt(head size)", out)
    yield from _other_scale(case, query, key, value)
    heads = shape.num_heads // shape.num_groups
    across = torch.unflatten(query, 1, (heads, -1)).transpose(1, 2).flatten(1, 2)  # head h reads keys h % groups
    out = formulas.attend(across, key, value, positions, scale, window)[0]
    out = torch.unflatten(out, 1, (-1, heads)).transpose(1, 2).flatten(1, 2)
    yield Guess("wrong heads", "keys and values are dealt out to the queries' heads in turns", out)


def _other_scale(case: Case, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Iterator[Guess]:
    """The best of any, by the last rows."""
    positions, window = case.side.positions, case.reference.shape.window(case.site)
    right = case.reference.shape.head_size**-0.5
    few = slice(len(query) - min(FEW, len(query)), len(query))

    def error(scale: float) -> float:
        return rms(formulas.attend(query[few], key, value, positions[few], scale, window)[0] - case.out[few])

    found = _best(right, 16.0, error)
    detail = f"of the scores: {found / right:.4g} / sqrt(head size) in place of 1 / sqrt(head size)"
    yield Guess("wrong scale", detail, formulas.attend(query, key, value, positions, found, window)[0])
