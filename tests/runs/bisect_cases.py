"""Faults in the trainer's model, and what is found of them; run on a rank of its own (tests/support/ranks.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.trace import Forward
from megasync.tools.bisect.choose import choose
from megasync.tools.bisect.command import trainer
from megasync.tools.bisect.compare import Finding, Passes, compare
from megasync.tools.bisect.response import Response
from megasync.tools.bisect.text import as_json, lines

Undo = Callable[[], None]


def outcome(found: Finding) -> dict[str, Any]:
    gaps = {"gap": found.gap.mean, "swapped": found.gap_swapped.mean if found.gap_swapped else None}
    worst = max(found.judgement.locals, key=lambda each: each.ratio)
    wrong = [each.site for each in found.judgement.wrong]
    return {"culprit": found.culprit, "stale": found.is_stale, "wrong": wrong, "worst": worst.ratio, **gaps}


def replica_faults(run: Path, passes: dict[str, Passes], response: Response, scratch: Path) -> dict[str, dict[str, Any]]:
    """The findings for a sound trainer and each of these traces of replicas."""
    with trainer(choose(run, scratch, None, [])) as (forward, references):
        return {name: outcome(compare(forward, each, response, references)) for name, each in passes.items()}


def trainer_faults(run: Path, lora_run: Path, passes: Passes, response: Response, scratch: Path) -> dict[str, dict[str, Any]]:
    """Of each fault alone, and without any; of one also what it adds to the gap."""
    chosen = choose(run, scratch, None, [])
    with trainer(chosen) as (forward, references):
        sound = compare(forward, passes, response, references, swap="mlp.act_fn")
        found = {"none": outcome(sound), "text": {"lines": list(lines(chosen.name, response, sound, "mlp.act_fn"))}}
        for name, fault in FAULTS.items():
            undo = fault(forward)
            swap = "model.layers.1.self_attn.q_norm" if name == "missing q-norm" else ""
            seen = compare(forward, passes, response, references, swap)
            found[name] = outcome(seen)
            if swap:
                found[name]["lines"] = list(lines(chosen.name, response, seen, swap))
                found[name]["json"] = json.dumps(as_json(chosen.name, response, seen))
            undo()
        found["sound again"] = outcome(compare(forward, passes, response, references))
    overrides = ["engine.lora.rank=8", "engine.lora.alpha=12", "rollout.temperature=0.7"]
    with trainer(choose(lora_run, scratch, None, overrides)) as (forward, references):
        found["adapter"] = outcome(compare(forward, passes, response, references))
        forward.model.decoder.layers[1].mlp.linear_fc2.lora_scale *= 2
        found["LoRA scale"] = outcome(compare(forward, passes, response, references))
    return found


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


def _transposed_head(forward: Forward) -> Undo:
    """Head 2 of four, in two groups of two: rows of linear_qkv are queries, keys and values of each group."""
    weight = forward.model.decoder.layers[1].self_attention.linear_qkv.weight
    head = weight.data.view(2, 4, 32, 128)[1, 0]
    return _write(head, head.t().reshape(head.shape).clone())


def _reordered_head(forward: Forward) -> Undo:
    weight = forward.model.decoder.layers[2].self_attention.linear_qkv.weight
    head = weight.data.view(2, 4, 32, 128)[0, 1]
    return _write(head, torch.cat([head[0::2], head[1::2]]))


def _theta(forward: Forward) -> Undo:
    embedding = forward.model.rotary_pos_emb
    undo = _set(embedding, "inv_freq", 20000.0 ** -(torch.arange(0, 32, 2, dtype=torch.float) / 32))
    embedding.table = None

    def both() -> None:
        undo()
        embedding.table = None

    return both


def _missing_norm(forward: Forward) -> Undo:
    norm = forward.model.decoder.layers[1].self_attention.q_layernorm
    norm.forward = lambda x: x
    return lambda: delattr(norm, "forward")


def _stale_layer(forward: Forward) -> Undo:
    """All weights of a layer are others."""
    parameters = list(forward.model.decoder.layers[3].parameters())
    undo = [_write(each, torch.randn(each.shape, generator=torch.Generator().manual_seed(0)).mul_(0.02)) for each in parameters]
    return lambda: [each() for each in undo][-1]


def _element(forward: Forward) -> Undo:
    weight = forward.model.decoder.layers[0].self_attention.linear_proj.weight
    return _write(weight.data[5, 7:8], weight.data[5, 7:8] + 0.05)


def _low_softmax(forward: Forward) -> Undo:
    core = forward.model.decoder.layers[2].self_attention.core_attention

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -torch.inf).bfloat16().softmax(-1).float() @ v.repeat_interleave(2, 1)

    core._dense = dense
    return lambda: delattr(core, "_dense")


def _swapped(forward: Forward) -> Undo:
    weight = forward.model.decoder.layers[2].mlp.linear_fc1.weight
    return _write(weight, torch.cat(list(reversed(weight.data.chunk(2)))))


FAULTS: dict[str, Callable[[Forward], Undo]] = {
    "transposed head": _transposed_head,
    "reordered head": _reordered_head,
    "eps": lambda forward: _set(forward.model.decoder.layers[2].input_layernorm, "eps", 1e-5),
    "rope theta": _theta,
    "missing q-norm": _missing_norm,
    "stale layer": _stale_layer,
    "one element": _element,
    "bf16 softmax": _low_softmax,
    "temperature": lambda forward: _set(forward, "temperature", 1.0),
    "window": lambda forward: _set(forward.model.decoder.layers[1].self_attention.core_attention, "window", 16),
    "gate and up": _swapped,
}
