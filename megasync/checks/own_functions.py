"""The user's own loss, advantage, filter, callbacks and loggers: imported, and tried before anything starts. No torch in here.

    check_own_functions(config)                      # ConfigError by key, with the shape or number that is wrong
    engine = Engine(..., own=own_functions(config))

Leaves out rewards and episodes, which have processes of their own (rewards/resolve.py, episodes/resolve.py).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from engine.config import is_own
from megasync.config.errors import ConfigError, ErrorCollector
from megasync.config.named import own_object
from megasync.config.schema import Config
from megasync.report.callbacks import resolve_callbacks
from megasync.report.loggers import resolve_logger
from megasync.rewards.resolve import weights
from megasync.rollouts.filters import resolve_filter

if TYPE_CHECKING:
    from engine.objective.own import OwnFunctions

WANTED = {
    "loss": "a function of one LossTokens (engine/objective/policy.py), which returns the loss of each token, float32 [T]",
    "advantage": "a function of one AdvantageInput (engine/objective/advantages.py), which returns a number for each response",
}


def check_own_functions(config: Config) -> None:
    """ConfigError for all that cannot be used. Losses and advantages are tried where there is torch."""
    errors, is_grpo = ErrorCollector(), config.algorithm.name == "grpo"
    with errors.collect():
        resolve_callbacks(config.run.callbacks)
    for name in filter(is_own, config.run.loggers):
        with errors.collect():
            resolve_logger(name)
    if is_grpo and config.rollout.filter:
        with errors.collect():
            resolve_filter(config.rollout.filter)
    for key in WANTED if is_grpo else ():
        with errors.collect():
            _own(config, key)
    errors.raise_all()


def own_functions(config: Config) -> OwnFunctions:
    """The user-defined functions that a run's engine takes beside the config. ConfigError: as above."""
    from engine.objective.own import OwnFunctions

    part_weights = tuple(weights(config.rollout.reward).values())
    if config.algorithm.name == "sft":
        return OwnFunctions()
    return OwnFunctions(_own(config, "loss"), _own(config, "advantage"), part_weights)


def _own(config: Config, key: str) -> Any:
    """The function of algorithm.`key`, tried; None where the config names one of ours."""
    path = getattr(config.algorithm, key)
    if not is_own(path):
        return None
    function = own_object(f"algorithm.{key}", path, WANTED[key], [f"the {'tokens' if key == 'loss' else 'batch'}"])
    if find_spec("torch"):  # a machine that only submits runs may have none
        from engine.objective import own

        try:
            (own.try_loss if key == "loss" else own.try_advantage)(function, config.algorithm)
        except ValueError as error:
            raise ConfigError(f"algorithm.{key} = {path}: {error}", remedy=f"name {WANTED[key]}") from error
    return function
