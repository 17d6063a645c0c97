"""Named losses, KL estimators and advantages beside plain formulas in float64, their gradients by autograd. No ranks."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings

from engine.batch.batch import SampleTable, pack
from engine.algorithm import AlgorithmConfig
from engine.objective.advantages import ADVANTAGES, AdvantageInput
from engine.objective.loss import grpo_loss, kl_estimate
from engine.objective.own import OwnFunctions, trial_tokens, try_advantage, try_loss
from engine.objective.policy import LOSSES, LossTokens
from engine.sample import Sample

# of one response: the lists have a value a token, on grids on which no bound of a ratio lies
Response = tuple[list[float], list[float], list[float], float]
differences = st.integers(-12, 12).map(lambda step: step * 0.07)
ESTIMATORS = ("k1", "k2", "k3")
CONFIGS = {
    "cispo": AlgorithmConfig(loss="cispo", clip_low=0.4, clip_high=0.6),
    "sapo": AlgorithmConfig(loss="sapo", sapo_temperature_positive=1.3, sapo_temperature_negative=2.1),
    "gmpo": AlgorithmConfig(loss="gmpo", clip_low=0.33, clip_high=0.49),
    "dppo_tv": AlgorithmConfig(loss="dppo_tv", clip_low=0.15, clip_high=0.1),
    "dppo_kl": AlgorithmConfig(loss="dppo_kl", clip_low=0.05, clip_high=0.02),
}


@st.composite
def responses(draw: st.DrawFn) -> Response:
    length = draw(st.integers(1, 4))
    current = [draw(st.integers(-40, -1)) * 0.1 for _ in range(length)]
    old = [min(value + draw(differences), -0.01) for value in current]
    sampled = [min(value + draw(differences), -0.01) for value in current]
    return current, old, sampled, draw(st.sampled_from([-1.7, -0.4, 0.3, 1.1]))


def tokens_of(group: list[Response], config: AlgorithmConfig) -> LossTokens:
    """Packed behind one token of the prompt each, whose log-probs have no meaning."""
    columns = [[0.9, *values] for each in group for values in each[:3]]
    current, old, sampled = (torch.tensor([x for row in columns[place::3] for x in row]) for place in range(3))
    sizes = torch.tensor([len(each[0]) + 1 for each in group])
    segment = torch.repeat_interleave(torch.arange(len(group)), sizes)
    starts = torch.cumsum(sizes, 0) - sizes
    mask = torch.ones(len(segment)).index_fill(0, starts, 0.0)
    return LossTokens(
        log_probs=current.requires_grad_(),
        old_log_probs=old,
        rollout_log_probs=sampled,
        advantages=torch.tensor([each[3] for each in group])[segment],
        mask=mask,
        segment=segment,
        num_segments=len(group),
        config=config,
    )


def plain_losses(name: str, group: list[Response], config: AlgorithmConfig) -> tuple[list[Any], list[Any]]:
    """Each response's mean loss, and the log-probs that it depends on, all float64."""
    totals, leaves = [], []
    for current, old, sampled, advantage in group:
        own = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in current]
        ratios = [(x - y).exp() for x, y in zip(own, old, strict=True)]
        if name == "gmpo":
            low, high = 1 - config.clip_low, 1 + config.clip_high
            kept = [min(r, high) if advantage > 0 else max(r, low) for r in ratios]
            product = math.prod(kept)
            totals.append(-advantage * torch.as_tensor(product, dtype=torch.float64) ** (1 / len(own)))
        else:
            each = zip(own, ratios, sampled, strict=True)
            totals.append(sum(PLAIN[name](x, ratio, s, advantage, config) for x, ratio, s in each) / len(own))
        leaves += own
    return totals, leaves


def plain_cispo(x: Any, ratio: Any, _sampled: float, advantage: float, config: AlgorithmConfig) -> Any:
    return -min(max(ratio.item(), 1 - config.clip_low), 1 + config.clip_high) * advantage * x


def plain_sapo(_x: Any, ratio: Any, _sampled: float, advantage: float, config: AlgorithmConfig) -> Any:
    t = config.sapo_temperature_positive if advantage > 0 else config.sapo_temperature_negative
    return -advantage * 4 / t / (1 + (-t * (ratio - 1)).exp())


def plain_dppo(divergence: Callable[[float, float], float]) -> Callable[..., Any]:
    def loss(x: Any, ratio: Any, sampled: float, advantage: float, config: AlgorithmConfig) -> Any:
        p, q = math.exp(sampled), math.exp(x.item())
        found, bound = divergence(p, q), config.clip_high if advantage > 0 else config.clip_low
        assume(abs(found - bound) > 1e-5)
        is_out = found > bound and (q > p if advantage > 0 else q < p)
        return -ratio * advantage * (0.0 if is_out else 1.0)

    return loss


PLAIN: dict[str, Callable[..., Any]] = {
    "cispo": plain_cispo,
    "sapo": plain_sapo,
    "dppo_tv": plain_dppo(lambda p, q: abs(q - p)),
    "dppo_kl": plain_dppo(lambda p, q: p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))),
}


@pytest.mark.parametrize("name", CONFIGS)
@settings(deadline=None, max_examples=150)
@given(group=st.lists(responses(), min_size=1, max_size=4))
def test_losses_and_gradients_are_those_of_plain_formulas(name: str, group: list[Response]) -> None:
    """The mean over responses of each one's mean, at the tokens of the responses; prompts have no gradient."""
    config = CONFIGS[name]
    tokens = tokens_of(group, config)
    found = LOSSES[name](tokens)
    loss = found[0] if isinstance(found, tuple) else found
    weights = tokens.mask / tokens.sums(tokens.mask)[tokens.segment].float() / len(group)
    total = (loss * weights).sum()
    (gradient,) = torch.autograd.grad(total, tokens.log_probs)
    totals, leaves = plain_losses(name, group, config)
    expected = sum(totals) / len(group)
    wanted = torch.autograd.grad(expected, leaves, allow_unused=True) if expected.requires_grad else [None] * len(leaves)
    assert float(total) == pytest.approx(float(expected), rel=2e-5, abs=1e-6)
    slopes = [0.0 if x is None else float(x) for x in wanted]
    assert gradient[tokens.mask > 0].tolist() == pytest.approx(slopes, rel=1e-4, abs=1e-6)
    assert not gradient[tokens.mask == 0].any()


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(-40, -1), st.integers(-20, 20)), min_size=1, max_size=6), st.sampled_from(ESTIMATORS))
def test_kl_estimates_are_those_of_plain_formulas(values: list[tuple[int, int]], estimator: str) -> None:
    """With their gradients; each token's k2 and k3 is at most 10."""
    table = SampleTable.from_samples([Sample((5,), (7,) * len(values), (0.0,) * len(values))])
    micro = pack(table, [0], 4, torch.device("cpu"))
    log_probs = torch.zeros(micro.num_tokens)
    log_probs[: len(values)] = torch.tensor([x * 0.1 for x, _ in values])
    micro.reference_log_probs = log_probs.clone()
    micro.reference_log_probs[: len(values)] += torch.tensor([d * 0.21 for _, d in values])
    found = kl_estimate(log_probs.requires_grad_(), micro, estimator)
    (gradient,) = torch.autograd.grad(found.sum(), log_probs)
    for place, (_, step) in enumerate(values):
        d = step * 0.21
        plain, slope = {"k1": (-d, 1.0), "k2": (d * d / 2, -d), "k3": (math.exp(d) - d - 1, 1 - math.exp(d))}[estimator]
        plain, slope = (plain, slope) if plain < 10 or estimator == "k1" else (10.0, 0.0)
        assert float(found[place]) == pytest.approx(plain, rel=1e-4, abs=1e-5)
        assert float(gradient[place]) == pytest.approx(slope, rel=1e-4, abs=1e-5)


def test_k2_in_the_loss_and_an_entropy_are_terms_of_it() -> None:
    """Loss = policy + coefficient x KL - coefficient x entropy; a KL in the reward is only logged."""
    table = SampleTable.from_samples([Sample((5,), (7, 8, 9), (-1.0, -1.0, -1.0))])
    micro = pack(table, [0], 1, torch.device("cpu"))
    micro.advantages = torch.ones(4)
    micro.reference_log_probs = torch.tensor([-1.2, -0.7, -1.0, 0.0])
    log_probs, entropy, weights = torch.tensor([-1.0, -0.9, -1.1, 0.0]), torch.tensor([0.5, 0.7, 0.9, 5.0]), micro.mask / 3
    common = {"kl_coefficient": 0.5, "kl_estimator": "k2", "entropy_coefficient": 0.1}
    for kl_in in ("loss", "reward"):
        _, sums = grpo_loss(log_probs, micro, weights, AlgorithmConfig(**common, kl_in=kl_in), entropy)  # type: ignore[arg-type]
        kl = (0.2**2 + 0.2**2 + 0.1**2) / 2
        assert float(sums["kl"]) == pytest.approx(kl) and float(sums["entropy"]) == pytest.approx(2.1)
        of_kl = 0.5 * kl / 3 if kl_in == "loss" else 0.0
        assert float(sums["loss"] - sums["policy"]) == pytest.approx(of_kl - 0.1 * 0.7, abs=1e-6)


# ------------------------------------------------------------------------------------------------ advantages


@st.composite
def batches(draw: st.DrawFn) -> AdvantageInput:
    size, num_groups = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    number = size * num_groups
    rewards = np.array([draw(st.sampled_from([0.0, 1.0])) for _ in range(number)])
    return AdvantageInput(
        rewards=rewards,
        groups=np.repeat(np.arange(num_groups), size),
        lengths=np.ones(number, np.int64),
        config=AlgorithmConfig(pass_k=draw(st.integers(2, 4))),
        parts=np.stack([rewards, [draw(st.integers(0, 4)) / 4 for _ in range(number)]], 1),
        part_weights=(1.0, 0.3),
        greedy_rewards=np.repeat([draw(st.sampled_from([0.0, 1.0])) for _ in range(num_groups)], size),
    )


def plain_whitened(values: list[float]) -> list[float]:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return [(value - statistics.fmean(values)) / (deviation + 1e-6) for value in values]


def in_groups(batch: AdvantageInput, values: list[float], function: Callable[[list[float]], list[float]]) -> list[float]:
    rows = itertools.groupby(zip(batch.groups.tolist(), values, strict=True), key=lambda pair: pair[0])
    return [each for _, row in rows for each in function([value for _, value in row])]


def plain_pass_at_k(rewards: list[float], most: int) -> list[float]:
    """Mean and deviation over all k-subsets; a response's advantage is the mean over those that it is in, normalised."""
    k = min(most, len(rewards))
    subsets = list(itertools.combinations(range(len(rewards)), k))
    passed = [float(any(rewards[i] for i in subset)) for subset in subsets]
    mean, deviation = statistics.fmean(passed), statistics.pstdev(passed)
    own = [statistics.fmean(p for p, subset in zip(passed, subsets, strict=True) if i in subset) for i in range(len(rewards))]
    return [(value - mean) / deviation if deviation > 1e-9 else 0.0 for value in own]


def plain_advantages(name: str, batch: AdvantageInput) -> list[float]:
    rewards = batch.rewards.tolist()
    if name == "reinforce_plus_plus":
        return plain_whitened(rewards)
    if name == "reinforce_plus_plus_baseline":
        return plain_whitened(in_groups(batch, rewards, lambda values: [v - statistics.fmean(values) for v in values]))
    if name == "remax":
        return [reward - greedy for reward, greedy in zip(rewards, batch.greedy_rewards.tolist(), strict=True)]
    if name == "pass_at_k":
        return in_groups(batch, rewards, lambda values: plain_pass_at_k(values, batch.config.pass_k))
    columns = [in_groups(batch, column.tolist(), plain_whitened) for column in batch.parts.T]
    first, second = batch.part_weights
    return plain_whitened([first * one + second * other for one, other in zip(*columns, strict=True)])


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name != "group"])
@settings(deadline=None, max_examples=60)
@given(batch=batches())
def test_advantages_are_those_of_plain_formulas(name: str, batch: AdvantageInput) -> None:
    assert list(ADVANTAGES[name](batch)) == pytest.approx(plain_advantages(name, batch), rel=1e-6, abs=1e-6)


def test_gdpo_tells_apart_what_a_sum_of_rewards_does_not() -> None:
    """The collapse that its paper is about (arXiv:2601.05242): of one prompt rewards (0, 0) and (0, 1), of another (0, 0) and
    (1, 1). GRPO normalises both sums to (-0.7071, 0.7071); here the second is (-1.4142, 1.4142), and both are divided by
    (5 / 3) ** 0.5, their deviation over the batch.
    """
    parts = np.array([[0.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]])
    groups, given = np.array([0, 0, 1, 1]), {"lengths": np.ones(4, np.int64), "config": AlgorithmConfig()}
    batch = AdvantageInput(rewards=parts.sum(1), groups=groups, parts=parts, part_weights=(1.0, 1.0), **given)
    unit = 0.5**0.5
    assert list(ADVANTAGES["group"](batch)) == pytest.approx([-unit, unit] * 2, abs=1e-5)
    unit /= (5 / 3) ** 0.5
    assert list(ADVANTAGES["gdpo"](batch)) == pytest.approx([-unit, unit, -2 * unit, 2 * unit], abs=1e-5)


# ------------------------------------------------------------------------------------------------ the user's own


def by_mean(tokens: LossTokens) -> torch.Tensor:
    return (tokens.ratio() * tokens.advantages).mean()


def of_loss(change: Callable[[torch.Tensor, LossTokens], Any]) -> Callable[[LossTokens], Any]:
    return lambda tokens: change(-tokens.ratio() * tokens.advantages, tokens)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "two arguments": (lambda tokens, weights: tokens, "cannot be called with one argument"),
    "no dimension": (by_mean, r"returned shape \[\], not \[12\]"),
    "another shape": (of_loss(lambda loss, _: loss[None]), r"returned shape \[1, 12\], not \[12\]"),
    "one token less": (of_loss(lambda loss, _: loss[1:]), r"returned shape \[11\], not \[12\]"),
    "float64": (of_loss(lambda loss, _: loss.double()), "returned float64, not float32"),
    "no tensor": (lambda tokens: 0.0, "returned float, not a tensor"),
    "no gradient": (of_loss(lambda loss, _: loss.detach()), "no gradient"),
    "NaN": (of_loss(lambda loss, tokens: loss / tokens.mask), "returned (nan|inf|-inf) at token 0 .*, whose mask is 0"),
    "NaN of a gradient": (of_loss(lambda loss, tokens: loss * (tokens.mask * tokens.ratio() - 1).abs().sqrt()), "a gradient of"),
    "raises": (of_loss(lambda loss, tokens: loss + tokens.nothing), "raised AttributeError"),  # type: ignore[attr-defined]
    "no dict": (of_loss(lambda loss, _: (loss, [loss])), "returned list as metrics"),
    "shape of a metric": (of_loss(lambda loss, _: (loss, {"kept": loss.sum()})), r"metric kept: returned shape \[\]"),
    "name of a metric": (of_loss(lambda loss, _: (loss, {"total": loss})), "a metric named 'total'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_losses_that_cannot_be_are_refused_with_their_shape(case: str) -> None:
    function, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        try_loss(function, AlgorithmConfig())


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda batch, more: batch.rewards, "cannot be called"),
        (lambda batch: batch.rewards[1:], r"returned shape \[5\], not \[6\]"),
        (lambda batch: batch.rewards / (batch.rewards - 0.5), "returned (inf|-inf|nan) for response 1"),
        (lambda batch: "none", "not 6 numbers"),
        (lambda batch: batch.nothing, "raised AttributeError"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_advantages_that_cannot_be_are_refused(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        try_advantage(function, AlgorithmConfig())


def test_all_that_have_a_name_pass_the_trial() -> None:
    for name, function in LOSSES.items():
        names = try_loss(function, AlgorithmConfig(loss=name, dual_clip=3.0, kl_coefficient=0.1))
        assert names == {"sapo": (), "clip": ("clipped", "dual_clipped")}.get(name, ("clipped",))
    for name, advantage in ADVANTAGES.items():
        try_advantage(advantage, AlgorithmConfig(advantage=name))
    tokens = next(trial_tokens(AlgorithmConfig()))
    assert dataclasses.replace(tokens, mask=tokens.mask * 0).ratio().tolist() == [1.0] * len(tokens.mask)


def test_a_function_of_the_users_own_is_given_itself() -> None:
    own, config = OwnFunctions(loss=by_mean), AlgorithmConfig(loss="my:loss", advantage="my:advantage")
    assert own.loss_of(config) is by_mean
    with pytest.raises(ValueError, match=r"algorithm.advantage = my:advantage"):
        own.advantage_of(config)
