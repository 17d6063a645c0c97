"""Both sides compute one response and are judged; the part of single modules in the gap of log-probs.

    passes = trace_replica(pool, response, temperature, scratch)      # while there is a replica
    found = compare(forward, passes, response, References(...))       # the trainer's model may come after it
    found.culprit

A replica computes the response twice: once whole, and the last tokens again with its prefix cache. Leaves out which
weights (choose.py) and the text (text.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from megasync.config.errors import nearest_name, refuse_if
from megasync.tools.bisect.judge import Judgement, Local, judge, local_error
from megasync.tools.bisect.reference import Reference
from megasync.tools.bisect.response import Response
from megasync.tools.bisect.side import REPLICA, TRAINER, Side
from megasync.tools.bisect.sites import LAYER, Operation, Site

if TYPE_CHECKING:
    from bridge.replicas.pool import ReplicaPool
    from engine.trace import Forward

LAST_TOKENS = 4  # that are sampled once more, after a prefix that is cached
RMS_SPREAD = 4.0


@dataclass(frozen=True)
class Passes:
    """Files of the replica's tensors. `cold`: without anything cached, where the first pass found something cached."""

    first: Path
    again: Path
    again_prompt: int
    cold: Path | None


@dataclass(frozen=True)
class Gap:
    """Differences of the log-probs of the response's tokens, in nats: |trainer - replica|."""

    mean: float
    largest: float


@dataclass(frozen=True)
class Finding:
    """`is_stale`: the culprit is attention that is right once the prefix cache is emptied."""

    judgement: Judgement
    culprit: Local | None
    is_stale: bool
    gap: Gap
    gap_swapped: Gap | None
    num_swapped: int
    seconds: dict[str, float]
    replica_log_probs: torch.Tensor


@dataclass(frozen=True)
class References:
    """The references of both sides, each with its side's weights."""

    trainer: Reference
    replica: Reference


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


def compare(forward: Forward, passes: Passes, response: Response, references: References, swap: str = "") -> Finding:
    """`swap`: a module, or the end of its name; all that it fits are computed in float64 in the trainer's model once more."""
    begin = time.monotonic()
    sites = list(references.trainer.sites.values())
    trainer = Side.of(TRAINER, forward.trace(response.prompt_ids, response.token_ids), response)
    traced = time.monotonic()
    num_prompt = len(response.prompt_ids)
    whole = replica_side(passes.cold or passes.first, response, num_prompt, None, trainer)
    first = replica_side(passes.first, response, num_prompt, whole, trainer) if passes.cold else whole
    again = replica_side(passes.again, response, passes.again_prompt, whole, trainer)
    own, theirs = references.trainer, references.replica
    judgement = judge(sites, [(own, trainer), (theirs, first), (theirs, again)])
    is_stale = judgement.culprit is not None and _is_stale(judgement.culprit, whole, theirs)
    swapped, count = _swapped(forward, response, own, swap) if swap else (None, 0)
    return Finding(
        judgement=judgement,
        culprit=judgement.culprit,
        is_stale=is_stale,
        gap=gap(trainer["log_probs"], first["log_probs"]),
        gap_swapped=gap(swapped, first["log_probs"]) if swapped is not None else None,
        num_swapped=count,
        seconds={"trainer's pass": traced - begin, "judging": time.monotonic() - traced},
        replica_log_probs=first["log_probs"],
    )


def _is_stale(culprit: Local, whole: Side, reference: Reference) -> bool:
    """`whole`: the replica's pass without a cache."""
    is_attention = culprit.side == REPLICA and culprit.operation == Operation.ATTENTION
    return is_attention and not local_error(reference.sites[culprit.site], reference, whole).is_wrong


def replica_side(path: Path, response: Response, num_prompt: int, whole: Side | None, trainer: Side) -> Side:
    """`whole`: a pass of all positions, whose keys and values replace the cached ones. Their difference from the
    trainer's says how far the cached ones may differ from them (`spread`).
    """
    device = trainer["log_probs"].device
    tensors = {name: tensor.to(device) for name, tensor in load_file(path).items()}
    first = int(tensors.pop("positions")[0])
    side = replace(Side.of(REPLICA, tensors, response, first), num_prompt=num_prompt)
    if not first or whole is None:
        return side
    names = [name for name in whole.tensors if name.endswith(("rotary_emb.k", "v_proj"))]
    earlier = {name: whole[name][:first] for name in names}
    spreads = {name: spread(whole.double(name) - trainer.double(name)) for name in names}
    return replace(side, earlier=earlier, spread=spreads, other_earlier={name: trainer[name][:first] for name in names})


def spread(difference: torch.Tensor) -> torch.Tensor:
    """[groups, size]: between two passes' keys or values [positions, groups, size], the largest of a channel, but no less than a
    multiple of the group's rms: rows of one token are rounded alike, so that a channel may agree in all of them by chance.
    """
    rms = difference.square().mean((0, 2)).sqrt()
    return torch.maximum(difference.abs().amax(0), RMS_SPREAD * rms[:, None])


def _swapped(forward: Forward, response: Response, reference: Reference, swap: str) -> tuple[torch.Tensor, int]:
    """The trainer's log-probs with these modules' results from the reference, and the number of modules."""
    chosen = {name: site for name, site in reference.sites.items() if fits(name, swap)}

    def other(name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
        if name not in chosen:
            return None
        return reference.expected(chosen[name], Side.of(TRAINER, tensors, response)).value

    return forward.trace(response.prompt_ids, response.token_ids, other)["log_probs"], len(chosen)


def check_swap(swap: str, sites: Mapping[str, Site], *, is_exact: bool) -> None:
    """Before anything starts.

    Raises:
        ConfigError: no module fits `swap`, or none that does can be replaced.
    """
    chosen = [name for name in sites if fits(name, swap)]
    names = list(dict.fromkeys(LAYER.sub(r"\2", name) for name in sites))
    modules = [name for name in sites if LAYER.fullmatch(name)]
    near = nearest_name(swap, [*names, *modules] if swap.startswith("model.") else names)
    remedy = f"write --swap {near}" if near else "write one of them, or model.layers.N in front of it"
    refuse_if(not chosen, f"--swap {swap}: the model has no such module", nearest=near, choices=", ".join(names), remedy=remedy)
    message = f"--swap {swap}: with model.exact = true the rotary embedding is a part of attention"
    is_rotary = is_exact and all("rotary_emb." in name for name in chosen)
    refuse_if(is_rotary, message, remedy="write --swap self_attn.attn")


def fits(name: str, swap: str) -> bool:
    """A module's name, its end, or that of a module that it is a part of."""
    return f".{name}".endswith(f".{swap}") or name.startswith(f"{swap}.")


def gap(own: torch.Tensor, theirs: torch.Tensor) -> Gap:
    differences = (own.double() - theirs.to(own.device).double()).abs()
    return Gap(float(differences.mean()), float(differences.max()))
