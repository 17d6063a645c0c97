"""Programs that speak to a model through the proxy, and what of it is trained then.

Clients are imported where they are made: it takes two seconds, in each worker that collects a test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from megasync.episodes.chat import Model
from megasync.episodes.proxy import Access, Proxy
from tests.support.samplers import Lines, model_of

if TYPE_CHECKING:
    import anthropic
    import openai

QUESTION: Any = [{"role": "user", "content": "1 + 1?"}]


def through_proxy(sampler: Lines, talk: Callable[[Access], Awaitable[None]]) -> Model:
    """The model after the program `talk` has spoken with it."""

    async def run() -> Model:
        model, proxy = model_of(sampler), await Proxy.start()
        try:
            with proxy.episode(model) as access:
                await talk(access)
        finally:
            await proxy.close()
        return model

    return asyncio.run(run())


def of_openai(access: Access, **options: Any) -> openai.AsyncOpenAI:
    import openai

    return openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.key, **options)


def of_anthropic(access: Access, **options: Any) -> anthropic.AsyncAnthropic:
    import anthropic

    return anthropic.AsyncAnthropic(base_url=access.anthropic_url, api_key=access.key, **options)


def texts_of(model: Model) -> list[str]:
    """What of each branch is trained."""
    tokens = model.renderer.tokens
    return [tokens.decode(branch.token_ids[branch.is_sampled]) for branch in model.recorder.branches()]
