"""Endpoint: a model behind vLLM's OpenAI API, at one URL or at several that serve the same model.

A request that finds no server, times out, or meets an error of the server's own is sent again, to the URL with the least to do
that is not failing, with growing pauses, for `patience_seconds`. OPENAI_API_KEY is sent where it is set. Log-probs of prompts are
at temperature 1, and -9999 stands for -inf (vLLM's clamp). Belongs to one event loop. Callers: teachers.py and judges.

    endpoint = Endpoint(EndpointSettings("teacher.endpoint", ("http://host:8000/v1",)))
    (scores,) = await endpoint.prompt_log_probs([[1, 2, 3]], top_k=64)
    await endpoint.close()
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.generation import Sampling, TokenScores
from megasync.served.protocol import CALLS, FAILURES, RETRIES, LostError, RefusedError

if TYPE_CHECKING:
    from aiohttp import ClientSession

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 15.0
TRY_AGAIN = {408, 425, 429}  # of HTTP, beside those from 500 on
SHOWN_CHARACTERS = 400  # of a server's own text


@dataclass(frozen=True)
class EndpointSettings:
    """`key`: of the config, for errors. `model`: its name at the server; empty: the first that the server lists."""

    key: str
    urls: tuple[str, ...]
    model: str = ""
    concurrency: int = 64  # requests on their way at a time
    timeout_seconds: float = 120.0  # of one try
    patience_seconds: float = 600.0  # of all tries of a request


def urls_of(text: str) -> tuple[str, ...]:
    """The URLs in a config's value: one, or several with commas or spaces between them; without slashes at the end."""
    return tuple(url.rstrip("/") for url in text.replace(",", " ").split())


@dataclass
class Server:
    """One URL."""

    url: str
    num_running: int = 0
    num_failed: int = 0  # tries since the last answer
    rests_until: float = 0.0  # on the monotonic clock

    def order(self) -> tuple[float, int]:
        """The lowest is asked first."""
        pause = self.rests_until - time.monotonic()
        return max(0.0, pause), self.num_running

    def rest(self) -> None:
        """After a try that failed; once where several that ran beside each other did."""
        if self.rests_until <= time.monotonic():
            pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**self.num_failed)
            self.num_failed += 1
            self.rests_until = time.monotonic() + pause


class Endpoint:
    """A ServedModel."""

    def __init__(self, settings: EndpointSettings) -> None:
        self.settings, self.counts = settings, Counter[str]()
        self._servers = [Server(url) for url in settings.urls]
        self._slots, self._naming = asyncio.Semaphore(settings.concurrency), asyncio.Lock()
        self._session: ClientSession | None = None
        self._model = settings.model

    async def prompt_log_probs(self, sequences: Sequence[Sequence[int]], top_k: int) -> list[TokenScores]:
        """See ServedModel. `top_k` of at most the server's --max-logprobs."""
        return list(await asyncio.gather(*(self._score(list(map(int, ids)), top_k) for ids in sequences)))

    async def _score(self, ids: list[int], top_k: int) -> TokenScores:
        if len(ids) < 2:  # nothing to score
            return scores_of([], [], top_k)
        body = {"prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top_k}
        answer = await self._ask("completions", await self._with_model(body))
        try:
            return scores_of(answer["choices"][0]["prompt_logprobs"][1:], ids[1:], top_k)
        except (LookupError, TypeError, ValueError) as error:
            problem = f"it gives no log-probs of a prompt's tokens ({type(error).__name__}: {error}), as vLLM's server does"
            raise RefusedError(f"{self._name}: {problem}") from error

    async def chat(self, messages: Sequence[Mapping[str, Any]], sampling: Sampling, seed: int = 0) -> str:
        """See ServedModel."""
        body = {
            "messages": list(messages),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed,
            "stop": list(sampling.stop) or None,
            **({"top_k": sampling.top_k} if sampling.top_k else {}),
            **({"min_p": sampling.min_p} if sampling.min_p else {}),
        }
        answer = await self._ask("chat/completions", await self._with_model(body))
        try:
            return str(answer["choices"][0]["message"]["content"] or "")
        except (LookupError, TypeError) as error:
            raise RefusedError(f"{self._name}: its answer has no message: {str(answer)[:SHOWN_CHARACTERS]}") from error

    async def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text by the server's tokenizer, without special tokens around it (vLLM's own route, /tokenize)."""
        bodies = [await self._with_model({"prompt": text, "add_special_tokens": False}) for text in texts]
        answers = await asyncio.gather(*(self._ask("/tokenize", body) for body in bodies))
        return [list(map(int, answer["tokens"])) for answer in answers]

    async def context_tokens(self) -> int:
        """The server's max_model_len; 0 where it does not say."""
        answer = await self._ask("/tokenize", await self._with_model({"prompt": "1"}))
        return int(answer.get("max_model_len") or 0)

    async def close(self) -> None:
        """See ServedModel."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # ------------------------------------------------------------------------------------------------ requests

    @property
    def _name(self) -> str:
        return f"{self.settings.key} = {', '.join(self.settings.urls)}"

    async def _with_model(self, body: dict[str, Any]) -> dict[str, Any]:
        async with self._naming:
            if not self._model:
                listed = await self._ask("models", None)
                try:
                    self._model = str(listed["data"][0]["id"])
                except (LookupError, TypeError) as error:
                    raise RefusedError(f"{self._name}: it lists no model: {str(listed)[:SHOWN_CHARACTERS]}") from error
        return {"model": self._model, **body}

    async def _ask(self, route: str, body: dict[str, Any] | None) -> Any:
        """The answer's JSON to a POST of `body`, or a GET. `route`: below the URL, or with a slash below its host."""
        deadline, problem = time.monotonic() + self.settings.patience_seconds, ""
        self.counts[CALLS] += 1
        async with self._slots:
            while True:
                server = min(self._servers, key=Server.order)
                now = time.monotonic()
                pause = server.rests_until - now
                if problem and now + max(0.0, pause) > deadline:
                    self.counts[FAILURES] += 1
                    waited = f"no answer within {self.settings.patience_seconds:g} s"
                    raise LostError(f"{self._name}: {waited}; the last try: {problem}")
                if pause > 0:
                    await asyncio.sleep(pause)
                    continue  # another may have answered or failed meanwhile
                self.counts[RETRIES] += bool(problem)
                answer, problem = await self._try(server, route, body)
                if not problem:
                    return answer

    async def _try(self, server: Server, route: str, body: dict[str, Any] | None) -> tuple[Any, str]:
        """The answer, and why there is none; RefusedError where the next try would be refused, too."""
        import aiohttp

        url = f"{server.url.removesuffix('/v1')}{route}" if route.startswith("/") else f"{server.url}/{route}"
        server.num_running += 1
        try:
            method = "GET" if body is None else "POST"
            async with self._opened().request(method, url, json=body) as response:
                text = await response.text()
                if response.status >= 500 or response.status in TRY_AGAIN:
                    problem = f"{url}: HTTP status {response.status}: {text[:SHOWN_CHARACTERS]}"
                elif response.status >= 400:
                    self.counts[FAILURES] += 1
                    raise RefusedError(f"{self._name}: {route}: HTTP status {response.status}: {text[:SHOWN_CHARACTERS]}")
                else:
                    server.num_failed, server.rests_until = 0, 0.0
                    return await response.json(), ""
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise RefusedError(f"{self._name}: no URL such as http://host:8000/v1: {error}") from error
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            problem = f"{url}: {type(error).__name__}: {error}"
        finally:
            server.num_running -= 1
        server.rest()
        return None, problem

    def _opened(self) -> ClientSession:
        import aiohttp

        if self._session is None:
            key = os.environ.get("OPENAI_API_KEY", "")
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # `concurrency` is the limit
                timeout=aiohttp.ClientTimeout(total=self.settings.timeout_seconds),
                headers={"Authorization": f"Bearer {key}"} if key else {},
            )
        return self._session


def scores_of(places: Sequence[Mapping[str, Mapping[str, Any]]], ids: Sequence[int], top_k: int) -> TokenScores:
    """Scores from vLLM's `prompt_logprobs`: at each place the token itself and the `top_k` most likely ones, by id as a text.

    Raises:
        LookupError: a token or one of the `top_k` is missing.
    """
    own = [place[str(token)]["logprob"] for place, token in zip(places, ids, strict=True)]
    ranked = [{entry["rank"]: (int(token), entry["logprob"]) for token, entry in place.items()} for place in places]
    tops = [[place[rank] for rank in range(1, top_k + 1)] for place in ranked]
    pairs = np.array(tops, np.float64).reshape(len(ids), top_k, 2)
    return TokenScores(np.array(own, np.float32), pairs[..., 0].astype(np.int32), pairs[..., 1].astype(np.float32))
