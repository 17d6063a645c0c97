"""Guesses of what is wrong with a linear: which rows are elsewhere, which element is another, how an adapter is scaled.

See kinds.py. Pure functions of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megasync.comparing import reference as ref
from megasync.comparing.cases import Case, Guess, former_guesses

SAME = 0.02  # of a column's rms: two columns are one
PARTNERS = {"gate_proj": "up_proj", "up_proj": "gate_proj"}


def linear_guesses(case: Case) -> Iterator[Guess]:
    layer, _, name = case.site.rpartition(".")
    x = ref.linear_input(case.site, case.side)
    out, expected = (each.flatten(1) for each in (case.out, case.expected))
    wrong = case.wrong.flatten(1).any(0).nonzero().flatten()

    def shaped(value: torch.Tensor) -> torch.Tensor:
        return value.reshape(case.out.shape)

    if name in PARTNERS:
        other = case.reference.expected(f"{layer}.{PARTNERS[name]}", case.side).value
        yield Guess("swapped", "gate and up", shaped(other))
    yield from former_guesses(case)
    yield from _adapter(case, x)
    if f"{case.site}.bias" in case.reference.parameters:
        yield Guess("left out", "the bias", shaped(expected - case.reference.parameters[f"{case.site}.bias"]))
    if len(wrong) == 1:
        yield from _one_element(case, x, int(wrong))
    elif len(wrong) and (order := _moved(out, expected, wrong)) is not None:
        value = expected.clone()
        value[:, wrong] = expected[:, order]
        yield Guess("rows moved", _where(case, wrong, order), shaped(value))


def _adapter(case: Case, x: torch.Tensor) -> Iterator[Guess]:
    """Its scale, whichever side adds it: `base` is what the linear gives without."""
    factors = case.known.adapter.get(case.site)
    if factors is None:
        return
    a, b, scale = factors[0].to(x), factors[1].to(x), factors[2]
    update = ((x @ a.t()) @ b.t()).reshape(case.out.shape)
    base = case.expected - scale * update
    found = float(((case.out - base) * update).sum() / update.square().sum().clamp_min(1e-300))
    detail = "it is left out" if abs(found) < 1e-3 * abs(scale) else f"{found:.4g} in place of {scale:g}"
    yield Guess("LoRA scale", detail, base + found * update)


def _one_element(case: Case, x: torch.Tensor, row: int) -> Iterator[Guess]:
    """The error of one column, as a multiple of one of the inputs'."""
    error = case.error.flatten(1)[:, row]
    factors = (x * error[:, None]).sum(0) / x.square().sum(0).clamp_min(1e-300)
    column = int((error[:, None] - factors * x).square().sum(0).argmin())
    value = case.expected.flatten(1).clone()
    value[:, row] += factors[column] * x[:, column]
    held = float(case.reference.weight(case.site)[row, column])
    detail = f"of the weight: [{row}, {column}] is {held + float(factors[column]):.6g} in place of {held:.6g}"
    yield Guess("one element", detail, value.reshape(case.out.shape))


def _moved(out: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor) -> torch.Tensor | None:
    """Which column is expected where each wrong one is, if all are found elsewhere."""
    apart = torch.cdist(out[:, wrong].t(), expected.t())
    nearest = apart.min(1)
    size = out[:, wrong].norm(dim=0).clamp_min(1e-300)
    return nearest.indices if bool((nearest.values < SAME * size).all()) else None


def _where(case: Case, wrong: torch.Tensor, order: torch.Tensor) -> str:
    """In words: within a head, between heads, or anywhere."""
    size = case.reference.shape.head_size
    if case.out.ndim != 3:
        return f"{len(wrong)} rows are in another order"
    heads, sources = (sorted(set((each // size).tolist())) for each in (wrong, order))
    if len(heads) == 1 and heads == sources:
        return f"head {heads[0]}: its rows are in another order, as of a transposed head"
    return f"{len(wrong)} rows are in another order; heads {', '.join(map(str, heads))}"
