"""Judges of a run: samples become prompts, replies become scores, and each prompt is asked once. No torch in here.

    judges = Judges(config.judges, pools, config.run.folder)          # nothing is opened before the first sample
    await judges.score("quality", RewardInput(...))                   # JudgeError where there is no score
    judges.metrics()                                                  # counts since the call before
    await judges.close()

All of it happens on one event loop. Leaves out the model, its time limits and the repetition of calls that failed (served/).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bridge.generation import Sampling
from megasync.config.judge_section import JudgeConfig
from megasync.rewards.functions import RewardInput
from megasync.rewards.judges.cache import ReplyCache, content_key
from megasync.rewards.judges.prompt import Messages, PromptError, messages
from megasync.rewards.judges.reply import UnparsedError, read_score
from megasync.served.endpoint import Endpoint, EndpointSettings
from megasync.served.protocol import RETRIES, ServedError, ServedModel
from megasync.workers.failure import Failure

COUNTS = ("calls", "cached", "unparsed", "retries", "failures")
FOLDER = "judges"  # of the run's folder
NO_JUDGES: Mapping[str, Any] = MappingProxyType({})


def endpoint_settings(name: str, judge: JudgeConfig) -> EndpointSettings:
    """Settings of a judge that is served elsewhere."""
    seconds, patience = judge.timeout_seconds, judge.timeout_seconds * (1 + judge.retries)
    return EndpointSettings(f"judges.{name}.endpoint", judge.endpoint, judge.model, judge.concurrency, seconds, patience)


def sampling_of(judge: JudgeConfig) -> Sampling:
    return Sampling(max_new_tokens=judge.max_new_tokens, temperature=judge.temperature)


class JudgeError(Exception):
    """A judge has no score for a sample. `stops`: whether that ends the run; None: `rollout.reward_on_failure` says so."""

    def __init__(self, failure: Failure, remedy: str, stops: bool | None = None) -> None:
        super().__init__(failure.what)
        self.failure, self.remedy, self.stops = failure, remedy, stops


class Judge:
    """One judge."""

    def __init__(self, name: str, config: JudgeConfig, model: ServedModel, cache: ReplyCache | None) -> None:
        self.name, self.config, self.model, self.cache = name, config, model, cache
        self.counts = Counter[str]()
        self._slots = asyncio.Semaphore(config.concurrency)
        self._asked: dict[str, asyncio.Task[str]] = {}  # replies that are on their way, by content

    async def score(self, sample: RewardInput) -> float:
        """The reward of one sample. Raises JudgeError."""
        try:
            asked = messages(self.config, sample)
        except PromptError as error:
            raise self._failed(f"has no prompt: {error}", f"correct judges.{self.name}.prompt") from error
        attempts = 1 + self.config.retries if self.config.on_unparsed == "retry" else 1
        for attempt in range(attempts):
            self.counts["retries"] += attempt > 0
            reply = await self._reply(asked, attempt)
            try:
                return read_score(reply, self.config)
            except UnparsedError as error:
                self.counts["unparsed"] += 1
                problem = error
        stops = {"stop": True, "zero": False}.get(self.config.on_unparsed)
        remedy = f"ask for the score's form in judges.{self.name}.prompt, or write judges.{self.name}.on_unparsed=zero"
        raise self._failed(f"gave a reply without a score: {problem}", remedy, f"its reply: {reply}", stops)

    def _failed(self, what: str, remedy: str, details: str = "", stops: bool | None = None) -> JudgeError:
        self.counts["failures"] += 1
        return JudgeError(Failure(what, details), remedy, stops)

    async def _reply(self, asked: Messages, attempt: int) -> str:
        """From the cache, from an equal call that is on its way, or from the model."""
        key = content_key(self.config.asked, asked, attempt)
        if self.cache is not None and (kept := self.cache.get(key)) is not None:
            self.counts["cached"] += 1
            return kept
        if key in self._asked:
            self.counts["cached"] += 1
        else:
            self._asked[key] = asyncio.create_task(self._ask(key, asked, attempt))
            self._asked[key].add_done_callback(lambda _: self._asked.pop(key))
        try:
            return await asyncio.shield(self._asked[key])
        except ServedError as error:
            raise self._failed(f"gave no reply: {error}", f"mend the server of judges.{self.name}") from error

    async def _ask(self, key: str, asked: Messages, attempt: int) -> str:
        async with self._slots:
            self.counts["calls"] += 1
            reply = await self.model.chat(asked, sampling_of(self.config), attempt)
        if self.cache is not None:
            self.cache.put(key, reply)
        return reply

    async def close(self) -> None:
        for task in (tasks := list(self._asked.values())):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await self.model.close()
        finally:
            if self.cache is not None:
                self.cache.close()


class Judges:
    """All judges of a run; each is opened with its first sample."""

    def __init__(
        self,
        configs: Mapping[str, JudgeConfig] = NO_JUDGES,
        pools: Mapping[str, ServedModel] = NO_JUDGES,
        run_folder: Path | None = None,
    ) -> None:
        """`pools`: replicas of judges with a path, by name. `run_folder`: where replies are kept; None: in memory."""
        self.configs, self._pools, self._run_folder = configs, pools, run_folder
        self._judges: dict[str, Judge] = {}

    async def score(self, name: str, sample: RewardInput) -> float:
        """Raises JudgeError."""
        if name not in self._judges:
            own = self.configs[name]
            file = self._run_folder / FOLDER / f"{name}.jsonl" if self._run_folder is not None else None
            model = self._pools[name] if own.path else Endpoint(endpoint_settings(name, own))
            self._judges[name] = Judge(name, own, model, ReplyCache(file) if own.cache else None)
        return await self._judges[name].score(sample)

    def metrics(self) -> dict[str, float]:
        """Counts since the last call, of judges that have been asked."""
        found = dict[str, float]()
        for name, judge in self._judges.items():
            judge.counts["retries"] += judge.model.counts.pop(RETRIES, 0)
            found |= {f"reward/judge/{name}/{count}": float(judge.counts[count]) for count in COUNTS}
            judge.counts.clear()
        return found

    async def close(self) -> None:
        judges, self._judges = self._judges, {}
        async with AsyncExitStack() as ends:
            for judge in judges.values():
                ends.push_async_callback(judge.close)
