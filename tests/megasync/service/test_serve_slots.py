"""Several clients of one server, whose replica holds fewer versions than they sample from: each is as it is alone."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import psutil
import pytest
from tests.megasync.service.served import Client, Server

pytestmark = pytest.mark.vllm_on_cpu


class Done(NamedTuple):
    """By a client. `trained`: results of its training requests, and its weights; `sampled`: tokens and log-probs."""

    trained: list[bytes]
    weights: dict[str, bytes]
    sampled: list[tuple[list[int], np.ndarray[Any, Any]]]


async def work(client: Client, number: int, num_versions: int) -> Done:
    """Each version is sampled twice, once after all of them are saved."""
    await client.create()
    trained, sessions, answers = list[bytes](), list[str](), list[Any]()
    prompt = [5, 6, 7 + number % 9]
    for version in range(num_versions):
        trained += [await client.fetch(name) for name in await client.step(100 * number + version)]
        sent = await client.ask("save_weights_for_sampler", sampling_session_seq_id=version)
        sessions.append(json.loads(await client.fetch(sent))["sampling_session_id"])
        answers.append(await client.sample(sessions[-1], 1, prompt))
    answers += await asyncio.gather(*(client.sample(session, 2, prompt) for session in sessions))
    await client.fetch(await client.ask("save_weights", path="end"))
    return Done(trained, client.weights("end"), [pair for answer in answers for pair in pairs(answer)])


def pairs(answer: Any) -> list[tuple[list[int], np.ndarray[Any, Any]]]:
    """Of each sequence, the prompt's log-probs first."""
    of_prompt = np.frombuffer(answer.prompt_logprobs, np.float32)[1:]
    return [
        (np.frombuffer(each.tokens, np.int32).tolist(), np.concatenate([of_prompt, np.frombuffer(each.logprobs, np.float32)]))
        for each in answer.sequences
    ]


async def base(server: Server, http: aiohttp.ClientSession) -> Any:
    """A sample of the base model, of a client that trains nothing."""
    client = Client(server, http)
    session = (await client.send("create_session", {}))["session_id"]
    fields = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "Tiny/Model"}
    sampler = (await client.send("create_sampling_session", fields))["sampling_session_id"]
    return pairs(await client.sample(sampler, 1, [5, 6, 7]))


@pytest.mark.parametrize(
    ("num_clients", "num_versions", "num_slots", "layout"),
    [
        (4, 2, 2, ""),
        pytest.param(64, 1, 8, "", marks=pytest.mark.long),
        pytest.param(3, 2, 2, "parallel.tensor=2", marks=pytest.mark.long),
        pytest.param(3, 2, 2, "parallel.pipeline=2", marks=pytest.mark.long),
        pytest.param(3, 2, 2, "parallel.tensor=1", marks=pytest.mark.long),  # two data-parallel ranks
        pytest.param(3, 2, 2, "wrap=megatron_fsdp", marks=pytest.mark.long),  # two of them, which take turns
    ],
)
def test_clients_side_by_side_are_as_alone(
    tmp_path: Path, num_clients: int, num_versions: int, num_slots: int, layout: str
) -> None:
    overrides = ["engine.lora.sync=adapter", f"service.adapter_slots={num_slots}", "service.max_models=200"]
    overrides += [f"engine.{layout}"] if layout else []
    server = Server(tmp_path, 2 if layout else 1, *overrides)
    server.start()

    async def run() -> tuple[list[Done], list[Done], list[Any]]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            untrained = [await base(server, http)]
            alone = [await work(Client(server, http), number, num_versions) for number in range(num_clients)]
            jobs = [work(Client(server, http), number, num_versions) for number in range(num_clients)]
            *together, beside = await asyncio.gather(*jobs, base(server, http))
            return alone, together, [*untrained, beside]

    alone, together, untrained = asyncio.run(run())
    server.end(signal.SIGTERM)
    _, left = psutil.wait_procs(server.family, 120)
    assert not left
    gap = 0.0
    for one, other in zip(alone, together, strict=True):
        assert one.trained == other.trained and one.weights == other.weights
        gap = max(gap, differ(one.sampled, other.sampled))
    gap = max(gap, differ(*untrained))
    print("largest difference of a log-prob", gap)
    assert gap < 1e-5
    assert len({str(done.sampled[-1][0]) for done in alone}) > num_clients // 2, "adapters change the tokens"


def differ(one: Any, other: Any) -> float:
    assert [tokens for tokens, _ in one] == [tokens for tokens, _ in other]
    return max(float(np.abs(mine - yours).max()) for (_, mine), (_, yours) in zip(one, other, strict=True))
