"""ServedPool: a pool of replicas of one folder that never syncs, as a ServedModel.

Requests go to the replica with the fewest tokens on their way. A replica that dies, or whose vLLM gives no sign of life, is
restarted with the folder's weights; its requests go to the others, or wait for it. Belongs to one event loop. Leaves out how
replicas start (run/replica_start.py).

    served = ServedPool(pool, "teacher.path", note)
    (scores,) = await served.prompt_log_probs([[1, 2, 3]], top_k=64)
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.detokenizer import Detokenizer, without_end
from bridge.generation import GenerationRequest, Sampling, TokenScores
from megasync.config.errors import refuse_if
from megasync.data.template import ChatTemplate
from megasync.data.tokenizer import load_tokenizer, stop_token_ids
from megasync.models.folder import num_embeddings
from megasync.served.protocol import CALLS, FAILURES, RETRIES, LostError, RefusedError

if TYPE_CHECKING:
    from bridge.replicas.pool import ReplicaPool

CHUNK_BYTES = 2**23  # of one answer, which goes through Ray's object store
TOKEN_BYTES = 8  # of one id with its log-prob
SIGN_SECONDS = 5.0  # from one look at a busy replica to the next
START_SECONDS = 0.5  # from one look for a replica that starts to the next
MAX_LOSSES = 5  # of replicas with the same request in them
# Where a template begins the thinking itself, as by <think>, <reasoning>, <|begin_of_thought|>.
OPENED = re.compile(r"(?:<[^<>/\s]*(?:think|thought|reasoning)[^<>/\s]*>|\[THINK\]|◁think▷)\s*\Z", re.IGNORECASE)


def chat_form(folder: Path) -> tuple[Any, ChatTemplate, tuple[int, ...]]:
    """Tokenizer, chat template and stop tokens of a folder whose model answers chats.

    Raises:
        ConfigError: the folder has no readable tokenizer, or no chat template.
    """
    tokenizer, _ = load_tokenizer(folder)
    message = f"model.path = {folder}: its tokenizer has no chat template, with which it could be asked"
    refuse_if(not tokenizer.chat_template, message, remedy="name a model with one, or put chat_template.jinja into the folder")
    template, size = ChatTemplate(tokenizer, {}), num_embeddings(folder) or len(tokenizer)
    stops, _ = stop_token_ids(folder, tokenizer.eos_token_id, size)
    end = tokenizer.convert_tokens_to_ids(template.turn.end) if template.turn.end else None
    return tokenizer, template, stops if end is None or end >= size else (*stops, end)


class ServedPool:
    """A ServedModel. `key`: of the config, for errors; `note`: logs a line for the user."""

    def __init__(self, pool: ReplicaPool, key: str, note: Callable[[str], None]) -> None:
        self.pool, self.note, self.counts = pool, note, Counter[str]()
        self._name = f"{key} = {pool.config.model_path}"
        self._load = Counter[int]()  # tokens on their way, by replica
        self._lives = Counter[int]()  # how often each replica was lost

    async def prompt_log_probs(self, sequences: Sequence[Sequence[int]], top_k: int) -> list[TokenScores]:
        """See ServedModel. `top_k` of at most the engines' max_logprobs."""
        given = [tuple(map(int, ids)) for ids in sequences]
        parts = chunks([len(ids) for ids in given], CHUNK_BYTES // (TOKEN_BYTES * (top_k + 1)))
        found = await asyncio.gather(*(self._score([given[place] for place in part], top_k) for part in parts))
        scores = {
            place: one for part, of_part in zip(parts, found, strict=True) for place, one in zip(part, of_part, strict=True)
        }
        nothing = TokenScores(np.empty(0, np.float32), np.empty((0, top_k), np.int32), np.empty((0, top_k), np.float32))
        return [scores.get(place, nothing) for place in range(len(given))]

    async def _score(self, sequences: list[tuple[int, ...]], top_k: int) -> list[TokenScores]:
        answer: list[TokenScores] = await self._ask("score", sum(map(len, sequences)), sequences, top_k)
        return [scores.behind(1) for scores in answer]  # copies: Ray returns views of its object store

    async def chat(self, messages: Sequence[Mapping[str, Any]], sampling: Sampling, seed: int = 0) -> str:
        """See ServedModel."""
        tokenizer, template, stops = self._text
        try:
            text = template.render(messages, generate=True)
        except Exception as error:  # of the template's code
            raise RefusedError(f"{self._name}: its chat template refuses the messages: {error}") from error
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        own = {name: getattr(sampling, name) for name in Sampling.__dataclass_fields__}
        request = replace(GenerationRequest(prompt_ids=ids, seed=seed, stop_token_ids=stops, **own), num_samples=1)
        ((done,),) = await self._ask("generate", len(ids) + sampling.max_new_tokens, [request])
        said = self._detokenizer.text(without_end(done.token_ids.tolist(), stops))
        opened = OPENED.search(text)  # without its tag thinking that is cut off would be an answer
        return opened[0] + said if opened else said.lstrip(" ")

    @cached_property
    def _text(self) -> tuple[Any, ChatTemplate, tuple[int, ...]]:
        return chat_form(Path(self.pool.config.model_path))

    @cached_property
    def _detokenizer(self) -> Detokenizer:
        return Detokenizer(self._text[0])

    async def close(self) -> None:
        """See ServedModel. The owner of the replicas ends them."""

    # ------------------------------------------------------------------------------------------------ requests

    async def _ask(self, method: str, size: int, *given: Any) -> Any:
        """Ask a replica; if it is lost, ask another one, or the same after its restart. `size`: in tokens."""
        self.counts[CALLS] += 1
        for attempt in range(MAX_LOSSES):
            self.counts[RETRIES] += attempt > 0
            replica = await self._member()
            life = self._lives[replica]
            self._load[replica] += size
            try:
                return await self._answer(replica, self.pool.ask(replica, method, *given))
            except (ValueError, TypeError) as error:  # of the request itself
                self.counts[FAILURES] += 1
                raise RefusedError(f"{self._name}: {getattr(error, 'cause', None) or error}") from error
            except Exception as error:  # noqa: BLE001 # whatever ended it
                problem = str(getattr(error, "cause", None) or error) or type(error).__name__
                self._lose(replica, life, problem)
            finally:
                self._load[replica] -= size
        self.counts[FAILURES] += 1
        raise LostError(f"{self._name}: {MAX_LOSSES} replicas were lost with the same request in them; the last: {problem}")

    async def _answer(self, replica: int, ref: Any) -> Any:
        """Raises TimeoutError where its vLLM gives no sign of life."""
        limit, answer = self.pool.config.answer_timeout_seconds, asyncio.wrap_future(ref.future())
        try:
            while not (await asyncio.wait([answer], timeout=SIGN_SECONDS))[0]:
                silence = asyncio.wrap_future(self.pool.ask_silence(replica).future())
                await asyncio.wait([answer, silence], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                is_silent = not answer.done() and (not silence.done() or silence.result() > limit)
                silence.cancel()
                if is_silent:
                    raise TimeoutError(f"its vLLM gave no answer for {limit:g} s")
            return answer.result()
        finally:
            answer.cancel()

    def _lose(self, replica: int, life: int, problem: str) -> None:
        """Once for all requests that it had."""
        if self._lives[replica] == life:
            self._lives[replica] += 1
            self.note(f"{self._name}: replica {replica} is lost and is restarted: {problem.splitlines()[0]}")
            self.pool.replace(replica)

    async def _member(self) -> int:
        """The replica with the least to do; waits for one where all start again."""
        while True:
            present = self.pool.hosts().keys()
            if len(present) < len(self.pool.wanted):
                try:
                    self.pool.rejoin(at_least=0, seconds=0.0)
                except RuntimeError as error:  # Ray is lost
                    raise LostError(f"{self._name}: {error}") from error
                present = self.pool.hosts().keys()
                for line in self.pool.drain_notes():
                    self.note(f"{self._name}: {line}")
            if present:
                return min(present, key=lambda replica: (self._load[replica], replica))
            if len(given_up := self.pool.given_up) == len(self.pool.wanted):
                raise LostError(f"{self._name}: no replica runs, and none starts: {'; '.join(given_up.values())}")
            await asyncio.sleep(START_SECONDS)


def chunks(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Places of sequences that are asked for together, in order: of at most `most` tokens, or a longer one alone. Those without a
    second token are left out. Pure.
    """
    found: list[list[int]] = []
    size = 0
    for place, length in enumerate(lengths):
        if length < 2:
            continue
        if not found or size + length > most:
            found.append([])
            size = 0
        found[-1].append(place)
        size += length
    return found
