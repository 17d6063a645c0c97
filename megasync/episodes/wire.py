"""What travels between the trainer and the processes of episodes, packed as in megasync/rewards/wire.py.

An episode of a process is known by its number, a turn of it by the turn's number, both from 0 on. The trainer begins and cancels
episodes and answers turns; the process asks for turns, drops those that nobody waits for any more, and says how an episode ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megasync.episodes.record import EnvironmentAnswer
from megasync.episodes.task import Task
from megasync.rewards.wire import Failure


class Settings(NamedTuple):
    """The first message to a process."""

    model_path: str
    data: Any  # DataConfig
    memory_bytes: int | None
    open_files: int
    concurrency: int


class Begin(NamedTuple):
    """`answers` and `state`: of an episode that goes on, whose turns answer again (record.py)."""

    number: int
    task: Task
    answers: Mapping[int, EnvironmentAnswer] = {}
    state: Any = None


class Ask(NamedTuple):
    """For the tokens of a turn."""

    number: int
    turn: int
    prompt_ids: Any  # int32 [n]
    max_new_tokens: int | None
    stop: tuple[str, ...]


class Drop(NamedTuple):
    """A turn that was asked for and is not waited for any more."""

    number: int
    turn: int


class Told(NamedTuple):
    """A turn's tokens; or why there are none: the limit that it would be beyond, or what is wrong with its prompt."""

    number: int
    turn: int
    token_ids: Any = ()
    log_probs: Any = ()
    weight_versions: Any = ()
    finish_reason: str = "stop"
    limit: str = ""
    problem: str = ""


class Answered(NamedTuple):
    """By the environment, or a tool, in that place (History.keep_answer)."""

    number: int
    place: int
    answer: EnvironmentAnswer
    state: Any = None
    is_other: bool = False


class Held(NamedTuple):
    """A step of the episode held the others of its process up for so long."""

    number: int
    seconds: float


class Anew(NamedTuple):
    """It could not go on, and begins anew: what it had asked for is forgotten."""

    number: int


class Cancel(NamedTuple):
    number: int


class Ended(NamedTuple):
    """`kept`: the turns that are trained, in their order; `limit`: what ended it where the episode did not catch that;
    `is_cut_off`: it caught one, and says so.
    """

    number: int
    kept: tuple[int, ...] = ()
    reward: float | None = None
    metrics: Mapping[str, float] = {}
    info: Mapping[str, Any] = {}
    limit: str = ""
    failure: Failure | None = None
    own_seconds: float = 0.0  # that it did not wait for the model; the trainer's measure
    is_cut_off: bool = False
    tool_seconds: float | None = None  # the process's measure; None: it did not live to tell
