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
from megasync.served.endpoint import Endpoint, EndpointSettings, urls_of
from megasync.served.protocol import ServedError

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
    for url in urls_of(teacher.endpoint):
        try:
            found = asyncio.run(_ask(url, texts, own[0], top_k))
        except ServedError as error:
            remedy = "start `vllm serve FOLDER --max-logprobs K`, K at least teacher.top_k, and write http://HOST:PORT/v1"
            raise ConfigError(str(error), remedy=remedy) from error
        if difference := _difference(texts, own, found):
            remedy = "serve a teacher with the policy's tokenizer: log-probs are compared token by token"
            raise ConfigError(f"{KEY} = {url}: its tokenizer is another one than that of model.path: {difference}", remedy=remedy)


def _difference(texts: Sequence[str], own: Sequence[list[int]], found: Sequence[list[int]]) -> str:
    """Describe the first text that has other tokens; empty where none has."""
    for text, ids, theirs in zip(texts, own, found, strict=True):
        if ids != theirs:
            return f"{text[:40]!r} is {theirs[:8]} there and {ids[:8]} here"
    return ""


async def _ask(url: str, texts: Sequence[str], ids: list[int], top_k: int) -> list[list[int]]:
    """The server's ids of each text; it is asked for log-probs, too."""
    endpoint = Endpoint(EndpointSettings(KEY, (url,), patience_seconds=PATIENCE_SECONDS))
    try:
        await endpoint.prompt_log_probs([ids[:16]], top_k)
        return await endpoint.tokens(texts)
    finally:
        await endpoint.close()
