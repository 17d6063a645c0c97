"""What each module should have given for what came into it, in float64, and how far rounding may take it from that.

So each module of each side is judged by itself, whatever came before it: what is too far off is wrong there and nowhere else.

    value, bound = Reference(shape, parameters, temperature).expected("model.layers.0.mlp.act_fn", side)

A bound is generous: some roundings of the result to its dtype, and of the float32 sums on the way, without cancellation. Leaves
out the formulas (formulas.py), and what is wrong where a bound is passed (kinds.py). Pure functions of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from megasync.comparing.formulas import UNIT_FLOAT32, attend, log_probs, rms_norm, rotate, sum_of_exps_bound
from megasync.comparing.shape import Parameters, Shape

RESULT_ROUNDINGS, SUM_ROUNDINGS = 4.0, 16.0
PASSES_APART = 2.0  # a third pass may be farther from either than they are from each other


class Expected(NamedTuple):
    value: torch.Tensor  # float64, as the site's
    bound: torch.Tensor  # of the error of each element; broadcasts


@dataclass(frozen=True)
class Side:
    """What one side computed of a sequence: rows are of `positions` [T], increasing; of `lm_head` and `log_probs` the response's.

    `earlier`: keys and values of the positions before, by site, where a cache had them; else {}. They are of another pass, and
    `apart` is how far two passes' are apart, by site [groups, size]: what is in the cache was rounded otherwise. `other_earlier`:
    the other side's, of the same positions.
    """

    name: str
    tensors: dict[str, torch.Tensor]
    positions: torch.Tensor
    token_ids: torch.Tensor  # int64, of the whole sequence
    num_prompt: int
    earlier: dict[str, torch.Tensor]
    apart: dict[str, torch.Tensor] = field(default_factory=dict)
    other_earlier: dict[str, torch.Tensor] = field(default_factory=dict)

    def __getitem__(self, site: str) -> torch.Tensor:
        return self.tensors[site]

    def double(self, site: str) -> torch.Tensor:
        return self.tensors[site].double()

    def with_earlier(self, site: str) -> torch.Tensor:
        """float64, of all positions from 0 on: what the cache had comes from elsewhere."""
        own = self.double(site)
        return own if site not in self.earlier else torch.cat([self.earlier[site].double().to(own), own])

    def cut(self, rows: slice) -> Side:
        """With `lm_head` and `log_probs`, and what they are of, of these rows of the response alone."""
        first = len(self.positions) - len(self.tensors["log_probs"])
        of_rows = {name: self.tensors[name][rows] for name in ("lm_head", "log_probs")}
        hidden = self.tensors["model.norm"][first:][rows]
        return replace(self, tensors={**of_rows, "model.norm": hidden})


@dataclass(frozen=True)
class Reference:
    """Of one side: its parameters are as that side has them, an adapter merged or not."""

    shape: Shape
    parameters: Parameters
    temperature: float

    def expected(self, site: str, side: Side) -> Expected:
        unit = torch.finfo(side[site].dtype).eps / 2
        value, slack = self._value(site, side)
        return Expected(value, RESULT_ROUNDINGS * (unit * value.abs() + _spacing(side[site])) + slack)

    def _value(self, site: str, side: Side) -> tuple[torch.Tensor, torch.Tensor]:
        """And what may come on top of the rounding of the result."""
        for ending, function in self._by_ending.items():
            if site.endswith(ending):
                return function(site, side)
        return self._linear(site, side)

    @property
    def _by_ending(self) -> dict[str, Callable[[str, Side], tuple[torch.Tensor, torch.Tensor]]]:
        return {
            "embed_tokens": self._embedding,
            "norm:in": self._residual,
            "norm": self._norm,
            "rotary_emb.q": self._rotated,
            "rotary_emb.k": self._rotated,
            "self_attn.attn": self._attention,
            "act_fn": self._activation,
            "log_probs": self._log_probs,
        }

    # ------------------------------------------------------------------------------------------------ by kind of module

    def _embedding(self, site: str, side: Side) -> tuple[torch.Tensor, torch.Tensor]:
        value = self.parameters[f"{site}.weight"][side.token_ids[side.positions]]
        return value, torch.zeros_like(value)

    def _residual(self, site: str, side: Side) -> tuple[torch.Tensor, torch.Tensor]:
        sources = residual_sources(site, self.shape)
        value = torch.stack([side.double(source) for source in sources]).sum(0)
        return value, torch.zeros_like(value)

    def _norm(self, site: str, side: Side) -> tuple[torch.Tensor, torch.Tensor]:
        source = norm_source(site)
        value = rms_norm(side.double(source), self.parameters[f"{site}.weight"], self.shape.eps)
        return value, SUM_ROUNDINGS * UNIT_FLOAT32 * value.abs()

    def rounded_norms(self, site: str, side: Side) -> list[torch.Tensor]:
        """What a norm that is right gives in the side's dtype: rounded at its end, or before its weights, too."""
        dtype, weight = side[site].dtype, self.parameters[f"{site}.weight"]
        normed = rms_norm(side.double(norm_source(site)), torch.ones_like(weight), self.shape.eps)
        return [each.to(dtype).double() for each in (normed * weight, normed.to(dtype).double() * weight)]

    def _linear(self, site: str, side: Side) -> tuple[torch.Tensor, torch.Tensor]:
        x, unit = linear_input(site, side), torch.finfo(side[site].dtype).eps / 2
        weight = self.weight(site)
        value, slack = x @ weight.t(), SUM_ROUNDINGS * UNIT_FLOAT32 * torch.outer(x.norm(dim=-1), weight.norm(dim=-1))
        if f"{site}.bias" in self.parameters:
            value = value + self.parameters[f"{site}.bias"]
        if (factors := self.parameters.factors(site)) is not None:
            a, b, scale = factors
            low = scale * (x @ a.t())
            value, slack = value + low @ b.t(), slack + 2 * RESULT_ROUNDINGS * unit * (low.abs() @ b.abs().t())
        slack = slack + RESULT_ROUNDINGS * unit * value.square().mean(-1, keepdim=True).sqrt()
        shape = side[site].shape
        return value.view(shape), slack.view(shape)

    def weight(self, site: str) -> torch.Tensor:
        """Of a linear, without an adapter."""
        name = f"{site}.weight"
        if site == "lm_head" and (self.shape.is_tied or name not in self.parameters):
            name = "model.embed_tokens.weight"
        return self.parameters[name]

    def _rotated(self, site: str, side: Side) -> tuple[torch.Tensor, torch.Tensor]:
        x, unit = side.double(rotary_input(site, self.shape)), torch.finfo(side[site].dtype).eps / 2
        value = rotate(x, side.positions, self.shape.frequencies, self.shape.rope_scale)
        both = x.abs() + torch.roll(x.abs(), x.shape[-1] // 2, -1)
        relative = RESULT_ROUNDINGS * unit + SUM_ROUNDINGS * UNIT_FLOAT32 * (1 + side.positions.double())
        return value, relative[:, None, None] * both * abs(self.shape.rope_scale)

    def _attention(self, site: str, side: Side) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = attention_inputs(site, side)
        scale = self.shape.head_size**-0.5
        out, weighed = attend(query, key, value, side.positions, scale, self.shape.window(site))
        unit = torch.finfo(side[site].dtype).eps / 2
        largest = scale * query.norm(dim=-1, keepdim=True) * key.norm(dim=-1).max()
        slack = (RESULT_ROUNDINGS * unit + SUM_ROUNDINGS * UNIT_FLOAT32 * (1 + largest)) * weighed
        return out, slack + cached_slack(site, side, scale * query.norm(dim=-1, keepdim=True), weighed)

    def _activation(self, site: str, side: Side) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = (side.double(site.replace("act_fn", f"{name}_proj")) for name in ("gate", "up"))
        value = F.silu(gate) * up
        return value, SUM_ROUNDINGS * UNIT_FLOAT32 * value.abs() + _spacing(side[site]) * up.abs()

    def _log_probs(self, site: str, side: Side) -> tuple[torch.Tensor, torch.Tensor]:
        logits = side.double("lm_head")
        value = log_probs(logits, side.token_ids[side.num_prompt :][: len(logits)], self.temperature)
        # vLLM's second model runner rounds logits over the temperature to their dtype
        unit = torch.finfo(side["lm_head"].dtype).eps if self.temperature != 1 else 0.0
        largest, rounding = logits.abs().amax(-1) / self.temperature, SUM_ROUNDINGS * UNIT_FLOAT32
        return value, rounding + (rounding + unit) * largest + sum_of_exps_bound(logits / self.temperature)


def _spacing(tensor: torch.Tensor) -> float:
    """Of the smallest numbers of its dtype: in float16 not far below 1e-7."""
    found = torch.finfo(tensor.dtype)
    return float(found.smallest_normal * found.eps)


# ---------------------------------------------------------------------------------------------------- where inputs come from


def residual_sources(site: str, shape: Shape) -> list[str]:
    """What the residual stream before a norm is the sum of."""
    norm = site.removesuffix(":in")
    if norm.endswith("post_attention_layernorm"):
        layer = norm.removesuffix(".post_attention_layernorm")
        return [f"{layer}.input_layernorm:in", f"{layer}.self_attn.o_proj"]
    number = shape.num_layers if norm == "model.norm" else int(norm.split(".")[2])
    former = f"model.layers.{number - 1}"
    return [f"{former}.post_attention_layernorm:in", f"{former}.mlp.down_proj"] if number else ["model.embed_tokens"]


def sources(site: str, shape: Shape) -> list[str]:
    """All sites whose tensors a site's reference is computed of."""
    own = site.rpartition(".")[0]
    by_ending = {
        "embed_tokens": [],
        "log_probs": ["lm_head"],
        "rotary_emb.q": [rotary_input(site, shape)],
        "rotary_emb.k": [rotary_input(site, shape)],
        "self_attn.attn": [f"{own}.{name}" for name in ("rotary_emb.q", "rotary_emb.k", "v_proj")],
        "act_fn": [f"{own}.{name}" for name in ("gate_proj", "up_proj")],
    }
    if site.endswith(":in"):
        return residual_sources(site, shape)
    found = next((names for ending, names in by_ending.items() if site.endswith(ending)), None)
    return found if found is not None else [norm_source(site) if site.endswith("norm") else linear_source(site)]


def norm_source(site: str) -> str:
    if site.endswith(("q_norm", "k_norm")):
        return site.replace("_norm", "_proj")
    return f"{site}:in"


def linear_source(site: str) -> str:
    layer, _, name = site.rpartition(".")
    if name in ("q_proj", "k_proj", "v_proj"):
        return f"{layer.removesuffix('.self_attn')}.input_layernorm"
    if name in ("gate_proj", "up_proj"):
        return f"{layer.removesuffix('.mlp')}.post_attention_layernorm"
    return {"o_proj": f"{layer}.attn", "down_proj": f"{layer}.act_fn"}.get(name, "model.norm")


def linear_input(site: str, side: Side) -> torch.Tensor:
    """float64 [rows, in]."""
    x = side.double(linear_source(site)).flatten(1)
    return x[len(x) - len(side[site]) :]  # of the output layer: rows of the response


def rotary_input(site: str, shape: Shape) -> str:
    kind = site[-1]
    return site.replace(f"rotary_emb.{kind}", f"{kind}_norm" if shape.has_head_norms else f"{kind}_proj")


def attention_inputs(site: str, side: Side) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [T, heads, size], keys and values [positions, groups, size], float64."""
    own = site.removesuffix(".attn")
    keys, values = (side.with_earlier(f"{own}.{name}") for name in ("rotary_emb.k", "v_proj"))
    return side.double(f"{own}.rotary_emb.q"), keys, values


def cached_slack(site: str, side: Side, scaled: torch.Tensor, weighed: torch.Tensor) -> torch.Tensor:
    """[T, heads, size]: what attention may be off by, as keys and values that it had from a cache were rounded in another pass.

    `scaled` [T, heads, 1]: norms of the queries times the softmax's scale. `weighed`: attention over |value|. A result is off by
    no more than the values are, and by twice what the scores are, times |value|.
    """
    own = site.removesuffix(".attn")
    if f"{own}.v_proj" not in side.apart:
        return torch.zeros_like(weighed)
    keys, values = (side.apart[f"{own}.{name}"].to(weighed) for name in ("rotary_emb.k", "v_proj"))
    heads = weighed.shape[1] // len(keys)  # of a group
    keys, values = (each.repeat_interleave(heads, 0) for each in (keys, values))
    slack: torch.Tensor = PASSES_APART * (values + 2 * scaled * keys.norm(dim=-1, keepdim=True) * weighed)
    return slack
