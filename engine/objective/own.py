"""User-defined loss and advantage functions, which replace built-in ones and are tried on tiny batches before a start.

    own = OwnFunctions(loss=my_loss)
    names = try_loss(my_loss, algorithm)      # ValueError with the shape, dtype or number that is wrong

Leaves out how a config names them (megasync/config/named.py).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.config import is_own
from engine.algorithm import AlgorithmConfig
from engine.objective.advantages import ADVANTAGES, AdvantageFunction, AdvantageInput, checked_advantages
from engine.objective.policy import LOSSES, LossFunction, LossTokens

METRIC_NAME = re.compile(r"[a-z]\w*")
TAKEN = ("kl", "policy", "total", "load_balancing", "sft")  # names of metrics below loss/


@dataclass(frozen=True)
class OwnFunctions:
    """The user's functions that a config names. `part_weights`: weights of the rewards in the samples' `reward_parts`."""

    loss: LossFunction | None = None
    advantage: AdvantageFunction | None = None
    part_weights: Sequence[float] = ()

    def loss_of(self, config: AlgorithmConfig) -> LossFunction:
        return self.loss or _named("loss", config.loss, LOSSES)

    def advantage_of(self, config: AlgorithmConfig) -> AdvantageFunction:
        return self.advantage or _named("advantage", config.advantage, ADVANTAGES)


def _named(key: str, name: str, functions: dict[str, Any]) -> Any:
    if is_own(name):
        raise ValueError(f"algorithm.{key} = {name}: give the function itself as Engine(own=OwnFunctions({key}=...))")
    return functions[name]


def try_loss(function: LossFunction, config: AlgorithmConfig) -> tuple[str, ...]:
    """The names of the values that the loss function reports.

    Raises:
        ValueError: it does not take LossTokens, raises, or returns another shape or dtype, NaN, or no gradient.
    """
    names: tuple[str, ...] = ()
    for tokens in trial_tokens(config):
        found = _called(function, tokens, "LossTokens")
        loss, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        _check_tensor("", loss, tokens)
        if loss.dtype is not torch.float32:
            raise ValueError(f"returned {str(loss.dtype).removeprefix('torch.')}, not float32")
        if not loss.requires_grad:
            raise ValueError("returned a loss that does not depend on log_probs: it has no gradient")
        (gradient,) = torch.autograd.grad(loss.sum(), tokens.log_probs)
        _check_finite("a gradient of ", gradient, tokens)
        if not isinstance(metrics, dict):
            raise ValueError(f"returned {type(metrics).__name__} as metrics, not a dict of tensors by name")  # noqa: TRY004
        for name, values in metrics.items():
            if not isinstance(name, str) or not METRIC_NAME.fullmatch(name) or name in TAKEN:
                raise ValueError(f"returned a metric named {name!r}; lower-case letters, digits and _ make a name, but {TAKEN}")
            _check_tensor(f"metric {name}: ", values, tokens)
        names = tuple(metrics)
    return names


def try_advantage(function: AdvantageFunction, config: AlgorithmConfig) -> None:
    """ValueError where it does not take an AdvantageInput, raises, or returns another number of numbers, or NaN."""
    for groups in ([0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1]):
        number = len(groups)
        batch = AdvantageInput(
            rewards=np.arange(number) % 3 / 2.0,
            groups=np.array(groups),
            lengths=np.arange(1, number + 1),
            config=config,
            parts=np.stack([np.arange(number) % 2, np.arange(number) % 3], 1).astype(np.float64),
            part_weights=(1.0, 0.5),
            greedy_rewards=np.full(number, 0.5),
        )
        checked_advantages(_called(function, batch, "AdvantageInput"), number)


def trial_tokens(config: AlgorithmConfig) -> Iterator[LossTokens]:
    """Tiny batches: prompts, responses of both signs, one that is left out of the loss, padding; on policy, and beside it."""
    for lengths, shift in (((4, 5, 3), 0.0), ((6, 3, 7), 0.5)):
        segment = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
        place = torch.arange(len(segment), dtype=torch.float32)
        mask = ((place % 4 > 0) & (segment < 2)).float()
        log_probs = (-0.2 - place % 5 / 4).requires_grad_()
        beside = log_probs.detach() - shift * torch.sin(place)
        yield LossTokens(
            log_probs=log_probs,
            old_log_probs=torch.where(mask > 0, beside, 0.9),
            rollout_log_probs=torch.where(mask > 0, beside - shift / 10, 0.0),
            reference_log_probs=beside - 0.1 if config.kl_coefficient > 0 else None,
            advantages=torch.tensor([1.0, -0.7, 0.3])[segment],
            mask=mask,
            segment=segment,
            num_segments=3,
            config=config,
            extras={"entropy": torch.ones_like(place)},
        )


def _called(function: Callable[[Any], Any], argument: Any, kind: str) -> Any:
    try:
        inspect.signature(function).bind(argument)
    except TypeError as error:
        raise ValueError(f"cannot be called with one argument, {kind}: {error}") from error
    except ValueError:  # a function of C that does not tell
        pass
    try:
        return function(argument)
    except Exception as error:
        raise ValueError(f"raised {type(error).__name__} on a tiny batch: {error}") from error


def _check_tensor(what: str, values: Any, tokens: LossTokens) -> None:
    if not isinstance(values, torch.Tensor):
        raise ValueError(f"{what}returned {type(values).__name__}, not a tensor")  # noqa: TRY004
    if values.shape != tokens.mask.shape:
        raise ValueError(f"{what}returned shape {list(values.shape)}, not {list(tokens.mask.shape)}, one number a token")
    _check_finite(what, values.detach(), tokens)


def _check_finite(what: str, values: torch.Tensor, tokens: LossTokens) -> None:
    bad = (~torch.isfinite(values)).nonzero().flatten().tolist()
    if bad:
        where = "in the loss" if tokens.mask[bad[0]] else "whose mask is 0, and which must be finite too"
        raise ValueError(f"{what}returned {values[bad[0]].item()} at token {bad[0]} of a tiny batch, {where}")
