"""Payloads between the trainer and an episode in a worker (workers/protocol.py). Turns are numbered from 0 in each episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megasync.episodes.record import EnvironmentAnswer
from megasync.episodes.task import Task
from megasync.workers.failure import Failure


class Settings(NamedTuple):
    """Arguments of a worker."""

    episode: str
    model_path: str
    data: Any  # DataConfig
    memory_bytes: int | None
    open_files: int
    concurrency: int
    credits_turns: bool = False  # algorithm.credit=turn


class Play(NamedTuple):
    """An episode to play. `answers` and `state`: of one that resumes, whose turns answer again (record.py)."""

    task: Task
    answers: Mapping[int, EnvironmentAnswer] = {}
    state: Any = None


class Ask(NamedTuple):
    """The request for the tokens of a turn."""

    number: int  # of the episode
    turn: int
    prompt_ids: Any  # int32 [n]
    max_new_tokens: int | None
    stop: tuple[str, ...]


class Sampled(NamedTuple):
    """The reply: a turn's tokens, or the limit that the turn would exceed, or the problem with its prompt."""

    token_ids: Any = ()
    log_probs: Any = ()
    weight_versions: Any = ()
    finish_reason: str = "stop"
    limit: str = ""
    problem: str = ""


class Answered(NamedTuple):
    """Post: an answer of the environment, or of a tool, in that place (History.keep_answer)."""

    place: int
    answer: EnvironmentAnswer
    state: Any = None
    is_other: bool = False


class RestartEpisode(NamedTuple):
    """Post: the episode could not resume, and starts from its begin: its turns and answers until now are to be forgotten."""


class ToolTime(NamedTuple):
    """Post: the seconds that its tools took."""

    seconds: float


class EpisodeEnd(NamedTuple):
    """How an episode ended. `kept`: the turns that are trained, in their order; `limit`: the one that ended it uncaught;
    `is_cut_off`: it caught one, and returned so.
    """

    kept: tuple[int, ...] = ()
    reward: float | None = None
    metrics: Mapping[str, float] = {}
    info: Mapping[str, Any] = {}
    limit: str = ""
    failure: Failure | None = None
    own_seconds: float = 0.0  # without the model's time, by the trainer's measure
    is_cut_off: bool = False
    tool_seconds: float = 0.0  # by the worker's measure, or own_seconds where the worker died
    turn_rewards: tuple[float, ...] = ()
