"""Whether the server of `teacher.endpoint` answers, has the policy's tokenizer, and gives as many log-probs as are wanted.

Texts are compared that have many kinds of characters, the policy's special tokens, and tokens of its whole vocabulary. Leaves out
folders of teachers (teacher.py). No torch in here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from megasync.config.errors import ConfigError
from megasync.config.schema import Config
from megasync.data.tokenizer import load_tokenizer
from megasync.models.folder import model_shape
from megasync.served.endpoint import Endpoint, EndpointSettings, urls_of
from megasync.served.protocol import RefusedError, ServedError

KEY = "teacher.endpoint"
PATIENCE_SECONDS = 20.0
PROBE = "Résumé: 12+345=357; if x_1 >= 0.5:\n\treturn ['ä', \"本\"]  # 🙂\r\n"
NUM_PIECES = 200  # of the vocabulary, at equal distances


def check_endpoint(config: Config) -> None:
    """ConfigError where it cannot be the policy's teacher."""
    teacher = config.teacher
    if not teacher.endpoint:
        return
    tokenizer, _ = load_tokenizer(Path(config.model.path))
    size = len(tokenizer)
    pieces = [tokenizer.decode([index]) for index in range(0, size, max(1, size // NUM_PIECES))]
    texts = [PROBE, "".join(tokenizer.all_special_tokens), " ".join(pieces)]
    own = [list(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    top_k = teacher.top_k if teacher.objective == "top_k" else 0
    longest, vocab_size = _most_tokens(config), model_shape(config.model.path).vocab_size
    for url in urls_of(teacher.endpoint):
        try:
            found, context, problem = asyncio.run(_ask(url, texts, [*own[0][:16], vocab_size - 1], top_k))
        except ServedError as error:
            remedy = "start `vllm serve FOLDER --max-logprobs K`, K at least teacher.top_k, and write http://HOST:PORT/v1"
            raise ConfigError(str(error), remedy=remedy) from error
        if difference := _difference(texts, own, found):
            remedy = "serve a teacher with the policy's tokenizer: log-probs are compared token by token"
            raise ConfigError(f"{KEY} = {url}: its tokenizer is another one than that of model.path: {difference}", remedy=remedy)
        if problem:
            remedy = f"serve a teacher whose config.json has vocab_size = {vocab_size} or more, padding included"
            raise ConfigError(f"{KEY} = {url}: cannot score the policy's token {vocab_size - 1}: {problem}", remedy=remedy)
        if context and longest >= context:  # vLLM wants room for one token more
            problem = f"its max_model_len is {context}, and a sample may have {longest} tokens"
            shorter = f"write rollout.max_model_len={context - 1}, or " if context - 1 > config.rollout.max_new_tokens else ""
            remedy = f"{shorter}serve a teacher with --max-model-len {longest + 1}"
            raise ConfigError(f"{KEY} = {url}: {problem}", remedy=remedy)


def _most_tokens(config: Config) -> int:
    """The most tokens that a sample may have. Prompts are not known here: unless `max_model_len` is given, they count as one."""
    rollout, positions = config.rollout, model_shape(config.model.path).max_position_embeddings
    is_open = not rollout.episode and rollout.max_model_len is None
    limits = (config.engine.tokens_per_microbatch, rollout.max_model_len, positions, is_open and rollout.max_new_tokens + 1)
    return min(filter(None, limits))


def _difference(texts: Sequence[str], own: Sequence[list[int]], found: Sequence[list[int]]) -> str:
    """Describe the first text that has other tokens; empty where none has."""
    for text, ids, theirs in zip(texts, own, found, strict=True):
        if ids != theirs:
            return f"{text[:40]!r} is {theirs[:8]} there and {ids[:8]} here"
    return ""


async def _ask(url: str, texts: Sequence[str], ids: list[int], top_k: int) -> tuple[list[list[int]], int, str]:
    """The server's ids of each text, its max_model_len or 0, and why it refuses to score the last of `ids`, or nothing.

    Raises:
        ServedError: the server does not answer, or cannot score the other `ids`.
    """
    endpoint = Endpoint(EndpointSettings(KEY, (url,), patience_seconds=PATIENCE_SECONDS))
    try:
        await endpoint.prompt_log_probs([ids[:-1]], top_k)
        problem = ""
        try:
            await endpoint.prompt_log_probs([ids[-2:]], top_k)
        except RefusedError as error:
            problem = str(error)
        return await endpoint.tokens(texts), await endpoint.context_tokens(), problem
    finally:
        await endpoint.close()
