"""The findings, as lines for the terminal and as one JSON object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from statistics import fmean
from typing import TYPE_CHECKING, Any

from megasync.config.errors import some
from megasync.tools.bisect.sites import layer_of

if TYPE_CHECKING:
    from megasync.tools.bisect.compare import Finding
    from megasync.tools.bisect.judge import Difference, Local
    from megasync.tools.bisect.response import Response

MAX_OTHERS = 12


def as_json(name: str, response: Response, found: Finding) -> dict[str, Any]:
    return {
        "weights": name,
        "response": response.description,
        "culprit": asdict(found.culprit) if found.culprit else None,
        "stale_cache": found.is_stale,
        "wrong": [asdict(each) for each in found.judgement.wrong],
        "growth": [asdict(each) for each in found.judgement.differences],
        "gap": asdict(found.gap),
        "gap_swapped": asdict(found.gap_swapped) if found.gap_swapped else None,
        "recorded_gap": recorded_gap(response),
        "replica_moved": moved(response, found),
        "seconds": found.seconds,
    }


def lines(name: str, response: Response, found: Finding, swap: str) -> Iterator[str]:
    yield f"{name}: {response.description}, after a prompt of {len(response.prompt_ids)}"
    yield from _verdict(found)
    yield ""
    yield "difference between trainer and replica (its rms by that of the trainer's values):"
    yield from _growth(found.judgement.differences, found.culprit)
    yield f"log-probs: {found.gap.mean:.3g} nats apart on average, {found.gap.largest:.3g} at most"
    if (logged := recorded_gap(response)) is not None:
        yield f"  in the run itself: {logged:.3g} on average"
    if (apart := moved(response, found)) is not None and apart > max(1e-3, 3 * found.gap.mean):
        yield (
            f"  the replica's own log-probs differed by {apart:.3g} nats in the run: it had other weights, another temperature "
            "or stale keys and values then"
        )
    if found.gap_swapped is not None:
        share = 1 - found.gap_swapped.mean / found.gap.mean if found.gap.mean else 0.0
        yield (
            f"with {swap} ({found.num_swapped} modules) in float64 in the trainer: {found.gap_swapped.mean:.3g} nats, "
            f"{found.gap_swapped.largest:.3g} at most: a share of {share:.0%}"
        )
    yield "seconds: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in found.seconds.items())


def _verdict(found: Finding) -> Iterator[str]:
    culprit = found.culprit
    if culprit is None:
        worst = max(found.judgement.locals, key=lambda each: each.ratio)
        yield "nothing but rounding: every module of both sides computes the right output for its inputs"
        yield f"  nearest to its bound: {worst.site} of the {worst.side}, at {worst.ratio:.2f} of it"
        return
    yield f"first wrong module: {culprit.site} of the {culprit.side} ({culprit.operation})"
    yield from (f"  {line}" for line in _place(culprit))
    if found.is_stale:
        yield "  prefix cache: with an empty one it is right: the cached keys and values are stale"
    wrong = dict.fromkeys(f"{each.side} {each.site}" for each in found.judgement.wrong)
    others = [each for each in wrong if each != f"{culprit.side} {culprit.site}"]
    if others:
        yield f"  wrong too:   {some(others, MAX_OTHERS)}"


def _place(culprit: Local) -> Iterator[str]:
    if culprit.num_uncalled:
        count = abs(culprit.num_uncalled)
        yield f"{'not called' if culprit.num_uncalled > 0 else 'called twice'} with {count} tokens"
        return
    element = f", element [{', '.join(map(str, culprit.element))}]" if culprit.element else ""
    yield f"worst at:    token {culprit.position}{element}: {culprit.value:.6g}, expected {culprit.expected:.6g}"
    relative = f"{culprit.relative_error:.2e} of the rms of all"
    yield f"size:        {culprit.ratio:.3g} times the bound of rounding, {relative}"
    if culprit.wrong_tokens:
        tokens = f"{culprit.wrong_tokens} tokens from token {culprit.first_wrong} on"
        yield f"extent:      {tokens}, {culprit.wrong_elements} elements of a token"


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
    """Mean of |trainer - rollout| in the run's log."""
    return _mean_difference(response.trainer, response.rollout)


def moved(response: Response, found: Finding) -> float | None:
    """Mean of |rollout in the run's log - replica now|."""
    return _mean_difference(response.rollout, found.replica_log_probs.tolist())


def _mean_difference(own: list[float | None] | None, others: list[float] | list[float | None] | None) -> float | None:
    pairs = zip(own or (), others or (), strict=False)
    differences = [abs(a - b) for a, b in pairs if a is not None and b is not None]
    return fmean(differences) if differences else None
