"""Guesses of what is wrong with a linear: which rows are elsewhere, which element, row or column is another, how the weights are
rounded, what became of the bias, how an adapter is scaled.

See kinds.py. Pure functions of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megasync.comparing import reference as ref
from megasync.comparing.cases import WRONG_WEIGHTS, Case, Guess, other_weights
from megasync.comparing.judge import rms

SAME = 0.02  # of a column's rms: two columns are one
VARIES = 0.1  # of the size of what is expected: from token to token
CAPPED, MOST_CAPPED = 64, 50.0  # logits by which a cap is found, the largest ones; of them at most, in caps
COLUMNS = 64  # looked up at a time: an output layer has very many
LARGEST_FLOAT8, LARGEST_INT8 = 448.0, 127.0
SWAPPED = {
    "gate and up": ("gate_proj", "up_proj"),
    "keys and values": ("k_proj", "v_proj"),
    "queries and keys": ("q_proj", "k_proj"),
    "queries and values": ("q_proj", "v_proj"),
}


def linear_guesses(case: Case) -> Iterator[Guess]:
    x, expected = ref.linear_input(case.site, case.side), case.expected.flatten(1)
    wrong = case.wrong.flatten(1).any(0).nonzero().flatten()
    name = f"{case.site}.bias"
    bias = case.reference.parameters[name] if name in case.reference.parameters else expected.new_zeros(expected.shape[1])
    yield from _swapped(case)
    if case.site == "lm_head" and not case.reference.shape.is_tied:
        yield Guess(WRONG_WEIGHTS, "those of model.embed_tokens", x @ case.reference.parameters["model.embed_tokens.weight"].t())
    if case.site == "lm_head":
        yield from _capped(case)
    yield from other_weights(case)
    yield from _adapter(case, x)
    yield from _bias(case, bias, wrong)
    if not len(wrong):
        return
    yield from _one_column(case, x, wrong)
    if len(wrong) == 1:
        yield from _one_row(case, bias, int(wrong))
    else:
        yield from _moved(case, bias, wrong)
    yield from _other_weights(case, x)


def _shaped(case: Case, value: torch.Tensor) -> torch.Tensor:
    return value.reshape(case.out.shape)


def _swapped(case: Case) -> Iterator[Guess]:
    """With another linear that has the same input and size."""
    layer, _, name = case.site.rpartition(".")
    for told, pair in SWAPPED.items():
        if name in pair:
            other = f"{layer}.{pair[1 - pair.index(name)]}"
            if case.side[other].shape == case.out.shape:
                yield Guess("swapped", told, case.reference.expected(other, case.side).value)


def _capped(case: Case) -> Iterator[Guess]:
    """Logits that are drawn in by cap * tanh(logit / cap), as in Gemma 2."""
    expected = case.expected.flatten()
    largest = expected.abs().topk(min(CAPPED, len(expected))).indices
    expected, out = expected[largest], case.out.flatten()[largest]
    low, high = torch.zeros_like(expected), expected.new_full(expected.shape, MOST_CAPPED)  # tanh(u) / u falls from 1
    for _ in range(60):
        middle = (low + high) / 2
        is_below = torch.tanh(middle) / middle > out / expected
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
    cap = float((expected.abs() / high).median())
    if cap < float("inf"):
        yield Guess("soft cap", f"results are {cap:.4g} * tanh(result / {cap:.4g})", cap * torch.tanh(case.expected / cap))


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


def _bias(case: Case, bias: torch.Tensor, wrong: torch.Tensor) -> Iterator[Guess]:
    """An error that is the same at every token, where what is right is not."""
    expected, shift = case.expected.flatten(1), case.error.flatten(1).mean(0)
    if rms(expected - expected.mean(0)) < VARIES * rms(expected):
        return
    factor = 1 + float(shift @ bias / bias.square().sum().clamp_min(1e-300))
    if len(wrong) == 1:
        row = int(wrong)
        held, right = float(bias[row] + shift[row]), float(bias[row])
        kind = "one element", f"of the bias: [{row}] is {held:.6g} in place of {right:.6g}"
    elif rms(shift - (factor - 1) * bias) > VARIES * rms(shift):
        kind = "wrong bias", f"{rms(bias + shift):.2e} in rms in place of {rms(bias):.2e}; the weights are right"
    elif abs(factor) < VARIES:
        kind = "left out", "the bias"
    else:
        kind = "wrong bias", f"times {factor:.4g}"
    yield Guess(*kind, _shaped(case, expected + shift))


def _one_column(case: Case, x: torch.Tensor, wrong: torch.Tensor) -> Iterator[Guess]:
    """The errors, each as a multiple of one of the inputs. Of one wrong row it is an element."""
    error = case.error.flatten(1)[:, wrong]
    powers = x.square().sum(0).clamp_min(1e-300)
    products = x.t() @ error
    column = int((products.square().sum(1) / powers).argmax())
    factors = products[column] / powers[column]
    value = case.expected.flatten(1).clone()
    value[:, wrong] += x[:, column, None] * factors
    held = case.reference.weight(case.site)[wrong, column]
    if len(wrong) == 1:
        place, now = f"[{int(wrong)}, {column}]", float(held + factors)
        yield Guess("one element", f"of the weight: {place} is {now:.6g} in place of {float(held):.6g}", _shaped(case, value))
    else:
        size = f"{rms(held + factors):.2e} in rms in place of {rms(held):.2e}"
        yield Guess("one column", f"of the weight: [:, {column}], {size}", _shaped(case, value))


def _one_row(case: Case, bias: torch.Tensor, row: int) -> Iterator[Guess]:
    expected, error = case.expected.flatten(1), case.error.flatten(1)[:, row]
    own = expected[:, row] - bias[row]
    factor = float((own * error).sum() / own.square().sum().clamp_min(1e-300))
    value = expected.clone()
    value[:, row] += factor * own
    yield Guess("one row", f"of the weight: [{row}] is {1 + factor:.6g} times what is right", _shaped(case, value))


def _moved(case: Case, bias: torch.Tensor, wrong: torch.Tensor) -> Iterator[Guess]:
    """Rows in another order, the bias with them or not."""
    out, expected = case.out.flatten(1), case.expected.flatten(1)
    for fixed, told in ((torch.zeros_like(bias), ""), (bias, ", and the bias is not"))[: 1 + bool(bias.any())]:
        if (order := _order(out - fixed, expected - fixed, wrong)) is not None:
            value = expected.clone()
            value[:, wrong] = (expected - fixed)[:, order] + fixed[wrong]
            yield Guess("rows moved", _where(case, wrong, order) + told, _shaped(case, value))


def _order(out: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor) -> torch.Tensor | None:
    """Which column is expected where each wrong one is, if all are found elsewhere."""
    found = []
    for columns in torch.split(wrong, COLUMNS):
        nearest = torch.cdist(out[:, columns].t(), expected.t()).min(1)
        size = out[:, columns].norm(dim=0).clamp_min(1e-300)
        if not bool((nearest.values < SAME * size).all()):
            return None
        found.append(nearest.indices)
    return torch.cat(found)


def _where(case: Case, wrong: torch.Tensor, order: torch.Tensor) -> str:
    """In words: within a head, between heads, or anywhere."""
    size = case.reference.shape.head_size
    if case.out.ndim != 3:
        return f"{len(wrong)} rows are in another order"
    heads, sources = (sorted(set((each // size).tolist())) for each in (wrong, order))
    if len(heads) == 1 and heads == sources:
        return f"head {heads[0]}: its rows are in another order, as of a transposed head"
    return f"{len(wrong)} rows are in another order; heads {', '.join(map(str, heads))}"


def _other_weights(case: Case, x: torch.Tensor) -> Iterator[Guess]:
    weight = case.reference.weight(case.site)

    def given(other: torch.Tensor) -> torch.Tensor:
        return case.expected + _shaped(case, x @ (other - weight).t())

    told = "the weight" if len(weight) == weight.shape[1] else "the weight, its shape as before"
    yield Guess("transposed", told, given(weight.t().reshape(weight.shape)))
    for name, largest in (("float8", LARGEST_FLOAT8), ("int8", LARGEST_INT8)):
        for told, sizes in (("", weight.abs().amax()), (", a scale for each row", weight.abs().amax(1, keepdim=True))):
            other = _quantised(weight, sizes / largest, name).to(case.reference.parameters.dtype).double()
            yield Guess("precision", f"the weights were rounded to {name}{told}", given(other))
    for name in ("bfloat16", "float16", "float8_e4m3fn"):
        yield Guess("precision", f"the weights were rounded to {name}", given(weight.to(getattr(torch, name)).double()))


def _quantised(weight: torch.Tensor, scale: torch.Tensor, name: str) -> torch.Tensor:
    units = weight / scale.clamp_min(1e-300)
    return scale * (units.round() if name == "int8" else units.float().to(torch.float8_e4m3fn).double())
