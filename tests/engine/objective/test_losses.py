"""Ratios, weights and objectives beside plain loops in float64, their gradients by autograd. No ranks."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings

from engine.batch.batch import MicroBatch, SampleTable, pack
from engine.algorithm import AlgorithmConfig
from engine.objective.loss import Sums, aggregation_weights, grpo_loss, leave_out
from engine.objective.metrics import SUMS, effective_share, step_metrics
from engine.sample import Sample

MAX_NEW_TOKENS = 7
CPU = torch.device("cpu")
# no bound of a ratio lies on the grid of differences, nor on that of their means over up to five
differences = st.integers(-30, 30).map(lambda step: step * 0.07)


@dataclass
class Response:
    """One response: the lists have a value a token."""

    prompt_length: int
    current: list[float]
    old: list[float]
    rollout: list[float]
    reference: list[float]
    advantage: float
    is_in_loss: bool = True


@st.composite
def responses(draw: st.DrawFn, max_tokens: int = 5) -> Response:
    length = draw(st.integers(1, max_tokens))

    def beside(values: list[float]) -> list[float]:
        return [value - draw(differences) for value in values]

    current = [draw(st.integers(-40, -1)) * 0.1 for _ in range(length)]
    old = beside(current)
    advantage = draw(st.sampled_from([-1.7, -0.4, 0.3, 1.1]))
    return Response(draw(st.integers(1, 3)), current, old, beside(old), beside(current), advantage, draw(st.booleans()))


algorithms = st.builds(
    AlgorithmConfig,
    dual_clip=st.sampled_from([None, 3.0]),
    ratio_level=st.sampled_from(["token", "sequence"]),
    kl_coefficient=st.sampled_from([0.0, 0.1]),
    importance_correction=st.sampled_from(["none", "tis", "mask"]),
    importance_level=st.sampled_from(["token", "sequence", "geometric"]),
    loss_aggregation=st.sampled_from(["token_mean", "sequence_mean", "constant_length"]),
)


# ------------------------------------------------------------------------------------------- packed, as the engine does


def packed(group: list[Response], multiple: int) -> MicroBatch:
    """A micro-batch with all log-probs but the current ones; without responses a stand-in."""
    samples = [Sample((5,) * r.prompt_length, (7,) * len(r.current), tuple(r.rollout)) for r in group]
    table = SampleTable.from_samples(samples or [Sample((5,), (7,), (0.0,))])
    table = dataclasses.replace(table, advantages=np.array([r.advantage for r in group] or [0.0]))
    micro = pack(table, list(range(len(samples))), multiple, CPU)
    micro.old_log_probs = placed([r.old for r in group], group, micro, elsewhere=0.9)
    micro.reference_log_probs = placed([r.reference for r in group], group, micro, elsewhere=-0.3)
    leave_out(micro, [r.is_in_loss for r in group])
    return micro


def placed(values: list[list[float]], group: list[Response], micro: MicroBatch, elsewhere: float) -> torch.Tensor:
    """`values` at the positions that predict the responses, `elsewhere` at all others."""
    result = torch.full((micro.num_tokens,), elsewhere)
    for start, numbers in zip(starts(group), values, strict=True):
        result[start : start + len(numbers)] = torch.tensor(numbers)
    return result


def starts(group: list[Response]) -> list[int]:
    """Where the predictions of each response begin."""
    found, position = [], 0
    for response in group:
        found.append(position + response.prompt_length - 1)
        position += response.prompt_length + len(response.current)
    return found


def engine_loss(
    parts: list[list[Response]], config: AlgorithmConfig, multiple: int = 4
) -> tuple[torch.Tensor, list[list[float]], dict[str, float]]:
    """The loss over micro-batches, its gradient for each response's tokens, and the sums."""
    counted = [r for part in parts for r in part if r.is_in_loss]
    sizes = sum(len(r.current) for r in counted), len(counted)
    total, gradients, sums = torch.zeros(()), [], dict[str, float]()
    for part in parts:
        micro = packed(part, multiple)
        log_probs = placed([r.current for r in part], part, micro, elsewhere=-1.5).requires_grad_()
        weights = aggregation_weights(micro, *sizes, config.loss_aggregation, MAX_NEW_TOKENS)
        loss, found = grpo_loss(log_probs, micro, weights, config)
        loss.backward()  # type: ignore[no-untyped-call]
        total = total + loss.detach()
        assert log_probs.grad is not None
        inside = torch.zeros_like(log_probs)
        for start, response in zip(starts(part), part, strict=True):
            inside[start : start + len(response.current)] = 1
            gradients.append(log_probs.grad[start : start + len(response.current)].tolist())
        assert not bool(log_probs.grad[inside == 0].any()), "prompts and padding have no gradient"
        add(sums, found)
    return total, gradients, sums


def add(into: dict[str, float], sums: Sums) -> None:
    for name, value in sums.items():
        into[name] = max(into.get(name, 0.0), float(value)) if name == "gap_max" else into.get(name, 0.0) + float(value)


# ------------------------------------------------------------------------------------------------- plain, one by one


def plain_ratio(log_ratios: list[Any], level: str) -> list[Any]:
    if level == "token":
        return [x.exp() for x in log_ratios]
    total = sum(log_ratios)
    return [(total if level == "sequence" else total / len(log_ratios)).exp()] * len(log_ratios)


def plain_weight(ratio: float, config: AlgorithmConfig) -> float:
    if config.importance_correction == "tis":
        return min(ratio, config.importance_cap)
    if config.importance_correction == "mask":
        return ratio if config.importance_floor <= ratio <= config.importance_cap else 0.0
    return 1.0


def plain_objective(ratio: Any, advantage: float, config: AlgorithmConfig) -> Any:
    clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    surrogate = min(ratio * advantage, clipped * advantage)
    if advantage < 0 and config.dual_clip is not None:
        surrogate = max(surrogate, config.dual_clip * advantage)
    return surrogate


def plain_loss(group: list[Response], config: AlgorithmConfig) -> tuple[float, list[list[float]], dict[str, float]]:
    counted = [r for r in group if r.is_in_loss]
    num_tokens = sum(len(r.current) for r in counted)
    total, gradients, weights, by_sequence = torch.zeros((), dtype=torch.float64), [], [], []
    policy, clipped, dual_clipped = 0.0, 0, 0
    for r in group:
        current = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in r.current]
        ratios = plain_ratio([x - old for x, old in zip(current, r.old, strict=True)], "token")
        if config.ratio_level == "sequence":
            means = plain_ratio([x.detach() - old for x, old in zip(current, r.old, strict=True)], "geometric")
            ratios = [mean * (x - x.detach()).exp() for mean, x in zip(means, current, strict=True)]
        gaps = [torch.tensor(old - rollout, dtype=torch.float64) for old, rollout in zip(r.old, r.rollout, strict=True)]
        corrections = [plain_weight(float(x), config) for x in plain_ratio(gaps, config.importance_level)]
        loss = torch.zeros((), dtype=torch.float64)
        length = len(r.current) if config.loss_aggregation == "sequence_mean" else MAX_NEW_TOKENS
        divisor = max(num_tokens, 1) if config.loss_aggregation == "token_mean" else length * max(len(counted), 1)
        for x, ratio, correction, reference in zip(current, ratios, corrections, r.reference, strict=True):
            token = -plain_objective(ratio, r.advantage, config) * correction
            difference = reference - x
            loss = loss + (token + config.kl_coefficient * (difference.exp() - difference - 1)) / divisor
            policy += float(torch.as_tensor(token).detach()) / divisor if r.is_in_loss else 0.0
            # where PPO's bound, not the ratio, is what counts
            unbounded = plain_objective(ratio, r.advantage, config.model_copy(update={"clip_low": 1.0, "clip_high": math.inf}))
            is_dual = config.dual_clip is not None and r.advantage < 0 and float(ratio) > config.dual_clip
            clipped += r.is_in_loss and bool(plain_objective(ratio, r.advantage, config) != unbounded)
            dual_clipped += r.is_in_loss and is_dual
        if r.is_in_loss:
            loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
            weights += corrections
            by_sequence.append(corrections[0])
        gradients.append([float(x.grad) if x.grad is not None else 0.0 for x in current])
    units = weights if config.importance_level == "token" else by_sequence
    return float(total), gradients, {
        "loss": float(total),
        "policy": policy,
        "clipped": clipped,
        **({"dual_clipped": dual_clipped} if config.dual_clip is not None else {}),
        "masked": sum(weight == 0 for weight in weights),
        "importance": sum(weights),
        "weight_count": len(units),
        "weight": sum(units),
        "weight_square": sum(weight**2 for weight in units),
    }  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(st.lists(responses(), min_size=1, max_size=6), st.integers(0, 6), algorithms)
def test_loss_and_gradient_are_those_of_plain_loops(group: list[Response], cut: int, config: AlgorithmConfig) -> None:
    """Over two micro-batches of packed, padded responses, of which one may be empty."""
    loss, gradients, sums = engine_loss([group[:cut], group[cut:]], config)
    expected, expected_gradients, expected_sums = plain_loss(group, config)
    assert float(loss) == pytest.approx(expected, rel=2e-5, abs=2e-5)
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        assert found == pytest.approx(wanted, rel=2e-5, abs=2e-6)
    for name, value in expected_sums.items():
        assert sums[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@settings(deadline=None, max_examples=100)
@given(st.lists(responses(), min_size=1, max_size=5), st.sampled_from([None, 3.0]))
def test_gspo_has_the_gradient_of_its_sequence_ratio(group: list[Response], dual_clip: float | None) -> None:
    """Of mean over responses of min(s A, clip(s) A), s = exp(mean log-ratio), without any stop-gradient."""
    config = AlgorithmConfig(
        ratio_level="sequence", loss_aggregation="sequence_mean", importance_correction="none", dual_clip=dual_clip
    )
    counted = [r for r in group if r.is_in_loss]
    assume(counted)
    leaves = [torch.tensor(r.current, dtype=torch.float64, requires_grad=True) for r in counted]
    total = torch.zeros((), dtype=torch.float64)
    for r, current in zip(counted, leaves, strict=True):
        s = (current - torch.tensor(r.old, dtype=torch.float64)).mean().exp()
        total = total - plain_objective(s, r.advantage, config) / len(counted)
    if total.requires_grad:  # else every response is clipped
        total.backward()  # type: ignore[no-untyped-call]
    loss, gradients, _ = engine_loss([counted], config)
    assert float(loss) == pytest.approx(float(total.detach()), rel=2e-5, abs=2e-5)
    for found, leaf in zip(gradients, leaves, strict=True):
        wanted = [0.0] * len(found) if leaf.grad is None else leaf.grad.tolist()
        assert found == pytest.approx(wanted, rel=2e-5, abs=2e-6)


@settings(deadline=None, max_examples=100)
@given(st.lists(responses(max_tokens=1), min_size=1, max_size=5), algorithms)
def test_levels_are_one_where_responses_have_one_token(group: list[Response], config: AlgorithmConfig) -> None:
    results = [
        engine_loss([group], config.model_copy(update={"ratio_level": ratio_level, "importance_level": importance_level}))
        for ratio_level in ("token", "sequence")
        for importance_level in ("token", "sequence", "geometric")
    ]
    for loss, gradients, sums in results[1:]:
        assert torch.equal(loss, results[0][0]) and gradients == results[0][1] and sums == results[0][2]


@settings(deadline=None, max_examples=100)
@given(st.lists(responses(), min_size=1, max_size=4), responses(), algorithms)
def test_what_is_left_out_of_the_loss_changes_nothing(group: list[Response], other: Response, config: AlgorithmConfig) -> None:
    other.is_in_loss = False
    loss, gradients, sums = engine_loss([group], config, multiple=1)
    with_other, more_gradients, more_sums = engine_loss([[*group, other]], config, multiple=1)
    assert float(with_other) == pytest.approx(float(loss), rel=1e-6, abs=1e-6)
    assert more_gradients[:-1] == gradients and not any(more_gradients[-1])
    assert more_sums == pytest.approx(sums, rel=1e-6, abs=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.lists(responses(), min_size=1, max_size=4), st.sampled_from(["token", "sequence"]))
def test_without_old_log_probs_every_ratio_is_one(group: list[Response], level: str) -> None:
    micro = packed(group, 4)
    micro.old_log_probs = None
    log_probs = placed([r.current for r in group], group, micro, elsewhere=-1.5).requires_grad_()
    weights = aggregation_weights(micro, 1, 1, "token_mean")
    _, sums = grpo_loss(log_probs, micro, weights, AlgorithmConfig(ratio_level=level, importance_correction="none"))
    assert float(sums["ratio"]) == float(sums["tokens"]) and float(sums["clipped"]) == 0


def test_a_log_prob_that_is_no_number_is_never_masked() -> None:
    """`non_finite` must see it, rather than a mask that takes the token for one out of bounds."""
    bad = Response(1, [-1.0, -1.0], [-1.0, -1.0], [-1.0, math.nan], [-1.0, -1.0], 1.0)
    for level in ("token", "sequence", "geometric"):
        for correction in ("tis", "mask"):
            config, micro = AlgorithmConfig(importance_correction=correction, importance_level=level), packed([bad], 4)
            loss, _ = grpo_loss(torch.zeros(4), micro, aggregation_weights(micro, 2, 1, "token_mean"), config)
            assert not math.isfinite(float(loss))


def test_clipped_is_what_the_bound_stops() -> None:
    """A token that gets likelier counts as clipped where its advantage is positive alone, one that gets less likely elsewhere."""
    for advantage, far in ((1.0, 1.0), (-1.0, -1.0)):
        both = [Response(1, [-2.0], [-2.0 - difference], [-2.0], [-2.0], advantage) for difference in (far, -far)]
        _, gradients, sums = engine_loss([both], AlgorithmConfig(importance_correction="none"))
        print(advantage, gradients, sums["clipped"])
        assert gradients[0] == [0.0] and gradients[1] != [0.0] and sums["clipped"] == 1


def test_dual_clip_bounds_what_a_bad_token_counts() -> None:
    """A ratio of e^2 = 7.4 with the advantage -1: all of it, or 3, without a gradient."""
    far = Response(2, [-1.0], [-3.0], [-3.0], [-1.0], -1.0)
    loss, gradients, sums = engine_loss([[far]], AlgorithmConfig())
    assert float(loss) == pytest.approx(math.e**2) and gradients == [[pytest.approx(math.e**2)]]
    assert "dual_clipped" not in sums
    loss, gradients, sums = engine_loss([[far]], AlgorithmConfig(dual_clip=3.0))
    assert float(loss) == 3.0 and gradients == [[0.0]] and sums["dual_clipped"] == 1


def test_the_total_loss_is_all_that_has_gradients() -> None:
    sums = dict.fromkeys(SUMS["grpo"], 0.0) | {"loss": 2.0, "policy": 1.5, "tokens": 4.0, "kl": 8.0}
    step = {**sums, "balance": 1.1, "balance_of_layers": 3.3, "grad_norm": 1.0, "learning_rate": 0.1, "skipped": 0.0}
    metrics = step_metrics([step, {**step, "loss": 4.0}], AlgorithmConfig(load_balancing=0.1, kl_coefficient=0.25))
    assert (metrics["loss/policy"], metrics["loss/kl"], metrics["loss/load_balancing"]) == (1.5, 2.0, 1.1)
    assert metrics["loss/total"] == pytest.approx(3.0 + 0.1 * 3.3)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({}, {"importance/mean", "importance/ess"}),
        ({"kl_coefficient": 0.01}, {"importance/mean", "importance/ess", "loss/kl"}),
        ({"importance_correction": "none"}, set()),
        ({"importance_correction": "mask"}, {"importance/mean", "importance/ess", "importance/masked_fraction"}),
    ],
)
def test_what_is_not_measured_has_no_metric(algorithm: dict[str, Any], expected: set[str]) -> None:
    step = dict.fromkeys((*SUMS["grpo"], "balance", "grad_norm", "learning_rate", "skipped"), 0.0)
    found = {key for key in step_metrics([step], AlgorithmConfig(**algorithm)) if key.startswith(("importance/", "loss/k"))}
    assert found == expected


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=20), st.floats(0.1, 10))
def test_effective_share_is_one_for_equal_weights_and_least_for_a_single_one(weights: list[float], scale: float) -> None:
    def share(values: list[float]) -> float:
        return effective_share(len(values), sum(values), sum(value**2 for value in values))

    assert 1 / len(weights) <= share(weights) * (1 + 1e-9) and share(weights) <= 1 + 1e-9
    assert share([scale * weight for weight in weights]) == pytest.approx(share(weights))
    assert share([scale] * len(weights)) == pytest.approx(1)
    assert share([scale, *[0.0] * len(weights)]) == pytest.approx(1 / (len(weights) + 1))
    assert share([]) == share([0.0]) == 0
