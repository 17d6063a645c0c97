"""`megasync serve` with its engine and a replica, over plain HTTP: each call, and a kill in the middle."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator

import aiohttp
import numpy as np
import psutil
import pytest
from tests.megasync.service.served import Client, Server, log_probs_of, top_of

pytestmark = [pytest.mark.long, pytest.mark.vllm_on_cpu]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("served"))
    server.start()
    yield server
    server.end(signal.SIGTERM)
    _, left = psutil.wait_procs(server.family, 120)  # Ray's agents outlive a kill by more than a minute
    assert not left


async def unbroken(client: Client) -> list[bytes]:
    await client.create()
    results = [await client.fetch(name) for seed in range(3) for name in await client.step(seed)]
    await client.fetch(await client.ask("save_weights", path="end"))
    return results


async def killed(client: Client) -> list[bytes]:
    """The same, with a kill while requests wait."""
    await client.create()
    names = [name for seed in range(2) for name in await client.step(seed)]
    first = await client.fetch(names[0])
    await asyncio.to_thread(client.server.end, signal.SIGKILL)
    await asyncio.to_thread(client.server.start)
    names += await client.step(2)
    results = [await client.fetch(name) for name in names]
    assert results[0] == first
    await client.fetch(await client.ask("save_weights", path="end"))
    return results


def test_sampled_log_probs_are_the_trainers(server: Server) -> None:
    asyncio.run(_sampled(server))


async def _sampled(server: Server) -> None:
    async with aiohttp.ClientSession() as http:
        client = Client(server, http)
        await client.create()
        for name in await client.step(0):
            await client.fetch(name)
        await client.fetch(await client.ask("save_weights", path="one"))
        sent = await client.ask("save_weights_for_sampler", sampling_session_seq_id=0)
        session = json.loads(await client.fetch(sent))["sampling_session_id"]
        prompt = [5, 6, 7, 8]
        answer = await client.sample(session, 1, prompt, topk_sample_logprobs=3)
        for seq, sequence in enumerate(answer.sequences, 2):
            tokens = [*prompt, *np.frombuffer(sequence.tokens, np.int32).tolist()]
            passed = await client.passes("cross_entropy", tokens, forward_only=True)
            own = log_probs_of(await client.fetch(passed))
            np.testing.assert_allclose(np.frombuffer(sequence.logprobs, np.float32), own[3:], atol=1e-4)
            np.testing.assert_allclose(np.frombuffer(answer.prompt_logprobs, np.float32)[1:], own[:3], atol=1e-4)
            scored = await client.sample(session, seq, tokens, topk_prompt_logprobs=3)
            sampled_top, scored_top = top_of(sequence.topk_sampled_logprobs), top_of(scored.topk_prompt_logprobs)
            np.testing.assert_array_equal(sampled_top[0], scored_top[0][len(prompt) :])
            np.testing.assert_allclose(sampled_top[1], scored_top[1][len(prompt) :], atol=1e-4)
        again = f"tinker://{client.model}/weights/one"
        rounds = []
        for _ in range(2):
            await client.fetch(await client.ask("load_weights", path=again, optimizer=True))
            rounds.append([await client.fetch(name) for name in await client.step(7)])
        assert rounds[0] == rounds[1]
        assert b"there are weights" in await client.fetch(await client.ask("save_weights", path="one"))


def test_a_kill_changes_no_bit(server: Server) -> None:
    asyncio.run(_bits(server))


async def _bits(server: Server) -> None:
    async with aiohttp.ClientSession() as http:
        whole, broken = Client(server, http), Client(server, http)
        assert await unbroken(whole) == await killed(broken)
        assert whole.weights("end") == broken.weights("end")
