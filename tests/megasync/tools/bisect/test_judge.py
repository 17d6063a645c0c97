"""A module is judged by what it got and gave; no model is run.

With real models: test_comparing.py, tests/runs/test_bisect.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.tools.bisect.compare import spread
from megasync.tools.bisect.judge import judge, local_error, systematic
from megasync.tools.bisect.reference import Reference, sum_of_exps_bound
from megasync.tools.bisect.side import Side
from tests.support.tiny_models import YARN, write_tiny_model

NUM_TOKENS, NUM_PROMPT = 60, 50
Fault = Callable[[Reference, Side, torch.Tensor], torch.Tensor]  # the results in place of the right ones
LAYER = "model.layers.1"
ATTENTION = f"{LAYER}.self_attn"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Biases, and an MLP as wide as the model: square weights."""
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), "qwen2", num_hidden_layers=3, intermediate_size=128)
    return Reference(folder, torch.float32, torch.device("cpu"), 0.7)


def random_side(reference: Reference) -> Side:
    """Results of all modules, none of which is right."""
    generator, config = torch.Generator().manual_seed(0), reference.model.config
    heads = dict.fromkeys(("q_proj", "attn", "rotary_emb.q"), config.num_attention_heads)
    heads |= dict.fromkeys(("k_proj", "v_proj", "rotary_emb.k"), config.num_key_value_heads)

    def size(site: str) -> tuple[int, ...]:
        groups = next((number for name, number in heads.items() if site.endswith(f".{name}")), None)
        if groups is not None:
            return NUM_TOKENS - 1, groups, config.hidden_size // config.num_attention_heads
        rows = NUM_TOKENS - NUM_PROMPT if site in ("lm_head", "log_probs") else NUM_TOKENS - 1
        return (rows,) if site == "log_probs" else (rows, 128)

    tensors = {site: torch.randn(size(site), generator=generator) for site in reference.sites}
    return Side("replica", tensors, torch.arange(NUM_TOKENS - 1), torch.arange(NUM_TOKENS) * 7 % 100, NUM_PROMPT)


def right(reference: Reference, side: Side, site: str) -> torch.Tensor:
    return reference.expected(reference.sites[site], side).value


def by_weight(change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    def fault(reference: Reference, side: Side, _: torch.Tensor) -> torch.Tensor:
        return side.double(f"{LAYER}.mlp.act_fn") @ change(reference.weights[f"{LAYER}.mlp.down_proj"]["weight"]).t()

    return fault


def of_part(part: tuple[object, ...], change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    def fault(_: Reference, __: Side, value: torch.Tensor) -> torch.Tensor:
        value[part] = change(value[part])
        return value

    return fault


def int8(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return scale * (weight / scale).round()


def float8(weight: torch.Tensor) -> torch.Tensor:
    return weight.float().to(torch.float8_e4m3fn).double()


def bias(reference: Reference) -> torch.Tensor:
    return reference.weights[f"{ATTENTION}.k_proj"]["bias"].view(2, -1)


def with_other_layer(site: str) -> Fault:
    def fault(reference: Reference, side: Side, _: torch.Tensor) -> torch.Tensor:
        other = side.tensors | {name.replace("layers.1", "layers.2"): each for name, each in side.tensors.items()}
        return right(reference, replace(side, tensors=other), site.replace("layers.1", "layers.2"))

    return fault


def with_changed(site: str, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    """Right, had one of the inputs been another."""

    def fault(reference: Reference, side: Side, _: torch.Tensor) -> torch.Tensor:
        return right(reference, replace(side, tensors=side.tensors | {name: change(side.double(name))}), site)

    return fault


def relu(_: Reference, side: Side, __: torch.Tensor) -> torch.Tensor:
    return F.relu(side.double(f"{LAYER}.mlp.gate_proj")) * side.double(f"{LAYER}.mlp.up_proj")


POST = f"{LAYER}.post_attention_layernorm:in"
FAULTS: dict[str, tuple[str, Fault]] = {
    "keys and values swapped": (f"{ATTENTION}.k_proj", lambda reference, side, _: right(reference, side, f"{ATTENTION}.v_proj")),
    "a bias left out": (f"{ATTENTION}.k_proj", lambda reference, _, value: value - bias(reference)),
    "a head's rows in another order": (f"{ATTENTION}.q_proj", of_part((slice(None), 1), lambda part: part.flip(-1))),
    "one element of a bias": (f"{ATTENTION}.v_proj", of_part((slice(None), 1, 5), lambda part: part + 0.05)),
    "one row of a weight": (f"{LAYER}.mlp.up_proj", of_part((slice(None), 17), lambda part: part * 1.01)),
    "a transposed weight": (f"{LAYER}.mlp.down_proj", by_weight(torch.t)),
    "weights in int8": (f"{LAYER}.mlp.down_proj", by_weight(int8)),
    "weights in bfloat16": (f"{LAYER}.mlp.down_proj", by_weight(lambda weight: weight.bfloat16().double())),
    "a linear of another layer": (f"{ATTENTION}.q_proj", with_other_layer(f"{ATTENTION}.q_proj")),
    "a norm of another layer": (f"{LAYER}.input_layernorm", with_other_layer(f"{LAYER}.input_layernorm")),
    "zeros": (f"{LAYER}.mlp.down_proj", lambda _, __, value: torch.zeros_like(value)),
    "a soft cap": ("lm_head", lambda _, __, value: 30 * torch.tanh(value / 30)),
    "infinities": ("log_probs", lambda _, __, value: torch.full_like(value, -torch.inf)),
    "one NaN": (f"{LAYER}.mlp.act_fn", of_part((7, 3), lambda part: part * torch.nan)),
    "another temperature": ("log_probs", with_changed("log_probs", "lm_head", lambda logits: 0.7 * logits)),
    "a token's row of the embedding": ("model.embed_tokens", of_part((7,), lambda part: part * 1.1)),
    "a block that is not added": (POST, lambda _, side, __: side.double(f"{LAYER}.input_layernorm:in")),
    "positions shifted": (
        f"{ATTENTION}.rotary_emb.q",
        lambda reference, side, _: right(reference, replace(side, positions=side.positions + 1), f"{ATTENTION}.rotary_emb.q"),
    ),
    "scores scaled": (f"{ATTENTION}.attn", with_changed(f"{ATTENTION}.attn", f"{ATTENTION}.rotary_emb.q", lambda q: 1.2 * q)),
    "keys in float8": (f"{ATTENTION}.attn", with_changed(f"{ATTENTION}.attn", f"{ATTENTION}.rotary_emb.k", float8)),
    "another activation": (f"{LAYER}.mlp.act_fn", relu),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen_in_the_results_of_its_module(reference: Reference, fault: str) -> None:
    name, wrong = FAULTS[fault]
    side, site = random_side(reference), reference.sites[name]
    value = right(reference, side, name)
    side.tensors[name] = value.float()
    assert judge([site], [(reference, side)]).culprit is None
    side.tensors[name] = wrong(reference, side, value.clone()).float()
    found = judge([site], [(reference, side)]).culprit
    assert found is not None and (found.site, found.side) == (name, "replica")


def test_a_place_and_its_values_are_named(reference: Reference) -> None:
    name = f"{ATTENTION}.v_proj"
    side = random_side(reference)
    value = right(reference, side, name)
    side.tensors[name] = value.float()
    side.tensors[name][3:9, 1, 5] += 0.05
    side.tensors[name][8, 1, 5] += 0.05
    found = local_error(reference.sites[name], reference, side)
    assert (found.position, found.element) == (8, (1, 5))
    assert (found.wrong_tokens, found.first_wrong, found.wrong_elements) == (6, 3, 1)
    assert found.expected == pytest.approx(float(value[8, 1, 5])) and found.value == pytest.approx(found.expected + 0.1)


def test_a_rope_without_its_scaling_is_wrong(tmp_path: Path) -> None:
    plain, scaled = (
        Reference(write_tiny_model(tmp_path / name, "qwen2", **fields), torch.float32, torch.device("cpu"), 0.7)
        for name, fields in (("plain", {}), ("scaled", {"rope_parameters": YARN}))
    )
    side, name = random_side(plain), f"{ATTENTION}.rotary_emb.q"
    side.tensors[name] = right(plain, side, name).float()
    assert not local_error(plain.sites[name], plain, side).is_wrong
    assert local_error(scaled.sites[name], scaled, side).is_wrong


@pytest.mark.parametrize("quantise", [int8, float8])
def test_weights_in_eight_bits_of_a_bfloat16_model(tmp_path: Path, quantise: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Their error is not much more than what is rounded of each result."""
    folder = write_tiny_model(tmp_path, "qwen2", num_hidden_layers=3, intermediate_size=128)
    reference = Reference(folder, torch.bfloat16, torch.device("cpu"), 0.7)
    side, site = random_side(reference), reference.sites[f"{LAYER}.mlp.down_proj"]
    side.tensors.update({name: tensor.bfloat16() for name, tensor in side.tensors.items()})
    fault = by_weight(lambda weight: quantise(weight).bfloat16().double())
    side.tensors[site.name] = fault(reference, side, torch.empty(0)).bfloat16()
    assert judge([site], [(reference, side)]).culprit is not None


def test_what_gets_nan_is_not_wrong(reference: Reference) -> None:
    """The first that gives NaN for numbers is; what it is a part of, and nothing beside it, is unknown."""
    side = random_side(reference)
    names = [f"{LAYER}.mlp.act_fn", f"{LAYER}.mlp.down_proj"]
    sites = [reference.sites[name] for name in names]
    for name in names:
        value = right(reference, side, name)
        value[7] *= torch.nan
        side.tensors[name] = value.float()
    assert [each.site for each in judge(sites, [(reference, side)]).wrong] == names[:1]
    side.tensors[names[1]][8, 3] += 1
    assert [each.site for each in judge(sites, [(reference, side)]).wrong] == names


@pytest.mark.parametrize(("rows", "expected"), [(0, 59), (50, 9), (118, -59)])
def test_a_module_that_is_not_called_is_named_and_those_after_it_are_left_out(
    reference: Reference, rows: int, expected: int
) -> None:
    side, name = random_side(reference), f"{LAYER}.mlp.down_proj"
    after = ["model.layers.2.input_layernorm:in", "model.layers.2.input_layernorm"]
    side.tensors[after[1]] = right(reference, side, after[1]).float()
    side.tensors[name] = side.tensors[name].repeat(2, 1)[:rows]
    if not rows:
        del side.tensors[name]
    found = judge([reference.sites[each] for each in (name, *after)], [(reference, side)])
    assert [each.site for each in found.locals] == [name, after[1]]
    assert found.culprit is not None and (found.culprit.site, found.culprit.num_uncalled) == (name, expected)


# ---------------------------------------------------------------------------------------------------- bounds of rounding


@settings(deadline=None, max_examples=25)
@given(st.sampled_from([131, 5000, 49152, 151936]), st.floats(0.1, 4), st.floats(0, 24), st.integers(0, 2**32 - 1))
def test_log_probs_of_large_vocabularies_are_within_rounding(size: int, scale: float, peak: float, seed: int) -> None:
    """One likely token beside many unlikely ones, which float32's sum loses."""
    logits = scale * torch.randn(4, size, generator=torch.Generator().manual_seed(seed))
    logits[:, 5] += peak
    error = (logits.log_softmax(-1)[:, 5].double() - logits.double().log_softmax(-1)[:, 5]).abs()
    others = 16 * 2.0**-24 * (1 + logits.double().abs().amax(-1))
    assert (error < others + sum_of_exps_bound(logits.double())).all()
    assert float(sum_of_exps_bound(logits.double()).max()) < size * 2.0**-24 / 7


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 12), st.integers(1, 11), st.integers(0, 2**32 - 1))
def test_rows_after_a_cached_prefix_are_those_of_the_whole(reference: Reference, count: int, first: int, seed: int) -> None:
    generator, first = torch.Generator().manual_seed(seed), min(first, count - 1)
    site = reference.sites[f"{ATTENTION}.attn"]
    tensors = {
        name: torch.randn(count, heads, 32, generator=generator) for name, heads in zip(site.inputs, (4, 2, 2), strict=True)
    }
    tensors[site.name] = torch.zeros(count, 4, 32)
    whole = Side("replica", tensors, torch.arange(count), torch.zeros(count + 1, dtype=torch.long), count)
    earlier = {name: tensors[name][:first] for name in site.inputs[1:]}
    part = replace(whole, tensors={name: each[first:] for name, each in tensors.items()}, positions=torch.arange(first, count))
    found = right(reference, replace(part, earlier=earlier), site.name)
    torch.testing.assert_close(found, right(reference, whole, site.name)[first:])


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_what_a_cache_had_was_rounded_in_another_pass(reference: Reference, seed: int) -> None:
    """Keys and values of a cache differ by roundings from those of the pass that they are judged by; of other weights by more."""
    generator, first, count = torch.Generator().manual_seed(seed), 32, 40
    site = reference.sites[f"{ATTENTION}.attn"]
    queries, keys, values = site.inputs

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.double)

    sizes = {keys: torch.ones(2, 32), values: 10 ** normal(2, 32)}  # of channels
    sizes[values][0, :2] = torch.tensor([0.01, 10.0])
    true = {name: size * normal(2, 32) for name, size in sizes.items()}  # of one token, said again and again
    query, positions = normal(count - first, 4, 32), torch.arange(first, count)

    def moved(by: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: (each + by(name)).expand(count, -1, -1).clone() for name, each in true.items()}

    def rounding(_: str) -> torch.Tensor:
        return 0.005 * normal(2, 32)

    whole, trainer, cached = moved(rounding), moved(rounding), moved(rounding)
    whole[values][:, 0, 0] = trainer[values][:, 0, 0]  # a channel in which the two agree by chance
    cached[values][:, 0, 0] = whole[values][:, 0, 0] + 0.01
    spreads = {name: spread(whole[name] - trainer[name]) for name in whole}

    def ratio(cached: dict[str, torch.Tensor], spreads: dict[str, torch.Tensor], *, with_trainer: bool = False) -> float:
        own = {name: each[first:] for name, each in whole.items()}
        other = {name: each[:first] for name, each in trainer.items()} if with_trainer else {}
        tensors = {**own, queries: query, site.name: query}
        tokens = torch.zeros(count, dtype=torch.long)
        of_cache = Side("replica", tensors, positions, tokens, count - 1, {name: each[:first] for name, each in cached.items()})
        tensors = {**tensors, site.name: right(reference, of_cache, site.name).bfloat16()}
        earlier = {name: each[:first] for name, each in whole.items()}
        side = Side("replica", tensors, positions, tokens, count - 1, earlier, spreads, other)
        return local_error(site, reference, side).ratio

    stale = moved(lambda name: 0.5 * sizes[name])
    assert ratio(cached, spreads) <= 1 < min(ratio(cached, {}), ratio(stale, spreads))
    assert ratio(cached, spreads, with_trainer=True) <= 1, "all elements together, too"
    shifted = {name: each + 0.1 * sizes[name] * (-1) ** torch.arange(32) for name, each in cached.items()}
    assert ratio(shifted, spreads, with_trainer=True) > 1


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_rows_of_one_token_are_rounded_alike(num_tokens: int, seed: int) -> None:
    """A response that says one token again and again is not a norm's fault."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.arange(256) % num_tokens
    value = torch.randn(num_tokens, 64, generator=generator, dtype=torch.double)[token_ids]
    assert systematic(value.bfloat16().double(), [value], torch.bfloat16, token_ids) <= 1
    assert systematic(value * 1.01, [value], torch.bfloat16, token_ids) > 1


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = write_tiny_model(tmp_path_factory.mktemp("wide"), "qwen2", hidden_size=1024, num_hidden_layers=1)
    return Reference(folder, torch.bfloat16, torch.device("cpu"), 1.0)


@settings(deadline=None, max_examples=30)
@given(st.floats(0.99, 1.01), st.sampled_from(["at its end", "before its weights", "sum in float32"]), st.integers(0, 2**32 - 1))
def test_a_norm_that_nearly_multiplies_by_a_power_of_two_is_no_fault(wide: Reference, rms: float, way: str, seed: int) -> None:
    """All roundings then go the same way: in a random model of 3 B parameters at the layer where the rms reaches 1."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(32, 1024, generator=generator, dtype=torch.double)
    whole *= rms / whole.square().mean(-1, keepdim=True).sqrt()
    site = wide.sites["model.norm"]
    weight = wide.weights["model.norm"]["weight"]

    def ratio(eps: float) -> float:
        x = whole if way == "sum in float32" else whole.bfloat16().double()
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        out = normed.bfloat16().double() * weight if way == "before its weights" else normed * weight
        tensors = {"model.norm:in": whole.bfloat16(), "model.norm": out.bfloat16()}
        return local_error(site, wide, Side("replica", tensors, torch.arange(32), torch.arange(32), 31)).ratio

    assert ratio(1e-6) <= 1 < ratio(0.03)


def test_the_first_wrong_module_is_the_culprit_and_its_side_is_named(reference: Reference) -> None:
    """Those after it compute with what it gave, and may be wrong as well."""
    first, second = (reference.sites[f"{LAYER}.mlp.{name}"] for name in ("act_fn", "down_proj"))
    replica = random_side(reference)
    trainer = replace(replica, name="trainer", tensors=dict(replica.tensors))
    sides = [(reference, trainer), (reference, replica)]
    found = judge([first, second], sides)
    assert [(each.site, each.side) for each in found.wrong] == [
        (site.name, side) for site in (first, second) for side in ("trainer", "replica")
    ]
    assert found.culprit == found.wrong[0]
    trainer.tensors[first.name] = right(reference, trainer, first.name).float()
    culprit = judge([first, second], sides).culprit
    assert culprit is not None and (culprit.site, culprit.side) == (first.name, "replica")
