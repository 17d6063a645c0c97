"""What was found, as lines for the terminal and as one JSON object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from statistics import fmean
from typing import TYPE_CHECKING, Any

from megasync.comparing.shape import layer_of
from megasync.config.errors import some

if TYPE_CHECKING:
    from megasync.comparing.compare import Found
    from megasync.comparing.judge import Difference, Local
    from megasync.comparing.response import Response

OPERATIONS = {
    "embed_tokens": "embedding",
    "norm:in": "sum of the residual stream",
    "norm": "RMSNorm",
    "rotary_emb.q": "rotary embedding of queries",
    "rotary_emb.k": "rotary embedding of keys",
    "self_attn.attn": "attention",
    "act_fn": "activation times gate",
    "log_probs": "log-softmax at the temperature",
}
MAX_OTHERS = 12


def operation(site: str) -> str:
    return next((told for ending, told in OPERATIONS.items() if site.endswith(ending)), "matrix product")


def as_json(name: str, response: Response, found: Found) -> dict[str, Any]:
    culprit = None
    if found.culprit is not None and found.kind is not None:
        told = {"operation": operation(found.culprit.site), "kind": found.kind.name, "detail": found.kind.detail}
        culprit = {**asdict(found.culprit), **told}
    return {
        "weights": name,
        "response": response.told,
        "culprit": culprit,
        "wrong": [asdict(each) for each in (*found.judgement.wrong, *found.again.wrong)],
        "growth": [asdict(each) for each in found.judgement.differences],
        "gap": asdict(found.gap),
        "gap_swapped": asdict(found.gap_swapped) if found.gap_swapped else None,
        "recorded_gap": recorded_gap(response),
        "replica_moved": moved(response, found),
        "seconds": found.seconds,
    }


def lines(name: str, response: Response, found: Found, swap: str) -> Iterator[str]:
    yield f"{name}: {response.told}, after a prompt of {len(response.prompt_ids)}"
    yield from _verdict(found)
    yield ""
    yield "how far trainer and replica are apart (rms of the difference by that of the trainer's):"
    yield from _growth(found.judgement.differences, found.culprit)
    yield f"log-probs: {found.gap.mean:.3g} nats apart on average, {found.gap.largest:.3g} at most"
    if (logged := recorded_gap(response)) is not None:
        yield f"  in the run itself: {logged:.3g} on average"
    if (apart := moved(response, found)) is not None and apart > max(1e-3, 3 * found.gap.mean):
        yield (
            f"  the replica's own log-probs were {apart:.3g} nats otherwise in the run: it had other weights, another "
            "temperature or stale keys and values then"
        )
    if found.gap_swapped is not None:
        share = 1 - found.gap_swapped.mean / found.gap.mean if found.gap.mean else 0.0
        yield (
            f"with {swap} ({found.num_swapped} modules) in float64 in the trainer: {found.gap_swapped.mean:.3g} nats, "
            f"{found.gap_swapped.largest:.3g} at most: a share of {share:.0%}"
        )
    yield "seconds: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in found.seconds.items())


def _verdict(found: Found) -> Iterator[str]:
    culprit, kind = found.culprit, found.kind
    if culprit is None or kind is None:
        worst = max((*found.judgement.locals, *found.again.locals), key=lambda each: each.ratio)
        yield "nothing but rounding: every module of both sides gives what it should for what it gets"
        yield f"  the nearest to its bound: {worst.site} of the {worst.side}, at {worst.ratio:.2f} of it"
        return
    yield f"the first that is wrong: {culprit.site} of the {culprit.side} ({operation(culprit.site)})"
    yield f"  looks like:  {kind.name}: {kind.detail}"
    if not culprit.num_uncalled:
        place = f", element [{', '.join(map(str, culprit.element))}]" if culprit.element else ""
        yield f"  worst at:    token {culprit.position}{place}: {culprit.value:.6g} where {culprit.expected:.6g} is right"
        relative = f"{culprit.relative_error:.2e} of the whole's rms"
        yield f"  size:        {culprit.ratio:.3g} times what rounding gives there, {relative}"
    wrong = dict.fromkeys(f"{each.side} {each.site}" for each in (*found.judgement.wrong, *found.again.wrong))
    others = [each for each in wrong if each != f"{culprit.side} {culprit.site}"]
    if others:
        yield f"  wrong too:   {some(others, MAX_OTHERS)}"


def _growth(differences: list[Difference], culprit: Local | None) -> Iterator[str]:
    """A line a layer: its worst module; the culprit's layer module by module."""
    own = layer_of(culprit.site) if culprit is not None else None
    layers: dict[int | str, list[Difference]] = {}
    for each in differences:
        layer = layer_of(each.site)
        layers.setdefault(layer if layer is not None else each.site, []).append(each)
    for place, members in layers.items():
        if place == own or isinstance(place, str):
            yield from (f"  {each.site:<48} {each.relative:.2e}  largest {each.largest:.2e}" for each in members)
        else:
            worst = max(members, key=lambda each: each.relative)
            mean = fmean(each.relative for each in members)
            yield f"  model.layers.{place:<3} mean {mean:.2e}, worst {worst.relative:.2e} in {worst.site.split('.', 3)[3]}"


def recorded_gap(response: Response) -> float | None:
    """Mean of |trainer - rollout| as the run logged them."""
    return _mean_apart(response.trainer, response.rollout)


def moved(response: Response, found: Found) -> float | None:
    """Mean of |rollout as logged - replica now|."""
    return _mean_apart(response.rollout, found.replica_log_probs.tolist())


def _mean_apart(own: list[float | None] | None, others: list[float] | list[float | None] | None) -> float | None:
    pairs = zip(own or (), others or (), strict=False)
    apart = [abs(a - b) for a, b in pairs if a is not None and b is not None]
    return fmean(apart) if apart else None
