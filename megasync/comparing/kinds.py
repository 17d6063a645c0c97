"""What a module that is off looks like: each guess is computed, and one that explains the error names it.

    explain(local, reference, side, Known(adapter, formers))     # Kind("wrong eps", "1e-05 in place of 1e-06")

A guess is taken where it leaves less than a tenth of the error, or else where it leaves nothing but rounding and about a third at
most, as of weights in int8 in a bfloat16 model. Where none does, the pattern says what there is to say: one head,
from a position on, as large as the rounding of another dtype. Guesses for linears are in linear_kinds.py, those for attention in
attention_kinds.py.
Pure functions of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F

from megasync.comparing import formulas
from megasync.comparing import reference as ref
from megasync.comparing.attention_kinds import attention_guesses, rotary_guesses
from megasync.comparing.cases import STALE_LAYER, WRONG_WEIGHTS, Case, Guess, Kind, Known, other_weights
from megasync.comparing.judge import Local, by_bound, num_uncalled, rms, slope
from megasync.comparing.linear_kinds import linear_guesses
from megasync.comparing.reference import Reference, Side

EXPLAINED = 0.1  # of the error's rms is left
ROUNDED = 0.35  # of it, where all that is left is rounding
BETTER = 0.5  # of what an earlier guess leaves: later ones are more general, and fitted
ROWS = 64  # looked up in the embedding at a time
UNITS = {"bfloat16": 2.0**-9, "float16": 2.0**-12, "float32": 2.0**-24}


def explain(site: str, reference: Reference, side: Side, known: Known) -> Kind:
    """Of a module that is wrong."""
    if missing := num_uncalled(site, side):
        return uncalled(missing, len(side.positions))
    if site == "lm_head":
        side = side.cut(slice(64))
    expected, bound = reference.expected(site, side)
    out = side.double(site).to(expected)
    case = Case(site, reference, side, known, out, expected, bound)
    if (broken := not_finite(case)) is not None:
        return broken
    guesses: Iterable[Guess] = GUESSES[next((ending for ending in GUESSES if site.endswith(ending)), "")](case)
    if site.endswith(("_proj", "lm_head")):
        guesses = linear_guesses(case)
    error = unexplained(case, expected)
    best, kind, likely = EXPLAINED * error, None, None
    best_of_rounded = ROUNDED * error
    for guess in guesses:
        left = unexplained(case, guess.value)
        if left < best:
            best, kind = BETTER * left, Kind(guess.name, guess.detail)
        elif kind is None and left < best_of_rounded and not (by_bound(out, guess.value, bound) > 1).any():
            best_of_rounded, likely = BETTER * left, Kind(guess.name, guess.detail)
    return kind or scaled(case) or likely or pattern(case)


def unexplained(case: Case, value: torch.Tensor) -> float:
    """How far it gave another result than `value`: in the rows and columns where something is wrong, or would be with `value`; in
    the others there is rounding, of which much would hide what is wrong in a few. An error that is in no element more than
    rounding: over all together.
    """
    if not case.wrong.any():
        return abs(float(slope(case.out, value)))
    counts = case.where | (by_bound(case.out, value, case.bound) > 1)
    return math.sqrt(float((case.out - value)[counts].square().sum()) / int(case.where.sum()))


def uncalled(missing: int, num_tokens: int) -> Kind:
    if missing < 0:
        return Kind("called twice", f"with {-missing} of {num_tokens} tokens")
    part = "" if missing == num_tokens else f" with {missing} of {num_tokens} tokens"
    return Kind("left out", f"it is not called{part}")


def not_finite(case: Case) -> Kind | None:
    """NaN and infinities that come out of numbers."""
    broken = (case.expected.isfinite() & ~case.out.isfinite()).flatten(1 if case.out.ndim > 1 else 0)
    if not broken.any():
        return None
    what = "NaN" if case.out.isnan().any() else "infinities"
    rows = broken.any(1) if broken.ndim > 1 else broken
    columns = f", in {int(broken.any(0).sum())} of {broken.shape[1]} columns" if broken.ndim > 1 else ""
    return Kind("not finite", f"{what} out of numbers, with {int(rows.sum())} of {len(rows)} tokens{columns}")


def scaled(case: Case) -> Kind | None:
    """Where it is a multiple of what is right, which more special guesses have not explained."""
    if not case.out.any():
        return Kind("left out", "it gives zeros")
    factor = 1 + float(slope(case.out, case.expected))
    left = unexplained(case, factor * case.expected)
    is_explained = bool(case.wrong.any()) and left < EXPLAINED * min(unexplained(case, case.expected), rms(case.out))
    return Kind("wrong scale", f"times {factor:.6g}") if is_explained else None


def pattern(case: Case) -> Kind:
    """By size and place alone."""
    wrong = case.wrong.flatten(1) if case.wrong.ndim > 1 else case.wrong[:, None]
    shares = [float(wrong.any(dim).double().mean()) for dim in (0, 1)]  # of columns and of rows
    is_everywhere = min(shares) >= 0.5 or not wrong.any()  # as where all is rounded
    relative = rms(case.error) / max(rms(case.expected), 1e-300)
    own = str(case.side[case.site].dtype).removeprefix("torch.")
    for name, unit in UNITS.items():
        if is_everywhere and unit > UNITS.get(own, 0.0) * 1.01 and unit / 8 < relative < unit * 8:
            return Kind("precision", f"off by {relative:.1e} of its size, as what is computed in {name} in a {own} model")
    if (part := _one_part(case, wrong, relative)) is not None:
        return part
    rows = wrong.any(1).nonzero().flatten()
    first = int(case.side.positions[rows[0]]) if len(rows) and len(wrong) == len(case.side.positions) else 0
    if first > int(case.side.positions[0]) + 1 and 2 * len(rows) > len(wrong) - int(rows[0]):
        return Kind("from a position on", f"right before position {first}, off by {relative:.1e} of the size over all")
    if case.site.endswith(("_proj", "norm", "embed_tokens", "lm_head")):
        columns = f"{int(wrong.any(0).sum())} of {wrong.shape[1]} columns"
        where = f"for {_of_tokens(case, wrong.any(1))}" if case.site.endswith("embed_tokens") else f"in {columns}"
        return Kind(WRONG_WEIGHTS, f"off by {relative:.1e} of its size {where}")
    return Kind("unknown", f"off by {relative:.1e} of its size")


def _one_part(case: Case, wrong: torch.Tensor, relative: float) -> Kind | None:
    """One column or one head that alone is off."""
    columns = wrong.any(0).nonzero().flatten().tolist()
    if len(columns) == 1 and case.site.endswith(("_proj", "lm_head")):
        return Kind("one row", f"of the weight: [{columns[0]}] alone is off, by {relative:.1e} of the size over all")
    heads = case.wrong.any(-1).any(0).nonzero().flatten().tolist() if case.out.ndim == 3 else []
    if len(heads) == 1 and case.out.shape[1] > 1:
        return Kind("one head", f"head {heads[0]} alone is off, by {relative:.1e} of the size")
    return None


# ---------------------------------------------------------------------------------------------------- guesses by module


def _none(_: Case) -> Iterator[Guess]:
    return iter(())


def _norm(case: Case) -> Iterator[Guess]:
    x, weight = case.side.double(ref.norm_source(case.site)), case.reference.parameters[f"{case.site}.weight"]
    eps = case.reference.shape.eps
    yield Guess("left out", "it gives what it got", x)
    power = x.square().mean(-1)
    shrunk = (case.out * case.expected).sum(-1) / case.expected.square().sum(-1)  # (power + eps) / (power + other eps), rooted
    other = float(((power + eps) / shrunk.square() - power).median())
    if 0 < other < 1:
        yield Guess("wrong eps", f"{other:.2g} in place of {eps:g}", formulas.rms_norm(x, weight, other))
    yield Guess("centre of weights", "1 is added to them", formulas.rms_norm(x, weight + 1, eps))
    yield Guess("centre of weights", "1 is taken from them", formulas.rms_norm(x, weight - 1, eps))
    yield Guess("weights left out", "as if all were 1", formulas.rms_norm(x, torch.ones_like(weight), eps))
    yield from other_weights(case)
    if x.ndim == 3:  # of queries' or keys' heads
        layer, _, name = case.site.rpartition(".")
        partner = case.reference.parameters[f"{layer}.{'k_norm' if name == 'q_norm' else 'q_norm'}.weight"]
        yield Guess("swapped", "the norms of queries and keys", formulas.rms_norm(x, partner, eps))
        together = formulas.rms_norm(x.flatten(1), weight.repeat(x.shape[1]), eps).view_as(x)
        yield Guess("wrong heads", "all are normed together, not each by itself", together)
    columns = case.wrong.flatten(0, -2).any(0).nonzero().flatten()
    if len(columns) == 1:
        column = int(columns)
        scale = float((case.out[..., column] * case.expected[..., column]).sum() / case.expected[..., column].square().sum())
        value = case.expected.clone()
        value[..., column] *= scale
        held = float(weight[column]) * scale
        yield Guess("one element", f"of the weight: [{column}] is {held:.6g} in place of {float(weight[column]):.6g}", value)


def _activation(case: Case) -> Iterator[Guess]:
    gate, up = (case.side.double(case.site.replace("act_fn", f"{name}_proj")) for name in ("gate", "up"))
    yield Guess("swapped", "gate and up", F.silu(up) * gate)
    yield Guess("wrong activation", "gelu", F.gelu(gate) * up)
    yield Guess("wrong activation", "gelu by tanh", F.gelu(gate, approximate="tanh") * up)
    yield Guess("wrong activation", "relu", F.relu(gate) * up)
    yield Guess("wrong activation", "none", gate * up)


def _log_probs(case: Case) -> Iterator[Guess]:
    logits, temperature = case.side.double("lm_head"), case.reference.temperature
    tokens = case.side.token_ids[case.side.num_prompt :][: len(logits)]
    tried = {1.0, temperature**2, 1 / temperature, *_temperatures(logits[:8], tokens[:8], case.out[:8])} - {temperature}
    for other in tried:
        what = "is forgotten" if other == 1 else f"is {other:.4g}"
        detail = f"it {what}, in place of {temperature:g}"
        yield Guess("wrong temperature", detail, formulas.log_probs(logits, tokens, other))


def _temperatures(logits: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor) -> list[float]:
    """The best of a grid, and the best of a finer one around it."""
    best, width = 1.0, 4.0
    for _ in range(6):
        grid = [best * math.exp(width * step / 8) for step in range(-8, 9)]
        best = min(grid, key=lambda each: rms(formulas.log_probs(logits, tokens, each) - out))
        width /= 6
    return [best]


def _residual(case: Case) -> Iterator[Guess]:
    sources = [case.side.double(source) for source in ref.residual_sources(case.site, case.reference.shape)]
    if len(sources) == 1:
        return
    yield Guess("left out", "what the block before it gave is not added", sources[0])
    yield Guess("left out", "the residual stream is not added", sources[1])
    yield Guess("added twice", "the residual stream", 2 * sources[0] + sources[1])
    yield Guess("added twice", "what the block before it gave", sources[0] + 2 * sources[1])
    columns = torch.stack([each.flatten() for each in sources], -1)
    a, b = (torch.linalg.pinv(columns.t() @ columns, hermitian=True) @ (columns.t() @ case.out.flatten())).tolist()
    detail = f"{a:.4g} times the residual stream and {b:.4g} times what the block before it gave"
    yield Guess("wrong scale", detail, a * sources[0] + b * sources[1])


def _embedding(case: Case) -> Iterator[Guess]:
    yield from other_weights(case)
    table, rows = case.reference.parameters[f"{case.site}.weight"], case.wrong.any(1).nonzero().flatten()
    powers = table.square().sum(1)
    nearest = torch.cat([(powers - 2 * out @ table.t()).argmin(1) for out in torch.split(case.out[rows], ROWS)])
    value = case.expected.clone()
    value[rows] = table[nearest]
    own = int(case.side.token_ids[case.side.positions[rows[0]]])
    detail = f"of {_of_tokens(case, case.wrong.any(1))}: {own} has that of {int(nearest[0])}"
    yield Guess("rows moved", detail, value)


def _of_tokens(case: Case, wrong: torch.Tensor) -> str:
    ids = case.side.token_ids[case.side.positions]
    all_ids, wrong_ids = (set(each.tolist()) for each in (ids, ids[wrong]))
    return f"token {min(wrong_ids)} alone" if len(wrong_ids) == 1 else f"{len(wrong_ids)} of {len(all_ids)} tokens"


GUESSES = {
    "embed_tokens": _embedding,
    "norm:in": _residual,
    "norm": _norm,
    "rotary_emb.q": rotary_guesses,
    "rotary_emb.k": rotary_guesses,
    "self_attn.attn": attention_guesses,
    "act_fn": _activation,
    "log_probs": _log_probs,
    "": _none,
}


def of_layer(kind: Kind, culprit: Local, wrong: list[Local], num_weighted: int) -> Kind:
    """Wrong weights in most modules of one layer, and in no other, are a layer that was not updated.

    `num_weighted`: modules of a layer that have parameters.
    """
    if kind.name != WRONG_WEIGHTS or not culprit.site.startswith("model.layers."):
        return kind
    layer = ".".join(culprit.site.split(".")[:3])
    places = {each.site for each in wrong if each.side == culprit.side and each.site.endswith(("_proj", "norm"))}
    own = {site for site in places if site.startswith(f"{layer}.")}
    if own != places or 2 * len(own) < num_weighted:
        return kind
    return Kind(STALE_LAYER, f"{len(own)} modules of {layer} have other weights, {kind.detail}, and those of no other layer")
