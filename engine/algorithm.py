"""The YAML key `algorithm`, and a teacher's objective: settings of the loss. No torch in here.

Leaves out computing it (objective/), and what goes with what (megasync/checks/).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from engine.config import FractionBelowOne, Section, named_or_own

PRESETS: dict[str, dict[str, Any]] = {  # published algorithms as keys of `algorithm`; sources in docs/how_a_step_works.md
    "grpo": {"loss_aggregation": "sequence_mean", "clip_high": 0.2, "kl_coefficient": 0.04},
    "dr_grpo": {"clip_high": 0.2, "loss_aggregation": "constant_length", "normalize_advantage_by_std": False},
    "dapo": {
        "clip_high": 0.28, "loss_aggregation": "token_mean", "truncated": "penalise", "overlong_buffer": 200,
        "filter_groups": True,
    },
    "gspo": {
        "ratio_level": "sequence", "loss_aggregation": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4, "num_minibatches": 4,
    },
    "rloo": {"baseline": "leave_one_out", "loss_aggregation": "constant_length", "normalize_advantage_by_std": False},
    "cispo": {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0, "loss_aggregation": "token_mean"},
    "sapo": {"loss": "sapo", "loss_aggregation": "sequence_mean", "num_minibatches": 4},
    "gmpo": {"loss": "gmpo", "clip_low": 0.33, "clip_high": 0.49, "loss_aggregation": "sequence_mean"},
    "dppo_tv": {"loss": "dppo_tv", "clip_low": 0.15, "clip_high": 0.15, "loss_aggregation": "token_mean"},
    "dppo_kl": {"loss": "dppo_kl", "clip_low": 0.05, "clip_high": 0.05, "loss_aggregation": "token_mean"},
    "reinforce_plus_plus": {
        "advantage": "reinforce_plus_plus", "clip_high": 0.2, "kl_coefficient": 0.01, "kl_estimator": "k1", "kl_in": "reward",
    },
    "reinforce_plus_plus_baseline": {
        "advantage": "reinforce_plus_plus_baseline", "clip_high": 0.2, "kl_coefficient": 0.001, "kl_estimator": "k2",
    },
}  # fmt: skip
LOSSES = ("clip", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl")
ADVANTAGES = ("group", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "pass_at_k", "gdpo")
GROUPED = ("group", "reinforce_plus_plus_baseline", "pass_at_k")  # of them: 0 where a group's rewards are equal


class AlgorithmConfig(Section):
    """The loss. GRPO: arXiv:2402.03300; clip-higher and token mean: DAPO, arXiv:2503.14476."""

    name: Literal["grpo", "sft"] = "grpo"
    """grpo: rollouts with rewards; sft: supervised steps on the data's answers."""
    preset: Literal[
        "none", "grpo", "dr_grpo", "dapo", "gspo", "rloo", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl", "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
    ] = "none"  # fmt: skip
    """Sets the keys below as a published algorithm has them (docs/how_a_step_works.md); keys that are given beside it win."""
    loss: Annotated[str, named_or_own(LOSSES)] = "clip"
    """Of each token: clip (PPO), cispo, sapo, gmpo, dppo_tv, dppo_kl, or your own package.module:function (docs/your_own.md)."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The ratio of new to old probabilities counts down to 1 - clip_low; dppo_tv, dppo_kl: the largest divergence of tokens that
    are made less likely."""
    clip_high: NonNegativeFloat = 0.28
    """The ratio of new to old probabilities counts up to 1 + clip_high; dppo_tv, dppo_kl: the largest divergence of tokens that
    are made likelier."""
    sapo_temperature_positive: PositiveFloat = 1.0
    """sapo: how fast the gate closes where the advantage is positive."""
    sapo_temperature_negative: PositiveFloat = 1.05
    """sapo: how fast the gate closes where the advantage is negative."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Where the advantage is negative the ratio counts up to this (dual clip, arXiv:1912.09729), such as 3; null: all of it."""
    ratio_level: Literal["token", "sequence"] = "token"
    """sequence: all tokens of a response get the geometric mean of its ratios (GSPO, arXiv:2507.18071)."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Above 0: an estimate of the KL divergence from the start model and adapter, times this, is added to the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of each token, with d = log p_start - log p: k1 -d, k2 d^2 / 2, k3 exp(d) - d - 1."""
    kl_in: Literal["loss", "reward"] = "loss"
    """reward: the sum of a response's estimates, times kl_coefficient, is taken from its reward instead."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """This times each token's entropy over the vocabulary is taken from the loss."""
    load_balancing: NonNegativeFloat = 0.0
    """Mixtures of experts: this times each layer's load-balancing loss (arXiv:2101.03961), 1 where even, is added to the loss."""
    router_bias_update_rate: NonNegativeFloat = 0.0
    """DeepSeek, Kimi, GLM: added to biases of experts with few tokens, taken from others' (arXiv:2408.15664); 0: frozen."""
    router_replay: Literal["off", "rollout"] = "off"
    """rollout: tokens go through the experts that vLLM chose for them (R3, arXiv:2510.11370); off: the trainer chooses."""
    log_router_gap: bool = False
    """router_replay: also log the gap without it, for one more forward pass a batch."""
    support_replay: bool = False
    """The trainer normalises log-probs over the tokens that top_k, top_p and min_p kept, as vLLM does; needs rollout.top_k."""
    importance_correction: Literal["none", "tis", "mask"] = "tis"
    """Weights: the trainer's probabilities over those of the rollout, truncated (tis), or 0 out of bounds (mask)."""
    importance_level: Literal["token", "sequence", "geometric"] = "token"
    """These weights by token, by sequence as the product of its tokens', or as their geometric mean."""
    importance_cap: PositiveFloat = 2.0
    """Where importance sampling is truncated; mask: the largest ratio that counts."""
    importance_floor: FractionBelowOne = 0.5
    """mask: the smallest ratio that counts."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = "token_mean"
    """Mean over tokens, over each response's mean, or over responses' sums by max_new_tokens (Dr. GRPO, arXiv:2503.20783)."""
    advantage: Annotated[str, named_or_own(ADVANTAGES)] = "group"
    """How rewards become advantages: group (GRPO, RLOO), reinforce_plus_plus, reinforce_plus_plus_baseline, remax, pass_at_k,
    gdpo, or your own package.module:function (docs/your_own.md)."""
    credit: Literal["episode", "turn"] = "episode"
    """Rewards that make a sampled token's advantage: all of the episode, or turn: all but those of earlier turns; turn needs
    rollout.episode and advantage=group (docs/agents.md)."""
    pass_k: Annotated[int, Field(ge=2)] = 4
    """advantage=pass_at_k: k. A reward above 0.5 counts as right."""
    baseline: Literal["group_mean", "leave_one_out"] = "group_mean"
    """advantage=group: the baseline of a reward, the mean of the group or of its other samples (RLOO, arXiv:2402.14740)."""
    normalize_advantage_by_std: bool = True
    """advantage=group: divide a group's advantages by the standard deviation of its rewards, with n - 1 in the denominator."""
    truncated: Literal["keep", "mask", "penalise"] = "keep"
    """Responses cut off at max_new_tokens: kept, out of the loss, or with less reward for all that come near (DAPO)."""
    overlong_buffer: NonNegativeInt = 0
    """penalise: tokens before max_new_tokens in which the reward falls by up to 1."""
    log_entropy: bool = True
    """grpo: log the policy's entropy over the vocabulary, as always with an entropy_coefficient."""
    filter_groups: bool = False
    """grpo: other prompts take the place of those whose samples all have the same reward (dynamic sampling, DAPO)."""
    filter_factor: PositiveInt = 3
    """filter_groups: a batch samples at most this many times its number of prompts, then trains on the groups that remain."""
    num_minibatches: PositiveInt = 1
    """Parts of a batch, an optimizer step each."""
    num_passes: PositiveInt = 1
    """How many times a batch is trained on, all of its mini-batches in turn (mu of GRPO, epochs of PPO); the old log-probs are
    of the weights before the first."""
    non_finite: Literal["stop", "skip"] = "stop"
    """On a loss or gradient that is not finite: stop the run, or skip the optimizer step and count it."""
    old_log_probs: Literal["auto", "separate"] = "auto"
    """auto: with one optimizer step a batch, taken from the training pass; separate: always from a pass of their own."""

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps."""
        return self.num_minibatches * self.num_passes

    @property
    def penalises_kl(self) -> bool:
        """Whether rewards are less by the KL's estimate."""
        return self.kl_coefficient > 0 and self.kl_in == "reward"


class TeacherObjective(Section):
    """How a teacher's log-probs enter the loss (on-policy distillation, arXiv:2306.13649)."""

    objective: Literal["sampled", "top_k", "full"] = "sampled"
    """sampled: reverse KL's policy gradient, the log-ratio of teacher to policy joins each sampled token's advantage; top_k: a
    divergence over the teacher's most likely tokens, and the rest as one; full: over the whole vocabulary."""
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """top_k, full: KL(policy || teacher), KL(teacher || policy), or the generalised Jensen-Shannon divergence between both."""
    jsd_beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """jsd: the teacher's share of the mixture; near 0 it is close to the forward KL, near 1 to the reverse KL (each scaled)."""
    top_k: PositiveInt = 64
    """objective=top_k: the teacher's most likely tokens that are compared at each position."""
    weight: PositiveFloat = 1.0
    """Of the teacher's term."""
    reward_weight: NonNegativeFloat = 1.0
    """Of the task's own term beside it: the advantages of rewards, in supervised steps the data's loss; 0: the teacher alone."""
