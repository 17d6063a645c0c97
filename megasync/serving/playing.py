"""Episodes of a run's evaluation sets, played with replicas that serve a folder. Leaves out what they are worth (answers.py).

played = play(config, pool, evaluation, prompts)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megasync.config.schema import Config
from megasync.rollouts.evaluation import Evaluation, requests_of
from megasync.rollouts.requests import task_of

if TYPE_CHECKING:
    from bridge.replicas.pool import ReplicaPool
    from megasync.data.prompts import Prompts
    from megasync.episodes.task import Played
    from megasync.rewards.pool import Scored
    from megasync.rollouts.group import Group


def play(config: Config, pool: ReplicaPool, evaluation: Evaluation, prompts: Prompts) -> list[list[Played]]:
    """Of every example, in order, with the seeds of a run's own evaluation.

    Raises:
        RuntimeError: too few replicas are left, or an episode failed and rollout.episode_on_failure is stop.
    """
    from bridge.messages import FOLDER_VERSION
    from megasync.episodes.pool import EpisodePool
    from megasync.rollouts.rollout import stream_settings
    from megasync.rollouts.stream import RolloutStream
    from megasync.rollouts.turns import episode_settings

    requests = requests_of(evaluation, prompts, config.run.seed)
    tasks = [task_of(prompts, *pair) for pair in zip(evaluation.examples, requests, strict=True)]
    players = EpisodePool(config)
    settings = stream_settings(config, scores_groups=False), _no_group, _no_scores, _note
    stream = RolloutStream(pool, *settings, episodes=(players, episode_settings(config)))
    try:
        stream.serve(FOLDER_VERSION)
        played = stream.generate(requests, tasks)
    finally:
        stream.close()
        players.close()
    if played is None:
        raise RuntimeError(f"fewer than rollout.min_replicas = {config.rollout.min_replicas} replicas are left")
    return played  # type: ignore[return-value] # they had tasks


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _no_group(ordinal: int) -> Group:
    raise AssertionError(f"group {ordinal}: nothing is trained here")


async def _no_scores(group: Group, _: Sequence[int]) -> list[Scored]:
    raise AssertionError(f"group {group.key}: the stream scores what is trained")
