"""Episodes in workers: the trainer samples their turns, and keeps their history for a restart or a checkpoint.

The limit on an episode's time does not count the model's. An episode whose worker ends through another one starts again: sampled
turns answer again, as long as it asks the same. Leaves out processes, time limits and blame (workers/), what a failure means for
the run, and how a turn is sampled (rollouts/).

    end, turns = await pool.run(task, ask)        # ask: the tokens of a turn
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from megasync.config.schema import Config
from megasync.episodes.exchange import Answered, Ask, EpisodeEnd, Play, RestartEpisode, Sampled, Settings, ToolTime
from megasync.episodes.record import History
from megasync.episodes.segments import Turn
from megasync.episodes.task import EpisodeLimitError, Task
from megasync.workers.job import Job, Outcome
from megasync.workers.pool import WorkerPool
from megasync.workers.protocol import Start
from megasync.workers.settings import PoolSettings

LIMIT_KEY = "rollout.episode_timeout_seconds"

AskFunction = Callable[[Ask], Awaitable[Turn]]


class EpisodeJob(Job):
    """One episode. It resumes from `history`, which grows with it."""

    def __init__(self, task: Task, ask: AskFunction, history: History) -> None:
        super().__init__(is_deadly=history.is_deadly)
        self.task, self.ask, self.history = task, ask, history
        self.turns: dict[int, tuple[Any, Turn]] = {}  # prompt and sampled tokens, by number
        self.former = dict(history.turns)  # of a worker that ended, or of a checkpoint
        self.of_checkpoint = frozenset(history.turns)
        self.tool_seconds: float | None = None

    def payload(self) -> Play:
        return Play(self.task, dict(self.history.answers), self.history.state)

    async def on_request(self, number: int, message: Any) -> Sampled:
        """A turn: the former one of that number if it has the same prompt, else a new one."""
        former, history = self.former.pop(message.turn, None), self.history
        try:
            if former is not None and np.array_equal(former[0], message.prompt_ids):
                turn = former[1]
                history.resumed |= self.of_checkpoint & {message.turn}
            else:
                if former is not None:
                    self.former, history.is_restart = {}, history.is_restart or message.turn in self.of_checkpoint
                turn = await self.ask(message)
        except EpisodeLimitError as error:
            return Sampled(limit=str(error))
        except ValueError as error:
            return Sampled(problem=str(error))
        self.turns[message.turn] = history.turns[message.turn] = message.prompt_ids, turn
        return Sampled(turn.token_ids, turn.log_probs, turn.weight_versions, turn.finish_reason)

    def on_post(self, message: Any) -> None:
        if isinstance(message, Answered):
            self.history.keep_answer(message.place, message.answer, message.state, is_other=message.is_other)
        elif isinstance(message, RestartEpisode):
            self.former, self.turns = {}, {}
            self.history.forget()
        elif isinstance(message, ToolTime):
            self.tool_seconds = message.seconds

    def on_restart(self) -> None:
        self.former, self.turns, self.tool_seconds = {**self.former, **self.turns}, {}, None

    def finish(self, outcome: Outcome) -> None:
        self.history.is_deadly = self.is_deadly
        end, own = outcome.value or EpisodeEnd(failure=outcome.failure), self.spent_seconds
        tools = own if self.tool_seconds is None else min(self.tool_seconds, own)  # two processes' clocks under load
        end = end._replace(own_seconds=own, tool_seconds=tools)
        self.result.set_result((end, [self.turns[number] for number in end.kept]))


class EpisodePool:
    """At most `rollout.episode_processes` workers, or that many on each node."""

    def __init__(self, config: Config) -> None:
        own = config.rollout
        assert own.episode is not None
        limits = own.episode_memory_bytes, own.episode_open_files, own.episode_concurrency
        settings = Settings(own.episode, config.model.path, config.data, *limits, config.algorithm.credit == "turn")
        self.workers = WorkerPool(
            PoolSettings(
                name="rollout.episode: a process for episodes",
                start=Start("megasync.episodes.program:Player", (settings,), is_serial=False, ends_children=True),
                limit_key=LIMIT_KEY,
                limit_seconds=own.episode_timeout_seconds,
                max_workers=own.episode_processes,
                concurrency=own.episode_concurrency,
                is_on_cluster=own.episode_placement == "cluster",
                answer_timeout_seconds=own.answer_timeout_seconds,
            )
        )

    async def run(
        self, task: Task, ask: AskFunction, history: History | None = None
    ) -> tuple[EpisodeEnd, list[tuple[Any, Turn]]]:
        """How the episode ended, and the turns that are trained, each with its prompt, in their order.

        Raises:
            WorkersError: no worker can be started, or `close` was called.
        """
        result: asyncio.Future[tuple[EpisodeEnd, list[tuple[Any, Turn]]]]
        result = self.workers.submit(EpisodeJob(task, ask, history or History()))
        return await result

    def close(self) -> None:
        """End all workers. From any thread, more than once."""
        self.workers.close()
