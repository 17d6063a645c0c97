"""Divergences and gradients beside plain formulas in float64; sampled tokens beside the whole vocabulary. No ranks.

python -m pytest tests/engine/objective/test_distillation.py
"""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from engine.batch.batch import MicroBatch, SampleTable, pack
from engine.algorithm import AlgorithmConfig, TeacherObjective
from engine.objective import distillation
from engine.objective.distillation import Divergence, top_tokens
from engine.objective.loss import grpo_loss
from engine.sample import Sample

FAST = settings(derandomize=True, database=None, deadline=None, max_examples=60)
SIZE = 11  # of the vocabulary
DIVERGENCES = ("reverse_kl", "forward_kl", "jsd")
objectives = st.builds(
    TeacherObjective,
    objective=st.just("full"),
    divergence=st.sampled_from(DIVERGENCES),
    jsd_beta=st.sampled_from([0.05, 0.5, 0.9]),
    top_k=st.integers(1, SIZE),
)
temperatures = st.sampled_from([0.5, 1.0, 1.7])


def drawn(seed: int, num_rows: int = 4, spread: float = 2.0) -> torch.Tensor:
    """Logits [rows, SIZE]."""
    return spread * torch.randn(num_rows, SIZE, generator=torch.Generator().manual_seed(seed))


def plainly(q: torch.Tensor, p: torch.Tensor, objective: TeacherObjective) -> torch.Tensor:
    """By row, of probabilities [rows, categories]."""
    if objective.divergence == "reverse_kl":
        return (q * (q / p).log()).sum(-1)
    if objective.divergence == "forward_kl":
        return (p * (p / q).log()).sum(-1)
    beta = objective.jsd_beta
    m = beta * p + (1 - beta) * q
    return beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1)


def merged(probabilities: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[rows, k + 1]: those of `ids` [rows, k], and of the others together."""
    top = probabilities.gather(1, ids)
    return torch.cat([top, 1 - top.sum(-1, keepdim=True)], -1)


def read(
    logits: torch.Tensor, teacher: tuple[torch.Tensor, ...], objective: TeacherObjective, temperature: float
) -> torch.Tensor:
    """As the engine does, on one rank."""
    reader = Divergence(objective, temperature, SIZE)
    return distillation._Divergence.apply(logits, teacher, reader, None)  # type: ignore[no-any-return, no-untyped-call]


@FAST
@given(st.integers(0, 2**31), st.integers(0, 2**31), objectives, temperatures)
def test_value_and_gradient_of_the_whole_vocabulary(
    own: int, other: int, objective: TeacherObjective, temperature: float
) -> None:
    policy, teacher, weights = drawn(own).requires_grad_(), drawn(other), torch.tensor([1.0, -0.5, 0.0, 2.0])
    found = read(policy, (teacher,), objective, temperature)
    (gradient,) = torch.autograd.grad((found * weights).sum(), policy)
    exact = policy.detach().double().requires_grad_()
    expected = plainly((exact / temperature).softmax(-1), (teacher.double() / temperature).softmax(-1), objective)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), exact)
    assert found.dtype == torch.float32 and (found >= -1e-6).all()
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=5e-6)
    torch.testing.assert_close(gradient.double(), wanted, rtol=1e-4, atol=2e-5)


@FAST
@given(st.integers(0, 2**31), st.integers(0, 2**31), objectives, temperatures)
def test_value_and_gradient_of_likely_tokens(own: int, other: int, objective: TeacherObjective, temperature: float) -> None:
    """Beside the formula over k + 1 categories; with k = vocabulary it is that of the whole vocabulary."""
    objective = objective.model_copy(update={"objective": "top_k"})
    policy, teacher = drawn(own, spread=1.0).requires_grad_(), drawn(other, spread=1.0)
    ids, log_probs = top_tokens(teacher, objective.top_k, temperature, None)
    found = read(policy, (ids, log_probs), objective, temperature)
    (gradient,) = torch.autograd.grad(found.sum(), policy)
    exact = policy.detach().double().requires_grad_()
    q, p = (exact / temperature).softmax(-1), (teacher.double() / temperature).softmax(-1)
    if objective.top_k < SIZE:
        q, p = merged(q, ids), merged(p, ids)
    expected = plainly(q, p, objective)
    (wanted,) = torch.autograd.grad(expected.sum(), exact)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=5e-6)
    torch.testing.assert_close(gradient.double(), wanted, rtol=1e-4, atol=1e-5)
    whole = read(policy, (teacher,), objective.model_copy(update={"objective": "full"}), temperature)
    assert (found <= whole + 1e-5).all(), "merging categories cannot raise a divergence"
    if objective.top_k == SIZE:
        torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)


@FAST
@given(st.integers(0, 2**31), st.integers(0, 2**31), objectives, temperatures, st.integers(0, 5))
def test_likely_tokens_that_the_policy_has_no_embeddings_for_are_among_the_others(
    own: int, other: int, objective: TeacherObjective, temperature: float, padding: int
) -> None:
    """Of a teacher with a larger vocabulary, such as Qwen2.5-7B's beside 1.5B's. `padding`: rows of the policy's logits."""
    objective = objective.model_copy(update={"objective": "top_k", "top_k": min(objective.top_k, SIZE - 1)})
    policy = torch.cat([drawn(own, spread=1.0), torch.full((4, padding), -1e30)], 1).requires_grad_()
    teacher = torch.cat([drawn(other, spread=1.0), 1.0 + drawn(other + 1, spread=1.0)[:, :4]], 1)
    ids, log_probs = top_tokens(teacher, objective.top_k, temperature, None)
    found = read(policy, (ids, log_probs), objective, temperature)
    (gradient,) = torch.autograd.grad(found.sum(), policy)
    exact = policy.detach()[:, :SIZE].double().requires_grad_()
    q, p = (exact / temperature).softmax(-1), (teacher.double() / temperature).softmax(-1)
    expected = torch.cat([plainly(*(merged(each[None, row], known[None]) for each in (q, p)), objective)
                          for row in range(4) for known in [ids[row][ids[row] < SIZE]]])  # fmt: skip
    (wanted,) = torch.autograd.grad(expected.sum(), exact)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=5e-6)
    torch.testing.assert_close(gradient[:, :SIZE].double(), wanted, rtol=1e-4, atol=1e-5)
    assert not gradient[:, SIZE:].any()


@FAST
@given(
    st.integers(0, 2**31),
    objectives,
    temperatures,
    st.sampled_from(["full", "top_k"]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_teacher_equal_to_the_policy_is_zero_to_the_last_bit(
    seed: int, objective: TeacherObjective, temperature: float, kind: str, dtype: torch.dtype
) -> None:
    """Value and gradient, also with logits of a padded vocabulary."""
    objective = objective.model_copy(update={"objective": kind})
    logits = drawn(seed, spread=5.0).to(dtype)
    logits[:, -2:] = -1e30
    teacher = (logits.clone(),) if kind == "full" else top_tokens(logits, objective.top_k, temperature, None)
    policy = logits.requires_grad_()
    found = read(policy, teacher, objective, temperature)
    (gradient,) = torch.autograd.grad(found.sum(), policy)
    assert not found.any() and not gradient.any()


@FAST
@given(objectives, st.sampled_from(["full", "top_k"]))
def test_far_teachers_stay_finite(objective: TeacherObjective, kind: str) -> None:
    objective = objective.model_copy(update={"objective": kind})
    policy = torch.zeros(2, SIZE)
    policy[0, 0], policy[1, 3] = 400.0, 400.0
    teacher = policy.flip(0)
    given_ = (teacher,) if kind == "full" else top_tokens(teacher, objective.top_k, 1.0, None)
    found = read(policy.requires_grad_(), given_, objective, 1.0)
    (gradient,) = torch.autograd.grad(found.sum(), policy)
    assert torch.isfinite(found).all() and torch.isfinite(gradient).all() and (found > 0).all()


def packed(num_samples: int, tokens: torch.Tensor, teacher: torch.Tensor) -> MicroBatch:
    """One-token responses `tokens`, with the teacher's log-probs of them."""
    samples = [
        Sample((1,), (int(token),), (0.0,), teacher_log_probs=[log_prob]) for token, log_prob in zip(tokens, teacher, strict=True)
    ]
    assert len(samples) == num_samples
    return pack(SampleTable.from_samples(samples), list(range(num_samples)), 1, torch.device("cpu"))


def test_sampled_tokens_have_the_gradient_of_the_whole_vocabulary_on_average() -> None:
    """10,000 tokens of one distribution: each logit's gradient is within four standard errors of the reverse KL's."""
    number = 10_000
    policy, teacher = drawn(0, 1, 1.0)[0], drawn(1, 1, 1.0)[0]
    tokens = torch.multinomial(policy.softmax(-1), number, replacement=True, generator=torch.Generator().manual_seed(2))
    log_p = teacher.log_softmax(-1)
    logits = policy.repeat(number, 1).requires_grad_()
    log_probs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    micro = packed(number, tokens, log_p[tokens])
    spread = torch.zeros(micro.num_tokens).masked_scatter(micro.mask.bool(), log_probs)
    objective = TeacherObjective(objective="sampled")
    batch = distillation.with_advantages(micro, spread, objective)
    config = AlgorithmConfig(importance_correction="none")
    value, _ = grpo_loss(spread, batch, batch.mask, config)
    (by_sample,) = torch.autograd.grad(value, logits)
    whole = policy[None].clone().requires_grad_()
    (wanted,) = torch.autograd.grad(read(whole, (teacher[None],), TeacherObjective(objective="full"), 1.0).sum(), whole)
    error = (by_sample.mean(0) - wanted[0]).abs() / (by_sample.std(0) / number**0.5)
    print("standard errors", error)
    assert (error < 4).all() and wanted.abs().max() > 0.05
    total, _ = distillation.add_term(value, {}, -distillation.log_ratio(micro, spread), micro, micro.mask, objective)
    assert total is value, "its gradient is in the advantages"


def test_rewards_and_teacher_are_weighted() -> None:
    micro = dataclasses.replace(packed(2, torch.tensor([3, 4]), torch.tensor([-1.0, -2.0])), advantages=torch.ones(4))
    log_probs = torch.tensor([-3.0, 0.0, -0.5, 0.0])
    found = distillation.with_advantages(micro, log_probs, TeacherObjective(weight=2.0, reward_weight=0.5)).advantages
    assert found.tolist() == pytest.approx([0.5 + 2 * 2.0, 0.5, 0.5 - 2 * 1.5, 0.5])
    assert distillation.with_advantages(micro, log_probs, TeacherObjective(objective="full")).advantages.tolist() == [1.0] * 4
    micro.old_log_probs = torch.tensor([-1.0, 0.0, -2.0, 0.0])
    assert distillation.log_ratio(micro, log_probs).tolist() == [0.0] * 4, "the policy is that before the batch's first step"
