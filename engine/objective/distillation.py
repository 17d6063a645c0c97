"""Distillation: the loss terms of a teacher's log-probs. Pure functions of tensors.

With `objective` sampled the log-ratio of teacher to policy joins each token's advantage, as the policy gradient of the reverse KL
(Thinking Machines 2025, "On-policy distillation"). With top_k and full a divergence of both distributions is computed at every
position, with its gradient by the policy's logits, over vocabularies in shards of tensor-parallel ranks (GKD, arXiv:2306.13649).
With equal logits each divergence and its gradient are 0 to the last bit. No gradient flows through the choice of the tokens.

Leaves out where the teacher's values come from (engine/teacher.py) and the weights of tokens (loss.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from engine.batch.batch import MicroBatch
from engine.algorithm import TeacherObjective
from engine.objective.loss import Sums
from engine.objective.policy import bounded
from engine.objective.entropy import CHUNK_ELEMENTS
from engine.runtime.megatron import parallel_state as mpu

MAX_DIFFERENCE = 80.0  # of two log-probs in a mixture; exp of it is finite in float32
NO_LOG_PROB = -1e4  # exp of it is 0
LEAST_REST = 1e-6  # probability of all tokens beyond the teacher's most likely ones: 1 less a sum in float32 is no smaller


def summands(log_q: torch.Tensor, log_p: torch.Tensor, objective: TeacherObjective) -> tuple[torch.Tensor, torch.Tensor]:
    """By category, in any shape: its part of the divergence D of the policy q and the teacher p, and q * dD/dq.

    By the logits of q, D has the gradient q * dD/dq - q * sum(q * dD/dq). That sum is -1 for the forward KL.
    `jsd` with b = jsd_beta: b KL(p || m) + (1 - b) KL(q || m) with m = b p + (1 - b) q (arXiv:2306.13649, eq. 2).
    """
    q = log_q.exp()
    if objective.divergence == "reverse_kl":
        value = q * (log_q - log_p)
        return value, value
    p = log_p.exp()
    if objective.divergence == "forward_kl":
        return p * (log_p - log_q), -p
    beta, difference = objective.jsd_beta, (log_p - log_q).clamp(-MAX_DIFFERENCE, MAX_DIFFERENCE)
    policy = -(1 - beta) * q * torch.log1p(beta * torch.expm1(difference))
    return policy - beta * p * torch.log1p((1 - beta) * torch.expm1(-difference)), policy


def num_ranks(group: Any) -> int:
    """Ranks that share the vocabulary; None stands for one."""
    return 1 if group is None else dist.get_world_size(group)


def log_softmax(logits: torch.Tensor, temperature: float, group: Any) -> torch.Tensor:
    """float32, shaped like `logits` [n, vocabulary / tensor size]; each rank of `group` has a shard of the vocabulary."""
    scaled = logits.float() / temperature
    normalizer = torch.logsumexp(scaled, -1)
    if num_ranks(group) > 1:
        peak = normalizer.clone()
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        total = torch.exp(normalizer - peak)
        dist.all_reduce(total, group=group)
        normalizer = peak + total.log()
    return scaled.sub_(normalizer[:, None])


def whole_divergence(
    log_q: torch.Tensor, log_p: torch.Tensor, objective: TeacherObjective, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Over the whole vocabulary: the divergence [n], and its gradient by the policy's logits, like `log_q`."""
    value, weighted = summands(log_q, log_p, objective)
    sums = torch.stack([value.sum(-1), weighted.sum(-1)])
    if num_ranks(group) > 1:
        dist.all_reduce(sums, group=group)
    baseline = -torch.ones_like(sums[1]) if objective.divergence == "forward_kl" else sums[1]
    return sums[0], weighted - log_q.exp_() * baseline[:, None]


def top_divergence(
    log_q: torch.Tensor, ids: torch.Tensor, log_p: torch.Tensor, objective: TeacherObjective, group: Any, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `whole_divergence`, over tokens `ids` [n, k] with the teacher's `log_p` [n, k] and the other tokens as one category.

    It is at most that of the whole vocabulary, and 0 where all k + 1 probabilities are equal. Those of `ids` that are not below
    the policy's `vocab_size`, of a teacher with more embeddings, are among the others.
    """
    size = log_q.shape[1]
    own_ids = ids - (size * dist.get_rank(group) if num_ranks(group) > 1 else 0)
    is_own = (own_ids >= 0) & (own_ids < size)
    own_ids = own_ids.clamp(0, size - 1)
    top_q = torch.where(is_own, log_q.gather(1, own_ids), 0.0)
    if num_ranks(group) > 1:
        dist.all_reduce(top_q, group=group)
    top_q, log_p = (torch.where(ids < vocab_size, each, NO_LOG_PROB) for each in (top_q, log_p))
    all_q = with_rest(top_q)
    value, weighted = summands(all_q, with_rest(log_p), objective)
    baseline = -torch.ones_like(value[:, 0]) if objective.divergence == "forward_kl" else weighted.sum(-1)
    of_rest = weighted[:, -1] / all_q[:, -1].exp()
    gradient = log_q.exp_() * (of_rest - baseline)[:, None]
    of_top = weighted[:, :-1] - top_q.exp() * of_rest[:, None]
    return value.sum(-1), gradient.scatter_add_(1, own_ids, torch.where(is_own, of_top, 0.0))


def with_rest(log_probs: torch.Tensor) -> torch.Tensor:
    """[n, k + 1]: log-probs [n, k], and that of all other tokens together, at least log(LEAST_REST)."""
    rest = (1 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=LEAST_REST).log()
    return torch.cat([log_probs, rest], -1)


class _Divergence(torch.autograd.Function):
    """Keeps the gradient, like the logits, and computes in float32 a few rows after another."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, teacher: tuple[torch.Tensor, ...], compare: Divergence, group: Any
    ) -> torch.Tensor:
        num_rows, values = max(1, CHUNK_ELEMENTS // logits.shape[1]), []
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        for begin in range(0, len(logits), num_rows):
            part = slice(begin, begin + num_rows)
            value, of_logits = compare.rows(logits[part], [each[part] for each in teacher], group)
            values.append(value)
            if gradient is not None:
                gradient[part] = of_logits / compare.temperature
        ctx.save_for_backward(*([] if gradient is None else [gradient]))
        return torch.cat(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradients[0][:, None] * gradient).to(gradient.dtype), None, None, None


@dataclass(frozen=True)
class Divergence:
    """Reads each position's divergence from the policy's logits and what `MicroBatch.targets` has of the teacher."""

    objective: TeacherObjective
    temperature: float
    vocab_size: int  # of the policy, without padding
    teacher_logits: Callable[[torch.Tensor], torch.Tensor] | None = None  # of its hidden states, with `objective` full

    def __call__(self, logits: torch.Tensor, *teacher: torch.Tensor) -> torch.Tensor:
        """float32 [T], the same on every tensor-parallel rank; `logits` and `teacher` are [1, T, ...]."""
        rows = [each[0] for each in teacher]
        if self.teacher_logits is not None:
            with torch.no_grad():
                rows = [self.teacher_logits(rows[0])]
        group = mpu.get_tensor_model_parallel_group()
        return _Divergence.apply(logits[0], tuple(rows), self, group)  # type: ignore[no-any-return, no-untyped-call]

    def rows(self, logits: torch.Tensor, teacher: list[torch.Tensor], group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The divergence of some tokens, and its gradient by logits / temperature; both float32."""
        log_q = log_softmax(logits, self.temperature, group)
        if self.objective.objective == "top_k":
            ids, log_p = teacher
            return top_divergence(log_q, ids, log_p, self.objective, group, self.vocab_size)
        return whole_divergence(log_q, log_softmax(teacher[0], self.temperature, group), self.objective, group)


@torch.no_grad()
def top_tokens(logits: torch.Tensor, top_k: int, temperature: float, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most likely tokens by `logits` [n, vocabulary / tensor size], int64 [n, k], and their log-probs, float32 [n, k]."""
    size = logits.shape[1]
    log_probs, ids = log_softmax(logits, temperature, group).topk(min(top_k, size), -1)
    if num_ranks(group) == 1:
        return ids, log_probs
    ids += dist.get_rank(group) * size
    gathered = [[torch.empty_like(each) for _ in range(num_ranks(group))] for each in (ids, log_probs)]
    for parts, own in zip(gathered, (ids, log_probs), strict=True):
        dist.all_gather(parts, own.contiguous(), group=group)
    log_probs, places = torch.cat(gathered[1], -1).topk(top_k, -1)
    return torch.cat(gathered[0], -1).gather(1, places), log_probs


def log_ratio(micro: MicroBatch, log_probs: torch.Tensor) -> torch.Tensor:
    """log p_teacher - log p_old at each sampled token, float32 [T]; `log_probs`: the policy's current ones."""
    assert micro.teacher_log_probs is not None, "the samples came without the teacher's log-probs"
    old = log_probs.detach() if micro.old_log_probs is None else micro.old_log_probs
    return bounded((micro.teacher_log_probs - old) * micro.mask)


def with_advantages(micro: MicroBatch, log_probs: torch.Tensor, objective: TeacherObjective) -> MicroBatch:
    """With the advantages of rewards by `reward_weight`, to which sampled adds the teacher's log-ratio by `weight`."""
    advantages = objective.reward_weight * micro.advantages
    if objective.objective == "sampled":
        advantages = advantages + objective.weight * log_ratio(micro, log_probs)
    return dataclasses.replace(micro, advantages=advantages)


def add_term(
    loss: torch.Tensor, sums: Sums, kl: torch.Tensor, batch: MicroBatch, weights: torch.Tensor, objective: TeacherObjective
) -> tuple[torch.Tensor, Sums]:
    """The loss with the teacher's term, and sums with it. `kl`: of each token, float32 [T]; with sampled an estimate, whose
    gradient is in the advantages already.
    """
    values = kl.detach() * batch.mask
    sums = {**sums, "teacher_kl": values.sum().double(), "teacher_kl_max": values.abs().max().double()}
    if objective.objective != "sampled":
        term = objective.weight * (kl * weights).sum()
        loss = loss + term
        sums |= {"teacher": term.detach().double(), "loss": loss.detach().double()}
    return loss, sums
