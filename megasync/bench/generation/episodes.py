"""`python -m megasync.bench episodes`: how busy episodes that wait on tools leave a replica.

bench.num_prompts episodes begin at once, in the run's own processes, through its own stream, on a vLLM replica; each has
bench.turns turns of exactly rollout.max_new_tokens tokens, with a tool between them that takes some time. Then the same episodes
with tools that take none: the same turns and as many tokens. Two figures of both are compared: tokens a second until the first
episode has ended, while all are under way, as in a run whose next batches follow; and the seconds until the last one has. That is
done for each number of bench.slots, turns that the replica is given at a time. Leaves out what an episode does (tools.py) and
tables (report.py).

    python -m megasync.bench episodes --config configs/bench_episodes.yaml [key=value ...] [--json FILE]
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from bridge.messages import FOLDER_VERSION
from bridge.replicas.pool import ReplicaPool
from megasync.bench.common.one_replica import ReplicaProgram
from megasync.bench.common.program import Measured
from megasync.bench.config import BenchRoot
from megasync.data.data import Example
from megasync.data.prompts import Prompts
from megasync.episodes.pool import EpisodePool
from megasync.episodes.record import History
from megasync.episodes.running import AskFunction
from megasync.episodes.segments import Turn
from megasync.episodes.task import Played, Task
from megasync.episodes.wire import Ask
from megasync.rollouts.dispatch import COLLECT_SECONDS
from megasync.rollouts.group import StreamSettings
from megasync.rollouts.requests import make_request, task_of, training_sampling
from megasync.rollouts.stream import RolloutStream
from megasync.rollouts.turns import episode_metrics, episode_settings


class Watched(EpisodePool):
    """The processes of episodes, with the times at which turns and episodes end."""

    def begin(self) -> float:
        """Forget those until now."""
        self.turns, self.ends = list[tuple[float, int]](), list[float]()
        return time.perf_counter()

    async def run(self, task: Task, ask: AskFunction, history: History | None = None) -> Any:
        async def timed(asked: Ask) -> Turn:
            turn = await ask(asked)
            self.turns.append((time.perf_counter(), len(turn.token_ids)))
            return turn

        ended = await super().run(task, timed, history)
        self.ends.append(time.perf_counter())
        return ended

    def pace(self, begin: float) -> dict[str, float]:
        """Tokens of turns that ended before the first episode did, and how long that was."""
        end = min(self.ends)
        return {"pace_seconds": end - begin, "pace_tokens": sum(tokens for at, tokens in self.turns if at <= end)}


class EpisodesBench(ReplicaProgram):
    """A replica and the processes of episodes."""

    def start(self) -> None:
        self.prompts, self.num_asked = Prompts(self.config.model.path, self.config.data), 0
        self.say("starting vLLM")
        self.pool = self.start_replica(ReplicaPool, self.on_first_devices())

    def run(self) -> Measured:
        """Rows of figures, kept one by one."""
        bench, rows = self.config.bench, list[Measured]()
        for number, slots in product(range(bench.rounds), bench.slots):
            for waits in (True, False)[:: -1 if number % 2 else 1]:
                found = self.row(slots, waits=waits)
                rows.append({"round": number, "slots": slots, "waits": waits, **found})
                self.keep({"rounds": rows}, is_complete=False)
                tools = "with tools" if waits else "without"
                self.say(f"round {number + 1} of {bench.rounds}  {slots} slots  {tools:<12}{found['seconds']:.1f} s")
        return {"rounds": rows}

    def row(self, slots: int, *, waits: bool) -> dict[str, float]:
        """Figures of all episodes; one turn of each, before them, starts the processes and warms the replica up."""
        config, episodes = self.config, Watched(self.config)
        episodes.begin()
        own = StreamSettings(1, 1, 0, slots, float(config.rollout.max_new_tokens), config.rollout.answer_timeout_seconds)
        stream = RolloutStream(self.pool, own, _nothing, _nothing, print, episodes=(episodes, episode_settings(config)))
        try:
            stream.serve(FOLDER_VERSION)
            self._play(stream, 1, waits=False)
            begin = episodes.begin()
            played = self._play(stream, config.bench.turns, waits=waits)
            seconds = time.perf_counter() - begin
        finally:
            stream.close()
            episodes.close()
        # these end after the stream's last calls, which would take the samples of the next row
        self.pool.gather([self.pool.collect(replica, COLLECT_SECONDS) for replica in self.pool.members])
        return {"seconds": seconds, **episodes.pace(begin), **figures(played, seconds, config)}

    def _play(self, stream: RolloutStream, turns: int, *, waits: bool) -> list[Played]:
        """Each with a prompt that the replica has not seen yet, which nothing but the number of tokens ends."""
        least, most = self.config.bench.least_tool_seconds, self.config.bench.most_tool_seconds
        extra = {"turns": turns, "least": least, "most": most, "waits": waits}
        numbers = range(1, self.config.bench.num_prompts + 1)
        self.num_asked += 1
        examples = [Example(f"What is known of case {self.num_asked}.{line}?", "", line, extra=extra) for line in numbers]
        sampling = replace(training_sampling(self.config.rollout), num_samples=1)
        requests = [replace(make_request(self.prompts, one, sampling, one.line), stop_token_ids=()) for one in examples]
        groups = stream.generate(requests, [task_of(self.prompts, *pair) for pair in zip(examples, requests, strict=True)])
        assert groups is not None, "the replica died"
        return [one for group in groups for one in group if isinstance(one, Played)]


def _nothing(*given: object) -> Any:
    """The stream has no groups but those that are asked for, which bring their rewards."""
    raise AssertionError(given)


def figures(played: Sequence[Played], seconds: float, config: BenchRoot) -> dict[str, float]:
    """`render_share`: of the episodes' time; `process_share`: of that of the processes that they are in.

    Raises:
        RuntimeError: an episode failed, or was cut off.
    """
    tokens = config.bench.turns * config.rollout.max_new_tokens
    if wrong := [one for one in played if one.num_failures or one.num_sampled != tokens]:
        told = f"{wrong[0].num_sampled} tokens in {wrong[0].num_turns} turns, {wrong[0].num_failures} failures"
        raise RuntimeError(f"{len(wrong)} of {len(played)} episodes did not go as they should, the first with {told}")
    metrics = episode_metrics(played)
    render_seconds = metrics["episode/render_seconds"] * len(played)
    return {
        "tokens": sum(one.num_sampled for one in played),
        "given_tokens": sum(one.num_given for one in played),
        "prefix_hits": metrics["episode/prefix_hits"],
        "tool_share": metrics["episode/tool_share"],
        "render_seconds": render_seconds,
        "render_share": render_seconds / sum(one.seconds for one in played),
        "process_share": render_seconds / (seconds * config.rollout.episode_processes),
    }
