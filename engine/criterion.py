"""The criterion of an engine: which values are read from the logits, and the loss made of them.

It joins the configuration of the algorithm, functions of the user and a teacher. Leaves out the formulas (objective/),
optimizer steps and communication.
"""

from __future__ import annotations

import torch

from engine.batch.batch import MicroBatch
from engine.algorithm import AlgorithmConfig
from engine.minibatch import MiniBatch
from engine.model.head import Values
from engine.objective import distillation, loss, metrics
from engine.objective.logits import LogProbs
from engine.objective.loss import Sums
from engine.objective.own import OwnFunctions, try_loss
from engine.runtime.random_state import unchanged_random_state
from engine.teacher import Teacher


class Criterion:
    """Methods are local to a rank."""

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        own: OwnFunctions,
        read: LogProbs,
        max_new_tokens: int,
        teacher: Teacher | None,
    ) -> None:
        """`read`: gives log-probs alone, at the temperature of the training. `max_new_tokens`: 0 where there is no limit."""
        self.algorithm, self.own, self.max_new_tokens = algorithm, own, max_new_tokens
        self.teacher = None if teacher is None else teacher.objective
        is_grpo = algorithm.name == "grpo"
        self.read = LogProbs(
            read.temperature,
            read.use_fused,
            is_exact=read.is_exact,
            has_entropy=is_grpo and algorithm.log_entropy,
            trains_entropy=is_grpo and algorithm.entropy_coefficient != 0,
            divergence=None if teacher is None else teacher.divergence(read.temperature),
        )
        self.sum_names = [*metrics.SUMS[algorithm.name], *self._own_names()]
        self.sum_names += metrics.TEACHER_SUMS[self.teacher.objective] if self.teacher else ()

    def _own_names(self) -> list[str]:
        """The names of the sums that the loss function reports, on all ranks alike: it is called on tiny batches."""
        if self.algorithm.name != "grpo":
            return []
        with unchanged_random_state():
            return [loss.own_name(name) for name in try_loss(self.own.loss_of(self.algorithm), self.algorithm)]

    def loss(self, mini: MiniBatch, micro: MicroBatch, values: Values) -> tuple[torch.Tensor, Sums]:
        """The share of a micro-batch in the loss of its mini-batch, a scalar with a gradient, and sums for the metrics.

        `values`: the results of `read`, [T] each. Sets `policy_log_probs` of the micro-batch.
        """
        log_probs, *others = values
        teacher = self.teacher
        divergence = None if self.read.divergence is None else others.pop(0)
        sizes = mini.num_tokens, mini.num_members
        weights = loss.aggregation_weights(micro, *sizes, self.algorithm.loss_aggregation, self.max_new_tokens)
        if self.algorithm.name == "grpo":
            micro.policy_log_probs = log_probs.detach() if micro.old_log_probs is None else micro.old_log_probs
            batch = micro if teacher is None else distillation.with_advantages(micro, log_probs, teacher)
            entropy = others[0] if others else None
            value, sums = loss.grpo_loss(log_probs, batch, weights, self.algorithm, entropy, self.own.loss)
        else:
            value, sums = loss.sft_loss(log_probs, micro, weights)
            value = value if teacher is None else teacher.reward_weight * value
        if teacher is None:
            return value, sums
        kl = -distillation.log_ratio(micro, log_probs) if divergence is None else divergence
        return distillation.add_term(value, sums, kl, micro, weights, teacher)
