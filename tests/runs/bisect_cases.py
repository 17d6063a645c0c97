"""Faults in the trainer's model, and what is found of them; run on a rank of its own (tests/support/ranks.py)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine.config import ParallelConfig
from engine.runtime import parallel
from engine.trace import Forward
from megasync.comparing.trainer_side import references
from megasync.comparing.compare import Found, Passes, compare
from megasync.comparing.response import Response
from megasync.comparing.text import as_json, lines
from megasync.comparing.weights import Chosen, choose

Undo = Callable[[], None]


def outcome(found: Found) -> dict[str, Any]:
    culprit, kind = found.culprit, found.kind
    told = {"gap": found.gap.mean, "swapped": found.gap_swapped.mean if found.gap_swapped else None}
    if culprit is None or kind is None:
        worst = max(each.ratio for each in (*found.judgement.locals, *found.again.locals))
        return {"site": "", "worst": worst, **told}
    place = {"position": culprit.position, "element": culprit.element, "side": culprit.side}
    return {"site": culprit.site, "kind": kind.name, "detail": kind.detail, **place, **told}


def replica_faults(run: Path, passes: dict[str, Passes], response: Response, scratch: Path) -> dict[str, dict[str, Any]]:
    """What is found of a sound trainer and each of these traces of replicas."""
    with forwards(run, scratch) as (chosen, forward):
        refs = references(chosen, keep_bytes=0)
        return {name: outcome(compare(forward, each, response, refs)) for name, each in passes.items()}


def trainer_faults(run: Path, lora_run: Path, passes: Passes, response: Response, scratch: Path) -> dict[str, dict[str, Any]]:
    """Of each fault alone, and without any; of one also what it adds to the gap."""
    found = {}
    with forwards(run, scratch) as (chosen, forward):
        refs = references(chosen, keep_bytes=0)
        found["none"] = outcome(sound := compare(forward, passes, response, refs, swap="mlp.act_fn"))
        found["told"] = {"lines": list(lines(chosen.name, response, sound, "mlp.act_fn"))}
        for name, fault in FAULTS.items():
            undo = fault(forward, chosen)
            swap = "model.layers.1.self_attn.q_norm" if name == "missing q-norm" else ""
            seen = compare(forward, passes, response, refs, swap)
            found[name] = outcome(seen)
            if swap:
                found[name]["lines"] = list(lines(chosen.name, response, seen, swap))
                found[name]["json"] = json.dumps(as_json(chosen.name, response, seen))
            undo()
        found["sound again"] = outcome(compare(forward, passes, response, refs))
    with forwards(lora_run, scratch, "engine.lora.rank=8", "engine.lora.alpha=12", "rollout.temperature=0.7") as (
        chosen,
        forward,
    ):
        refs = references(chosen, keep_bytes=0)
        found["adapter"] = outcome(compare(forward, passes, response, refs))
        forward.model.decoder.layers[1].mlp.linear_fc2.lora_scale *= 2
        found["LoRA scale"] = outcome(compare(forward, passes, response, refs))
    return found


@contextmanager
def forwards(run: Path, scratch: Path, *overrides: str) -> Iterator[tuple[Chosen, Forward]]:
    parallel.initialize(ParallelConfig(), 0)
    try:
        chosen = choose(run, scratch, None, list(overrides))
        temperature = chosen.config.rollout.temperature
        yield chosen, Forward(chosen.config.model, chosen.config.engine, temperature=temperature, **chosen.engine_arguments)
    finally:
        parallel.shutdown()


# ---------------------------------------------------------------------------------------------------- faults


def _set(owner: Any, name: str, value: Any) -> Undo:
    former = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, former)


def _write(tensor: torch.Tensor, value: torch.Tensor) -> Undo:
    former = tensor.detach().clone()
    tensor.data.copy_(value)

    def undo() -> None:
        tensor.data.copy_(former)

    return undo


def _transposed_head(forward: Forward, _: Chosen) -> Undo:
    """Head 2 of four, in two groups of two: rows of linear_qkv are queries, keys and values of each group."""
    weight = forward.model.decoder.layers[1].self_attention.linear_qkv.weight
    head = weight.data.view(2, 4, 32, 128)[1, 0]
    return _write(head, head.t().reshape(head.shape).clone())


def _reordered_head(forward: Forward, _: Chosen) -> Undo:
    weight = forward.model.decoder.layers[2].self_attention.linear_qkv.weight
    head = weight.data.view(2, 4, 32, 128)[0, 1]
    return _write(head, torch.cat([head[0::2], head[1::2]]))


def _theta(forward: Forward, _: Chosen) -> Undo:
    embedding = forward.model.rotary_pos_emb
    undo = _set(embedding, "inv_freq", 20000.0 ** -(torch.arange(0, 32, 2, dtype=torch.float) / 32))
    embedding.table = None

    def both() -> None:
        undo()
        embedding.table = None

    return both


def _missing_norm(forward: Forward, _: Chosen) -> Undo:
    norm = forward.model.decoder.layers[1].self_attention.q_layernorm
    norm.forward = lambda x: x
    return lambda: delattr(norm, "forward")


def _stale_layer(forward: Forward, chosen: Chosen) -> Undo:
    (former,) = chosen.formers.values()
    config = chosen.config
    other = Forward(config.model, config.engine, temperature=1.0, weights_path=former).model.decoder.layers[3]
    layer = forward.model.decoder.layers[3]
    now = {name: tensor.clone() for name, tensor in layer.state_dict().items() if tensor is not None}
    layer.load_state_dict(other.state_dict())

    def undo() -> None:
        layer.load_state_dict(now)

    return undo


def _element(forward: Forward, _: Chosen) -> Undo:
    weight = forward.model.decoder.layers[0].self_attention.linear_proj.weight
    return _write(weight.data[5, 7:8], weight.data[5, 7:8] + 0.05)


def _low_softmax(forward: Forward, _: Chosen) -> Undo:
    core = forward.model.decoder.layers[2].self_attention.core_attention

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -torch.inf).bfloat16().softmax(-1).float() @ v.repeat_interleave(2, 1)

    core._dense = dense
    return lambda: delattr(core, "_dense")


def _swapped(forward: Forward, _: Chosen) -> Undo:
    weight = forward.model.decoder.layers[2].mlp.linear_fc1.weight
    return _write(weight, torch.cat(list(reversed(weight.data.chunk(2)))))


FAULTS: dict[str, Callable[[Forward, Chosen], Undo]] = {
    "transposed head": _transposed_head,
    "reordered head": _reordered_head,
    "eps": lambda forward, _: _set(forward.model.decoder.layers[2].input_layernorm, "eps", 1e-5),
    "rope theta": _theta,
    "missing q-norm": _missing_norm,
    "stale layer": _stale_layer,
    "one element": _element,
    "bf16 softmax": _low_softmax,
    "temperature": lambda forward, _: _set(forward, "temperature", 1.0),
    "window": lambda forward, _: _set(forward.model.decoder.layers[1].self_attention.core_attention, "window", 16),
    "gate and up": _swapped,
}
