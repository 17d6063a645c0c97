"""Sample: one prompt with one response, the unit that rollouts hand to training. No torch in here.

A response may hold given tokens among the sampled ones, such as a tool's answer: `is_sampled` marks the sampled ones, and only
these are in the loss. Several samples may be branches of one episode: its sampled tokens, each in exactly one of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
ExpertArray = npt.NDArray[np.uint8] | npt.NDArray[np.int16]
TEACHER_ARRAYS = {"teacher_log_probs": np.float32, "teacher_top_ids": np.int32, "teacher_top_log_probs": np.float32}
TOKEN_ARRAYS = {"prompt_ids": np.int32, "response_ids": np.int32, "rollout_log_probs": np.float32, "weight_versions": np.int32}


@dataclass(frozen=True, slots=True)
class RolloutSampling:
    """How the rollouts sample. `max_new_tokens`: the limit of a response, 0 where none is known."""

    temperature: float = 1.0
    max_new_tokens: int = 0


AS_THE_MODEL = RolloutSampling()


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Token ids and their values. Any sequence of numbers becomes an array of the field's dtype.

    Supervised examples leave the rollout's fields empty. Without given tokens `is_sampled` is empty, also where it was all true.
    """

    prompt_ids: IntArray  # [prompt tokens], at least one
    response_ids: IntArray  # [response tokens]
    # [response tokens], by vLLM at sampling time, natural log
    rollout_log_probs: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))
    weight_versions: IntArray = field(default_factory=lambda: np.empty(0, np.int32))  # [response tokens]
    reward: float = 0.0
    group: int = 0  # samples of one prompt share it
    member: int = -1  # of its group, which consecutive samples share where they are branches of one episode; -1: no other has it
    finish_reason: str = "stop"  # stop | length: the response was cut off at the most tokens allowed
    reward_parts: Sequence[float] = ()  # of each reward, without its weight, where there are several; NaN: not known
    greedy_reward: float = math.nan  # of its prompt's greedy response, where there is one
    # with algorithm.credit=turn: of each turn of the member, the sum of its reward and of those of later ones; NaN: no such turn
    turn_returns: Sequence[float] = ()
    turn_spans: Sequence[tuple[int, int, int]] = ()  # beside these: turn, first response token and number of its sampled tokens
    # [tokens - 1, layers, experts of a token], where vLLM returned them; of all tokens but the last, which went through no layer
    routed_experts: ExpertArray = field(default_factory=lambda: np.empty((0, 0, 0), np.uint8))
    # [response tokens + kept tokens]: of each response token how many tokens the sampler kept, then their ids; empty: not known
    support: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    # [response tokens]; log-probs and versions of the others have no meaning; empty: all are sampled
    is_sampled: BoolArray = field(default_factory=lambda: np.empty(0, np.bool_))
    # [response tokens], natural log-probs by a teacher that was asked in the rollout; of given tokens without meaning
    teacher_log_probs: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))
    # [response tokens, k], the teacher's most likely tokens at each position, and their natural log-probs
    teacher_top_ids: IntArray = field(default_factory=lambda: np.empty((0, 0), np.int32))
    teacher_top_log_probs: FloatArray = field(default_factory=lambda: np.empty((0, 0), np.float32))

    def __post_init__(self) -> None:
        for name, dtype in {**TOKEN_ARRAYS, **TEACHER_ARRAYS, "support": np.int32}.items():
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype))
        mask = np.asarray(self.is_sampled, np.bool_)
        assert len(mask) in (0, len(self.response_ids)), "a mask has a value for each response token"
        object.__setattr__(self, "is_sampled", mask[:0] if mask.all() else mask)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def num_sampled(self) -> int:
        """Response tokens that the model sampled."""
        return int(self.is_sampled.sum()) if len(self.is_sampled) else len(self.response_ids)
