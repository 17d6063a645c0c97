"""The compared tensors, in the order in which a decoder computes them, with their names and inputs.

    sites = sites_of(num_layers=2, has_head_norms=True)
    sites["model.layers.0.mlp.act_fn"].inputs     # the sites of gate_proj and up_proj

Names are those of transformers' modules. `NAME:in` is the residual stream before a norm, `self_attn.rotary_emb.q` and `.k` are
the rotated queries and keys, `self_attn.attn` is attention before its output projection. Families are those of engine/trace.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


class Operation(StrEnum):
    EMBEDDING = "embedding"
    SUM = "sum of the residual stream"
    NORM = "RMSNorm"
    LINEAR = "matrix product"
    ROTARY = "rotary embedding"
    ATTENTION = "attention"
    ACTIVATION = "activation times gate"
    LOG_PROBS = "log-softmax at the temperature"


@dataclass(frozen=True)
class Site:
    name: str
    operation: Operation
    inputs: tuple[str, ...]

    @property
    def is_of_response(self) -> bool:
        """Its rows are the response's tokens, not the whole sequence's."""
        return self.name in ("lm_head", "log_probs")


def sites_of(num_layers: int, *, has_head_norms: bool) -> dict[str, Site]:
    """Sites by name, in order. `has_head_norms`: queries and keys are normed in each head, as in Qwen3."""
    found = [Site("model.embed_tokens", Operation.EMBEDDING, ())]
    stream: tuple[str, ...] = ("model.embed_tokens",)  # the terms that the residual stream is the sum of
    for number in range(num_layers):
        layer = f"model.layers.{number}"
        found += _layer(layer, stream, has_head_norms)
        stream = (f"{layer}.post_attention_layernorm:in", f"{layer}.mlp.down_proj")
    found += [
        Site("model.norm:in", Operation.SUM, stream),
        Site("model.norm", Operation.NORM, ("model.norm:in",)),
        Site("lm_head", Operation.LINEAR, ("model.norm",)),
        Site("log_probs", Operation.LOG_PROBS, ("lm_head",)),
    ]
    return {site.name: site for site in found}


def _layer(layer: str, stream: tuple[str, ...], has_head_norms: bool) -> Iterator[Site]:
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    first_norm, second_norm = f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"
    yield Site(f"{first_norm}:in", Operation.SUM, stream)
    yield Site(first_norm, Operation.NORM, (f"{first_norm}:in",))
    for each in "qkv":
        yield Site(f"{attention}.{each}_proj", Operation.LINEAR, (first_norm,))
    for each in "qk" if has_head_norms else "":
        yield Site(f"{attention}.{each}_norm", Operation.NORM, (f"{attention}.{each}_proj",))
    for each in "qk":
        source = f"{attention}.{each}_{'norm' if has_head_norms else 'proj'}"
        yield Site(f"{attention}.rotary_emb.{each}", Operation.ROTARY, (source,))
    inputs = tuple(f"{attention}.{name}" for name in ("rotary_emb.q", "rotary_emb.k", "v_proj"))
    yield Site(f"{attention}.attn", Operation.ATTENTION, inputs)
    yield Site(f"{attention}.o_proj", Operation.LINEAR, (f"{attention}.attn",))
    yield Site(f"{second_norm}:in", Operation.SUM, (f"{first_norm}:in", f"{attention}.o_proj"))
    yield Site(second_norm, Operation.NORM, (f"{second_norm}:in",))
    yield Site(f"{mlp}.gate_proj", Operation.LINEAR, (second_norm,))
    yield Site(f"{mlp}.up_proj", Operation.LINEAR, (second_norm,))
    yield Site(f"{mlp}.act_fn", Operation.ACTIVATION, (f"{mlp}.gate_proj", f"{mlp}.up_proj"))
    yield Site(f"{mlp}.down_proj", Operation.LINEAR, (f"{mlp}.act_fn",))


def layer_of(name: str) -> int | None:
    match = LAYER.match(name)
    return int(match[1]) if match else None
