"""Is there an episode to play, and do its keys have a use? No torch in here.

Leaves out what an episode does, which its own failures tell (rollouts/turns.py).
"""

from __future__ import annotations

from megasync.config.errors import ConfigError
from megasync.config.schema import Config, RolloutConfig
from megasync.episodes.resolve import resolve_episode

KEYS = [name for name in RolloutConfig.model_fields if name.startswith("episode_")]


def check_episodes(config: Config) -> None:
    """ConfigError for keys of episodes without one, and for an episode that cannot be imported or called."""
    rollout = config.rollout
    if not rollout.episode:
        for name in KEYS:
            value = getattr(rollout, name)
            if value != RolloutConfig.model_fields[name].default:
                message = f"rollout.{name} = {value}: rollout.episode is empty, and samples have one turn"
                remedy = f"write rollout.episode=package.module:name, or leave rollout.{name} out"
                raise ConfigError(message, remedy=remedy)
        return
    resolve_episode(rollout.episode)
