"""What a fault is, is told from what one module got and gave; no model is run.

With real models: test_comparing.py, tests/runs/test_bisect.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megasync.comparing import formulas
from megasync.comparing import reference as ref
from megasync.comparing.cases import Known
from megasync.comparing.judge import judge
from megasync.comparing.kinds import explain
from megasync.comparing.reference import Reference, Side
from megasync.comparing.shape import Parameters, Shape
from tests.support.tiny_models import YARN, write_tiny_model

NUM_TOKENS, NUM_PROMPT, WINDOW = 60, 50, 16
Fault = Callable[[Reference, Side, torch.Tensor], torch.Tensor]  # what is given in the place of what is right
LAYER = "model.layers.1"
ATTENTION = f"{LAYER}.self_attn"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Biases, and an MLP as wide as the model: square weights."""
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), "qwen2", num_hidden_layers=3, intermediate_size=128)
    return Reference(Shape.of(folder), Parameters(folder, torch.float32, torch.device("cpu")), 0.7)


def random_side(shape: Shape) -> Side:
    """Results of all modules, none of which is right."""
    generator = torch.Generator().manual_seed(0)
    heads = {"q_proj": shape.num_heads, "k_proj": shape.num_groups, "v_proj": shape.num_groups, "attn": shape.num_heads}
    heads |= {"rotary_emb.q": shape.num_heads, "rotary_emb.k": shape.num_groups}

    def size(site: str) -> tuple[int, ...]:
        groups = next((number for name, number in heads.items() if site.endswith(f".{name}")), None)
        if groups is not None:
            return NUM_TOKENS - 1, groups, shape.head_size
        rows = NUM_TOKENS - NUM_PROMPT if site in ("lm_head", "log_probs") else NUM_TOKENS - 1
        return (rows,) if site == "log_probs" else (rows, 128)

    tensors = {site: torch.randn(size(site), generator=generator) for site in shape.sites}
    tokens = torch.arange(NUM_TOKENS) * 7 % 100
    return Side("replica", tensors, torch.arange(NUM_TOKENS - 1), tokens, NUM_PROMPT, {})


def told(reference: Reference, site: str, fault: Fault) -> str:
    side = random_side(reference.shape)
    value = reference.expected(site, side).value
    side.tensors[site] = value.float()
    assert judge([site], {"replica": (reference, side)}).culprit is None
    side.tensors[site] = fault(reference, side, value.clone()).float()
    assert judge([site], {"replica": (reference, side)}).culprit is not None
    return ": ".join(explain(site, reference, side, Known()))


def bias(reference: Reference, name: str = "k_proj") -> torch.Tensor:
    return reference.parameters[f"{ATTENTION}.{name}.bias"].view(-1, reference.shape.head_size)


def by_weight(change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    def fault(reference: Reference, side: Side, value: torch.Tensor) -> torch.Tensor:
        return ref.linear_input(f"{LAYER}.mlp.down_proj", side) @ change(reference.weight(f"{LAYER}.mlp.down_proj")).t()

    return fault


def of_other_layer(site: str) -> Fault:
    return lambda reference, side, _: (
        Reference(reference.shape, reference.parameters.as_if_all_were(2), 0.7).expected(site, side).value
    )


def of_part(part: tuple[object, ...], change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    def fault(_: Reference, __: Side, value: torch.Tensor) -> torch.Tensor:
        value[part] = change(value[part])
        return value

    return fault


def int8(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return scale * (weight / scale).round()


def scaled_column(weight: torch.Tensor) -> torch.Tensor:
    weight[:, 4] *= 2
    return weight


def embedded(ids: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    def fault(reference: Reference, side: Side, _: torch.Tensor) -> torch.Tensor:
        return reference.parameters["model.embed_tokens.weight"][ids(side.token_ids[side.positions])]

    return fault


def summed(stream: float, block: float) -> Fault:
    def fault(reference: Reference, side: Side, _: torch.Tensor) -> torch.Tensor:
        a, b = (side.double(each) for each in ref.residual_sources(f"{LAYER}.post_attention_layernorm:in", reference.shape))
        return stream * a + block * b

    return fault


def turned(frequencies: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    def fault(reference: Reference, side: Side, _: torch.Tensor) -> torch.Tensor:
        return formulas.rotate(side.double(f"{ATTENTION}.q_proj"), side.positions, frequencies(reference.shape.frequencies))

    return fault


def attended(scale: float) -> Fault:
    def fault(reference: Reference, side: Side, _: torch.Tensor) -> torch.Tensor:
        query, key, value = ref.attention_inputs(f"{ATTENTION}.attn", side)
        return formulas.attend(query, key, value, side.positions, scale * reference.shape.head_size**-0.5, 0)[0]

    return fault


def with_low_cache(reference: Reference, side: Side, _: torch.Tensor) -> torch.Tensor:
    query, *cached = ref.attention_inputs(f"{ATTENTION}.attn", side)
    key, value = (each.float().to(torch.float8_e4m3fn).double() for each in cached)
    return formulas.attend(query, key, value, side.positions, reference.shape.head_size**-0.5, 0)[0]


def relu(_: Reference, side: Side, __: torch.Tensor) -> torch.Tensor:
    return F.relu(side.double(f"{LAYER}.mlp.gate_proj")) * side.double(f"{LAYER}.mlp.up_proj")


def uncentred(reference: Reference, side: Side, _: torch.Tensor) -> torch.Tensor:
    site = f"{LAYER}.input_layernorm"
    return formulas.rms_norm(side.double(f"{site}:in"), reference.parameters[f"{site}.weight"] - 1, reference.shape.eps)


FAULTS: dict[str, tuple[str, Fault]] = {
    "swapped: keys and values": (
        f"{ATTENTION}.k_proj",
        lambda reference, side, _: reference.expected(f"{ATTENTION}.v_proj", side).value,
    ),
    "rows moved: head 1: its rows are in another order, as of a transposed head, and the bias is not": (
        f"{ATTENTION}.k_proj",
        lambda reference, _, value: torch.stack(
            [value[:, 0], (value[:, 1] - bias(reference)[1]).flip(-1) + bias(reference)[1]], 1
        ),
    ),
    "left out: the bias": (f"{ATTENTION}.k_proj", lambda reference, _, value: value - bias(reference)),
    "wrong bias: times 2": (f"{ATTENTION}.k_proj", lambda reference, _, value: value + bias(reference)),
    "wrong bias: 5.": (f"{ATTENTION}.k_proj", lambda reference, _, value: value + bias(reference).flip(-1) - bias(reference)),
    "one element: of the bias: [37] is": (f"{ATTENTION}.v_proj", of_part((slice(None), 1, 5), lambda part: part + 0.05)),
    "one row: of the weight: [17] is 1.01 times": (f"{LAYER}.mlp.up_proj", of_part((slice(None), 17), lambda part: part * 1.01)),
    "one row: of the weight: [17] alone is off": (
        f"{LAYER}.mlp.up_proj",
        of_part((slice(None), 17), lambda part: part + torch.arange(len(part)) % 5 / 10),
    ),
    "one column: of the weight: [:, 4]": (f"{LAYER}.mlp.down_proj", by_weight(scaled_column)),
    "transposed: the weight": (f"{LAYER}.mlp.down_proj", by_weight(torch.t)),
    "soft cap: results are 0.4 * tanh(result / 0.4)": ("lm_head", lambda _, __, value: 0.4 * torch.tanh(value / 0.4)),
    "soft cap: results are 30 * tanh(result / 30)": ("lm_head", lambda _, __, value: 30 * torch.tanh(value / 30)),
    "precision: the weights were rounded to int8, a scale for each row": (f"{LAYER}.mlp.down_proj", by_weight(int8)),
    "precision: the weights were rounded to bfloat16": (
        f"{LAYER}.mlp.down_proj",
        by_weight(lambda weight: weight.bfloat16().double()),
    ),
    "precision: the weights were rounded to float8_e4m3fn": (
        f"{LAYER}.mlp.down_proj",
        by_weight(lambda weight: weight.to(torch.float8_e4m3fn).double()),
    ),
    "wrong layer: it has the weights of model.layers.2": (f"{ATTENTION}.q_proj", of_other_layer(f"{ATTENTION}.q_proj")),
    "wrong layer: it has the weights of model.layers.2 ": (
        f"{LAYER}.input_layernorm",
        of_other_layer(f"{LAYER}.input_layernorm"),
    ),
    "centre of weights: 1 is taken from them": (f"{LAYER}.input_layernorm", uncentred),
    "left out: it gives zeros": (f"{LAYER}.mlp.down_proj", lambda _, __, value: torch.zeros_like(value)),
    "not finite: NaN out of numbers, with 1 of 59 tokens, in 1 of 128 columns": (
        f"{LAYER}.mlp.act_fn",
        of_part((7, 3), lambda part: part * torch.nan),
    ),
    "not finite: infinities out of numbers, with 10 of 10 tokens": (
        "log_probs",
        lambda _, __, value: torch.full_like(value, -torch.inf),
    ),
    "rows moved: of token 49 alone: 49 has that of 5": (
        "model.embed_tokens",
        embedded(lambda ids: torch.where(ids == 49, 5, ids)),
    ),
    "rows moved: of 59 of 59 tokens: 0 has that of 1": ("model.embed_tokens", embedded(lambda ids: ids + 1)),
    "wrong weights: off by 1.3e-02 of its size for token 49 alone": (
        "model.embed_tokens",
        of_part((7,), lambda part: part * 1.1),
    ),
    "added twice: the residual stream": (f"{LAYER}.post_attention_layernorm:in", summed(2, 1)),
    "added twice: what the block before it gave": (f"{LAYER}.post_attention_layernorm:in", summed(1, 2)),
    "left out: the residual stream is not added": (f"{LAYER}.post_attention_layernorm:in", summed(0, 1)),
    "wrong scale: 1 times the residual stream and 0.5 times": (f"{LAYER}.post_attention_layernorm:in", summed(1, 0.5)),
    "wrong rope: 16 of 32 elements of a head are turned": (
        f"{ATTENTION}.rotary_emb.q",
        turned(lambda _: 10000.0 ** -(torch.arange(0, 16, 2).double() / 16)),
    ),
    "wrong positions: times 0.25 at every token": (f"{ATTENTION}.rotary_emb.q", turned(lambda right: right / 4)),
    "wrong rope: 8 of 16 pairs turn otherwise: [8] by 0 a token in place of 0.01": (
        f"{ATTENTION}.rotary_emb.q",
        turned(lambda right: torch.where(torch.arange(16) < 8, right, 0)),
    ),
    "wrong scale: of the scores: 1.2 / sqrt(head size)": (f"{ATTENTION}.attn", attended(1.2)),
    "precision: keys and values are rounded to float8_e4m3fn": (f"{ATTENTION}.attn", with_low_cache),
    "wrong activation: relu": (f"{LAYER}.mlp.act_fn", relu),
}


@pytest.mark.parametrize("expected", FAULTS)
def test_a_fault_is_told_by_what_the_module_gives(reference: Reference, expected: str) -> None:
    assert told(reference, *FAULTS[expected]).startswith(expected.rstrip())


def test_a_rope_without_its_scaling_is_told(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "qwen2", rope_parameters=YARN)
    reference = Reference(Shape.of(folder), Parameters(folder, torch.float32, torch.device("cpu")), 0.7)
    plain = turned(lambda _: 500.0 ** -(torch.arange(0, 32, 2).double() / 32))
    assert told(reference, f"{ATTENTION}.rotary_emb.q", plain) == "wrong rope: the scaling of its frequencies is left out"


@pytest.mark.parametrize("quantise", [int8, lambda weight: weight.float().to(torch.float8_e4m3fn).double()])
def test_weights_in_eight_bits_of_a_bfloat16_model(tmp_path: Path, quantise: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Their error is not much more than what is rounded of each result."""
    folder = write_tiny_model(tmp_path, "qwen2", num_hidden_layers=3, intermediate_size=128)
    reference = Reference(Shape.of(folder), Parameters(folder, torch.bfloat16, torch.device("cpu")), 0.7)
    side, site = random_side(reference.shape), f"{LAYER}.mlp.down_proj"
    side.tensors.update({name: tensor.bfloat16() for name, tensor in side.tensors.items()})
    fault = by_weight(lambda weight: quantise(weight).bfloat16().double())
    side.tensors[site] = fault(reference, side, torch.empty(0)).bfloat16()
    assert judge([site], {"replica": (reference, side)}).culprit is not None
    kind = explain(site, reference, side, Known())
    name = "int8" if quantise is int8 else "float8_e4m3fn"
    assert kind.name == "precision" and f"the weights were rounded to {name}" in kind.detail, kind


def test_what_gets_nan_is_not_wrong(reference: Reference) -> None:
    """The first that gives NaN for numbers is; what it is a part of, and nothing beside it, is unknown."""
    side = random_side(reference.shape)
    sites = [f"{LAYER}.mlp.act_fn", f"{LAYER}.mlp.down_proj"]
    for site in sites:
        value = reference.expected(site, side).value
        value[7] *= torch.nan
        side.tensors[site] = value.float()
    assert [each.site for each in judge(sites, {"replica": (reference, side)}).wrong] == sites[:1]
    side.tensors[sites[1]][8, 3] += 1
    assert [each.site for each in judge(sites, {"replica": (reference, side)}).wrong] == sites


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (0, "left out: it is not called"),
        (50, "left out: it is not called with 9 of 59 tokens"),
        (118, "called twice: with 59 of 59 tokens"),
    ],
)
def test_a_module_that_is_not_called_is_named_and_those_after_it_are_left_out(
    reference: Reference, rows: int, expected: str
) -> None:
    side = random_side(reference.shape)
    site = f"{LAYER}.mlp.down_proj"
    for each in (site, f"{site[:-9]}act_fn", "model.layers.2.input_layernorm"):
        side.tensors[each] = reference.expected(each, side).value.float()
    side.tensors[site] = side.tensors[site].repeat(2, 1)[:rows]
    if not rows:
        del side.tensors[site]
    sites = [site, "model.layers.2.input_layernorm:in", "model.layers.2.input_layernorm"]
    found = judge(sites, {"replica": (reference, side)})
    assert [each.site for each in found.locals] == [sites[0], sites[2]]
    assert found.culprit is not None and found.culprit.site == site
    assert ": ".join(explain(site, reference, side, Known())) == expected
