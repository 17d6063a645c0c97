"""Both sides led through one response, judged, and the first module that is wrong explained.

    passes = trace_replica(pool, response, temperature, scratch)      # while there is a replica
    found = compare(forward, passes, response, References(...))       # the trainer's model may come after it
    found.culprit, found.kind

A replica is led twice: as it is, and once more for the last tokens, with what its prefix cache holds. Leaves out which weights
(weights.py) and how it is told (text.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from megasync.comparing.cases import STALE_KV, Kind, Known
from megasync.comparing.judge import Judgement, Local, judge
from megasync.comparing.kinds import explain, of_layer
from megasync.comparing.reference import Reference, Side
from megasync.comparing.response import Response
from megasync.comparing.shape import LAYER
from megasync.config.errors import nearest_name, refuse_if

if TYPE_CHECKING:
    from bridge.replicas.pool import ReplicaPool
    from engine.trace import Forward

TRAINER, REPLICA = "trainer", "replica"
LAST_TOKENS = 4  # that are sampled once more, after a prefix that is cached
RMS_APART = 4.0
WEIGHTED = ("_proj", "norm")


@dataclass(frozen=True)
class Passes:
    """Files of the replica's tensors. `cold`: without anything cached, where the first pass found something cached."""

    first: Path
    again: Path
    again_prompt: int
    cold: Path | None


@dataclass(frozen=True)
class Gap:
    """Of log-probs of the response's tokens, in nats: |trainer - replica|."""

    mean: float
    largest: float


@dataclass(frozen=True)
class Found:
    """`judgement` of the first pass, `again` of the replica with its prefix cache."""

    judgement: Judgement
    again: Judgement
    culprit: Local | None
    kind: Kind | None
    gap: Gap
    gap_swapped: Gap | None
    num_swapped: int
    seconds: dict[str, float]
    replica_log_probs: torch.Tensor


@dataclass(frozen=True)
class References:
    """Of each side by its own parameters."""

    trainer: Reference
    replica: Reference
    known: Known

    def of(self, name: str) -> Reference:
        return self.trainer if name == TRAINER else self.replica


def trace_replica(pool: ReplicaPool, response: Response, temperature: float, scratch: Path) -> Passes:
    ids, num_prompt = response.ids, len(response.prompt_ids)
    first, again, cold = (scratch / f"{name}.safetensors" for name in ("first", "again", "cold"))
    (replica,) = pool.members[:1]
    pool.trace(replica, ids, num_prompt, temperature, first)
    again_prompt = max(num_prompt, len(ids) - LAST_TOKENS)
    pool.trace(replica, ids, again_prompt, temperature, again)
    if not int(load_file(first)["positions"][0]):
        return Passes(first, again, again_prompt, None)
    pool.forget_prefixes()
    pool.trace(replica, ids, num_prompt, temperature, cold)
    return Passes(first, again, again_prompt, cold)


def compare(forward: Forward, passes: Passes, response: Response, references: References, swap: str = "") -> Found:
    """`swap`: a module, or the end of its name; all that it fits are computed in float64 in the trainer's model once more."""
    begin = time.monotonic()
    sites = references.trainer.shape.sites
    tensors = forward.trace(response.prompt_ids, response.token_ids)
    traced = time.monotonic()
    trainer = side_of(TRAINER, tensors, response, {})
    num_prompt = len(response.prompt_ids)
    whole = replica_side(passes.cold or passes.first, response, num_prompt, None, trainer)
    first = replica_side(passes.first, response, num_prompt, whole, trainer) if passes.cold else whole
    again = replica_side(passes.again, response, passes.again_prompt, whole, trainer)
    judgement = judge(sites, {TRAINER: (references.trainer, trainer), REPLICA: (references.replica, first)})
    cached = judge(sites, {REPLICA: (references.replica, again)})
    culprit = judgement.culprit or cached.culprit
    kind = None
    if culprit is not None:
        side = trainer if culprit.side == TRAINER else first if judgement.culprit else again
        kind = explain(culprit.site, references.of(culprit.side), side, references.known)
        kind = of_layer(kind, culprit, judgement.wrong, sum(site.endswith(WEIGHTED) for site in sites if ".layers.0." in site))
        if _is_stale(culprit, side, whole, references):
            kind = Kind(STALE_KV, f"of the first {int(side.positions[0])} tokens, from the prefix cache; without it all is right")
    swapped, count = _swapped(forward, response, references, sites, swap) if swap else (None, 0)
    done = time.monotonic()
    theirs = first["log_probs"]
    return Found(
        judgement, cached, culprit, kind, gap(trainer["log_probs"], theirs),
        gap(swapped, theirs) if swapped is not None else None, count,
        {"trainer": traced - begin, "judging": done - traced}, theirs,
    )  # fmt: skip


def _is_stale(culprit: Local, side: Side, whole: Side, references: References) -> bool:
    """Attention that is wrong with what the prefix cache has, and right without."""
    if culprit.side != REPLICA or not culprit.site.endswith("self_attn.attn") or not int(side.positions[0]):
        return False
    return judge([culprit.site], {REPLICA: (references.replica, whole)}).culprit is None


def replica_side(path: Path, response: Response, num_prompt: int, whole: Side | None, trainer: Side) -> Side:
    """`whole`: a pass of all positions, whose keys and values stand for those that a cache had. How far these may be from them is
    told by how far they are from the trainer's (`spread`).
    """
    tensors = load_file(path)
    positions = tensors.pop("positions")
    first = int(positions[0])
    device = trainer["log_probs"].device
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    side = replace(side_of(REPLICA, tensors, response, {}, first), num_prompt=num_prompt)
    if not first or whole is None:
        return side
    names = [name for name in whole.tensors if name.endswith(("rotary_emb.k", "v_proj"))]
    earlier = {name: whole[name][:first] for name in names}
    apart = {name: spread(whole.double(name) - trainer.double(name)) for name in names}
    return replace(side, earlier=earlier, apart=apart, other_earlier={name: trainer[name][:first] for name in names})


def spread(difference: torch.Tensor) -> torch.Tensor:
    """[groups, size]: between two passes' keys or values [positions, groups, size], the largest of a channel, but no less than a
    multiple of the group's rms: rows of one token are rounded alike, so that a channel may agree in all of them by chance.
    """
    rms = difference.square().mean((0, 2)).sqrt()
    return torch.maximum(difference.abs().amax(0), RMS_APART * rms[:, None])


def side_of(
    name: str, tensors: Mapping[str, torch.Tensor], response: Response, earlier: dict[str, torch.Tensor], first: int = 0
) -> Side:
    device = tensors["log_probs"].device
    ids = torch.tensor(response.ids, device=device)
    positions = torch.arange(first, len(ids) - 1, device=device)
    return Side(name, dict(tensors), positions, ids, len(response.prompt_ids), earlier)


def _swapped(
    forward: Forward, response: Response, references: References, sites: list[str], swap: str
) -> tuple[torch.Tensor, int]:
    """Log-probs of the trainer's with these modules' results from the reference, and how many there are."""
    chosen = {site for site in sites if fits(site, swap)}
    ids = torch.tensor(response.ids)

    def other(site: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
        if site not in chosen:
            return None
        device = tensors[site].device
        side = Side(TRAINER, tensors, torch.arange(len(ids), device=device), ids.to(device), len(response.prompt_ids), {})
        return references.trainer.expected(site, side).value

    return forward.trace(response.prompt_ids, response.token_ids, other)["log_probs"], len(chosen)


def check_swap(swap: str, sites: Sequence[str], *, is_exact: bool) -> None:
    """Before anything starts.

    Raises:
        ConfigError: no module fits `swap`, or none of those that do can be replaced.
    """
    chosen = [site for site in sites if fits(site, swap)]
    names = list(dict.fromkeys(LAYER.sub(r"\2", site) for site in sites))
    modules = [site for site in sites if LAYER.fullmatch(site)]
    near = nearest_name(swap, [*names, *modules] if swap.startswith("model.") else names)
    remedy = f"write --swap {near}" if near else "write one of them, or model.layers.N in front of it"
    refuse_if(not chosen, f"--swap {swap}: the model has no such module", nearest=near, choices=", ".join(names), remedy=remedy)
    message = f"--swap {swap}: with model.exact = true attention turns queries and keys itself"
    is_rotary = is_exact and all("rotary_emb." in site for site in chosen)
    refuse_if(is_rotary, message, remedy="write --swap self_attn.attn")


def fits(site: str, swap: str) -> bool:
    """A module's name, its end, or that of what it is a part of."""
    return f".{site}".endswith(f".{swap}") or site.startswith(f"{swap}.")


def gap(own: torch.Tensor, theirs: torch.Tensor) -> Gap:
    apart = (own.double() - theirs.to(own.device).double()).abs()
    return Gap(float(apart.mean()), float(apart.max()))
