"""Random kills of a service with two trainer ranks, while a client of supervised steps and one of RL work beside each other.

Weights and sampled tokens are equal to the bit to those of an unbroken run: the model is exact, so that a response does not
depend on what is sampled beside it.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import Iterator
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest
from tests.megasync.service.served import Client, Server

pytestmark = [pytest.mark.long, pytest.mark.vllm_on_cpu]
SEED, STEPS = 1, 4
KINDS = ["server", "rank 0", "rank 1", "replica"]


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    overrides = ("engine.parallel.pipeline=2", "model.exact=true", "service.poll_seconds=2")
    server = Server(tmp_path_factory.mktemp("killed"), 2, *overrides)
    server.start()
    yield server
    server.end(signal.SIGTERM)
    _, left = psutil.wait_procs(server.family, 120)
    assert not left


async def supervised(client: Client) -> list[bytes]:
    await client.create()
    found = [await client.fetch(name) for step in range(STEPS) for name in await client.step(step)]
    await client.fetch(await client.ask("save_weights", path="end"))
    return found


async def rewarded(client: Client) -> list[bytes]:
    """Responses are sampled with a version's weights, and are trained on."""
    await client.create()
    found: list[bytes] = []
    for step in range(STEPS):
        sent = await client.ask("save_weights_for_sampler", sampling_session_seq_id=step)
        session = json.loads(await client.fetch(sent))["sampling_session_id"]
        response = await client.sample(session, 1, [5, 6, 7 + step])
        for sequence in response.sequences:
            tokens = [5, 6, 7 + step, *np.frombuffer(sequence.tokens, np.int32).tolist()]
            log_probs = np.concatenate([[0, 0], np.frombuffer(sequence.logprobs, np.float32)])
            reward = {"advantages": np.full(len(tokens) - 1, np.mean(tokens) / 128 - 0.5)}
            name = await client.passes("importance_sampling", tokens, logprobs=log_probs, **reward)
            found += [sequence.tokens, sequence.logprobs, await client.fetch(name)]
        found.append(await client.fetch(await client.ask("optim_step", adam_params={"learning_rate": 1e-2})))
    await client.fetch(await client.ask("save_weights", path="end"))
    return found


async def both(server: Server, kills: list[str]) -> list[Any]:
    """What each client got, and its final weights."""
    async with aiohttp.ClientSession() as http:
        clients = [Client(server, http), Client(server, http)]
        runs = [asyncio.create_task(run(client)) for run, client in zip((supervised, rewarded), clients, strict=True)]
        for number, kind in enumerate(kills, 1):
            while sum(client.seq for client in clients) < number * 10 and not all(run.done() for run in runs):
                await asyncio.sleep(0.1)
            await asyncio.to_thread(server.kill, kind)
            print("killed", kind, flush=True)
        results = [await run for run in runs]
        return [*results, *[client.weights("end") for client in clients]]


def test_random_kills_change_no_bit(server: Server) -> None:
    kills = random.Random(SEED).sample(KINDS, len(KINDS))
    print("seed", SEED, kills)
    assert asyncio.run(both(server, [])) == asyncio.run(both(server, kills))
