"""What a module that is off looks like: each guess is computed, and one that explains the error names it.

    explain(local, reference, side, Known(adapter, formers))     # Kind("wrong eps", "1e-05 in place of 1e-06")

A guess is taken where it leaves less than a tenth of the error. Where none does, the pattern says what there is to say: one head,
from a position on, as large as the rounding of another dtype. Guesses for linears are in linear_kinds.py.
Pure functions of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F

from megasync.comparing import reference as ref
from megasync.comparing.cases import STALE_LAYER, WRONG_WEIGHTS, Case, Guess, Kind, Known, former_guesses, rms
from megasync.comparing.judge import Local, slope
from megasync.comparing.linear_kinds import linear_guesses
from megasync.comparing.reference import Reference, Side

EXPLAINED = 0.1  # of the error's rms is left
UNITS = {"bfloat16": 2.0**-9, "float16": 2.0**-12, "float32": 2.0**-24}


def explain(site: str, reference: Reference, side: Side, known: Known) -> Kind:
    """Of a module that is wrong."""
    if site == "lm_head":
        side = side.cut(slice(64))
    expected, bound = reference.expected(site, side)
    out = side.double(site).to(expected)
    case = Case(site, reference, side, known, out, expected, bound)
    guesses: Iterable[Guess] = GUESSES[next((ending for ending in GUESSES if site.endswith(ending)), "")](case)
    if site.endswith(("_proj", "lm_head")):
        guesses = linear_guesses(case)
    size = rms_apart if case.wrong.any() else drift  # of an error that is in no element more than rounding
    best, kind = EXPLAINED * size(out, expected), None
    for guess in guesses:
        left = size(out, guess.value)
        if left < best:
            best, kind = left, Kind(guess.name, guess.detail)
    return kind or scaled(case) or pattern(case)


def rms_apart(out: torch.Tensor, value: torch.Tensor) -> float:
    return rms(out - value)


def drift(out: torch.Tensor, value: torch.Tensor) -> float:
    return abs(float(slope(out, value)))


def scaled(case: Case) -> Kind | None:
    """Where it is a multiple of what is right, which more special guesses have not explained."""
    factor = 1 + float(slope(case.out, case.expected))
    left = rms_apart(case.out, factor * case.expected)
    is_explained = bool(case.wrong.any()) and left < EXPLAINED * rms(case.error)
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
    if case.out.ndim == 3:
        heads = sorted({int(head) for head in case.wrong.any(-1).any(0).nonzero()})
        if len(heads) == 1 and case.out.shape[1] > 1:
            return Kind("one head", f"head {heads[0]} alone is off, by {relative:.1e} of the size")
    rows = wrong.any(1).nonzero().flatten()
    first = int(case.side.positions[rows[0]]) if len(rows) and len(wrong) == len(case.side.positions) else 0
    if first > int(case.side.positions[0]) + 1 and 2 * len(rows) > len(wrong) - int(rows[0]):
        return Kind("from a position on", f"right before position {first}, off by {relative:.1e} of the size over all")
    if case.site.endswith(("_proj", "norm", "embed_tokens", "lm_head")):
        return Kind(WRONG_WEIGHTS, f"off by {relative:.1e} of its size in {int(wrong.any(0).sum())} of {wrong.shape[1]} columns")
    return Kind("unknown", f"off by {relative:.1e} of its size")


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
        yield Guess("wrong eps", f"{other:.2g} in place of {eps:g}", ref.rms_norm(x, weight, other))
    yield Guess("centre of weights", "1 is added to them", ref.rms_norm(x, weight + 1, eps))
    yield Guess("weights left out", "as if all were 1", ref.rms_norm(x, torch.ones_like(weight), eps))
    yield from former_guesses(case)
    columns = case.wrong.flatten(0, -2).any(0).nonzero().flatten()
    if len(columns) == 1:
        column = int(columns)
        scale = float((case.out[..., column] * case.expected[..., column]).sum() / case.expected[..., column].square().sum())
        value = case.expected.clone()
        value[..., column] *= scale
        held = float(weight[column]) * scale
        yield Guess("one element", f"of the weight: [{column}] is {held:.6g} in place of {float(weight[column]):.6g}", value)


def _rotated(case: Case) -> Iterator[Guess]:
    shape, positions = case.reference.shape, case.side.positions
    x = case.side.double(ref.rotary_input(case.site, shape))
    yield Guess("wrong rope", "it is left out", x)
    if shape.rope_scale != 1:
        plain = ref.rotate(x, positions, shape.frequencies)
        yield Guess("wrong rope", f"without the factor {shape.rope_scale:g} of cosine and sine", plain)
    turned, frequencies = _angles(x, case.out), shape.frequencies.to(x)
    if len(at := (positions == 1).nonzero()):
        theta = _theta(turned[int(at[0])], shape.head_size)
        if theta is not None:
            own = theta ** -(torch.arange(0, shape.head_size, 2, device=x.device).double() / shape.head_size)
            detail = f"theta {theta:.4g} in place of {shape.rope_theta:g}; it grows with the position"
            yield Guess("wrong rope", detail, ref.rotate(x, positions, own, shape.rope_scale))
    slowest = _angles(case.expected, case.out)[..., -1].median() / frequencies[-1]
    if (shift := round(float(slowest))) != 0:
        moved = ref.rotate(x, positions + shift, shape.frequencies, shape.rope_scale)
        yield Guess("wrong positions", f"{shift:+d} at every token", moved)
    pairs = torch.cat([x[..., 0::2], x[..., 1::2]], -1)  # neighbours, as halves
    interleaved = ref.rotate(pairs, positions, shape.frequencies, shape.rope_scale)
    yield Guess(
        "wrong rope",
        "neighbouring elements are turned together, not halves",
        torch.stack(interleaved.chunk(2, -1), -1).flatten(-2),
    )


def _angles(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """By which each pair of elements was turned, [rows, pairs], of the head's median."""
    first, second = (torch.complex(*each.chunk(2, -1)) for each in (before, after))
    return torch.angle(second * first.conj()).median(1).values


def _theta(angles: torch.Tensor, size: int) -> float | None:
    """Of the angles of position 1, which are the frequencies."""
    exponents = torch.arange(0, size, 2, device=angles.device).double() / size
    usable = (angles > 1e-4) & (exponents > 0)
    if not usable.any():
        return None
    return float(torch.exp((-angles[usable].log() / exponents[usable]).median()))


def _attention(case: Case) -> Iterator[Guess]:
    query, key, value = ref.attention_inputs(case.site, case.side)
    shape, positions, window = case.reference.shape, case.side.positions, case.reference.shape.window(case.site)
    scale = shape.head_size**-0.5
    rows = case.wrong.flatten(1).any(1).nonzero().flatten()
    first = int(positions[rows[0]]) if len(rows) else 0

    def attended(window: int) -> torch.Tensor:
        return ref.attend(query, key, value, positions, scale, window)[0]

    told = f"{window} tokens" if window else "all tokens"
    if window:
        yield Guess("wrong window", f"none, in place of {told}", attended(0))
    for other in {first, first + 1, 2 * window, window // 2} - {window, 0}:
        yield Guess("wrong window", f"{other} tokens in place of {told}: off from position {first} on", attended(other))
    for name in ("bfloat16", "float16"):
        low, _ = ref.attend(query, key, value, positions, scale, window, getattr(torch, name))
        yield Guess("precision", f"the softmax is rounded to {name}", low)
    everything = ref.attend(query, key, value, torch.full_like(positions, len(key) - 1), scale, 0)[0]
    yield Guess("wrong mask", "later tokens are attended to", everything)
    for told_scale, other_scale in (("1", 1.0), ("1 / head size", 1 / shape.head_size)):
        out = ref.attend(query, key, value, positions, other_scale, window)[0]
        yield Guess("wrong scale", f"of the scores: {told_scale} in place of 1 / sqrt(head size)", out)
    heads = shape.num_heads // shape.num_groups
    across = torch.unflatten(query, 1, (heads, -1)).transpose(1, 2).flatten(1, 2)  # head h reads keys h % groups
    out = ref.attend(across, key, value, positions, scale, window)[0]
    out = torch.unflatten(out, 1, (-1, heads)).transpose(1, 2).flatten(1, 2)
    yield Guess("wrong heads", "keys and values are dealt out to the queries' heads in turns", out)


def _activation(case: Case) -> Iterator[Guess]:
    gate, up = (case.side.double(case.site.replace("act_fn", f"{name}_proj")) for name in ("gate", "up"))
    yield Guess("swapped", "gate and up", F.silu(up) * gate)
    yield Guess("wrong activation", "gelu", F.gelu(gate) * up)
    yield Guess("wrong activation", "gelu by tanh", F.gelu(gate, approximate="tanh") * up)
    yield Guess("wrong activation", "none", gate * up)


def _log_probs(case: Case) -> Iterator[Guess]:
    logits, temperature = case.side.double("lm_head"), case.reference.temperature
    tokens = case.side.token_ids[case.side.num_prompt :][: len(logits)]
    tried = {1.0, temperature**2, 1 / temperature, *_temperatures(logits[:8], tokens[:8], case.out[:8])} - {temperature}
    for other in tried:
        what = "is forgotten" if other == 1 else f"is {other:.4g}"
        detail = f"it {what}, in place of {temperature:g}"
        yield Guess("wrong temperature", detail, ref.log_probs(logits, tokens, other))


def _temperatures(logits: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor) -> list[float]:
    """The best of a grid, and the best of a finer one around it."""
    best, width = 1.0, 4.0
    for _ in range(6):
        grid = [best * math.exp(width * step / 8) for step in range(-8, 9)]
        best = min(grid, key=lambda each: rms(ref.log_probs(logits, tokens, each) - out))
        width /= 6
    return [best]


def _residual(case: Case) -> Iterator[Guess]:
    sources = [case.side.double(source) for source in ref.residual_sources(case.site, case.reference.shape)]
    if len(sources) > 1:
        yield Guess("left out", "what the block before it gave is not added", sources[0])
        yield Guess("left out", "the residual stream is not added", sources[1])


GUESSES = {
    "embed_tokens": former_guesses,
    "norm:in": _residual,
    "norm": _norm,
    "rotary_emb.q": _rotated,
    "rotary_emb.k": _rotated,
    "self_attn.attn": _attention,
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
