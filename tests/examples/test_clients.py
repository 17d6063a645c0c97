"""Programs of others that play the calculator's chat: the clients as they are, the model's lines given."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megasync.config.data_section import DataConfig
from megasync.data.prompts import Prompts
from megasync.episodes.proxy import Access, Proxy
from megasync.episodes.render import renderer_of
from megasync.episodes.task import Task
from megasync.episodes.tokens import Tokens
from examples import chat_calculator, clients
from tests.support.samplers import Lines, model_of

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 57, "b": 68}}\n</tool_call>'
TASK = Task("57*68", (1,), "3876")


def play(episode: Any, *lines: str) -> tuple[float, list[list[int]]]:
    """Its reward, and the tokens of its branches."""

    async def run() -> float:
        model, proxy = model_of(Lines(*lines)), await Proxy.start()
        branches.append(model.recorder)

        @contextlib.asynccontextmanager
        async def serve() -> AsyncIterator[Access]:
            with proxy.episode(model) as access:
                yield access

        for client in (clients.openai_client, clients.anthropic_client):
            client.cache_clear()  # of an event loop that is no more
        try:
            return float(await episode(TASK, SimpleNamespace(serve=serve)))
        finally:
            await proxy.close()

    branches: list[Any] = []
    reward = asyncio.run(run())
    return reward, [branch.token_ids.tolist() for branch in branches[0].branches()]


@pytest.mark.parametrize("name", ["by_openai", "by_anthropic", "by_agents"])
def test_a_client_is_an_episode_of_one_branch(name: str) -> None:
    if name == "by_agents":
        pytest.importorskip("agents", reason="openai-agents is not installed: pip install openai-agents")
    episode = getattr(clients, name)
    (right, tokens), (wrong, _) = play(episode, CALL, "3876"), play(episode, CALL, "3875")
    assert (right, wrong, len(tokens)) == (1.0, 0.0, 1)
    assert play(episode, CALL, CALL)[0] == 0.0, "two turns and no answer"


def test_clients_of_both_protocols_give_the_same_tokens() -> None:
    assert play(clients.by_openai, CALL, "3876") == play(clients.by_anthropic, CALL, "3876")


def test_the_warm_up_is_what_the_chat_template_writes(tmp_path: Path) -> None:
    chat_calculator.build_tokenizer().save_pretrained(tmp_path)
    prompts = Prompts(str(tmp_path), DataConfig(chat_template=True))
    tokens = Tokens(prompts.tokenizer, prompts.stop_token_ids)
    renderer = renderer_of(tokens, "qwen3")
    tool: Any = {"type": "function", "function": {"name": chat_calculator.TOOL, "description": "", "parameters": {}}}
    first, second = chat_calculator.lines(0)["warm_up"][:2]
    question = first["question"].split(chat_calculator.USER)[1].split("<eos>")[0]
    prompt = renderer.prompt([{"role": "user", "content": question}], [tool], {})
    assert prompt.ids == tokens.encode(first["question"]) and len(prompt.ids) < 14
    said = [*tokens.encode(first["answer"]), *prompts.stop_token_ids]
    (call,) = renderer.read(prompt.ids, said, [tool]).calls
    assert call[0] == chat_calculator.TOOL and str(call[1]["a"] * call[1]["b"]) == second["answer"] and len(said) < 10
    assert second["question"].startswith(first["question"] + first["answer"])
