"""Served models on real vLLM: scores against transformers, lost replicas and servers, and runs that learn from a teacher."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from bridge.config import ReplicaConfig
from bridge.generation import TokenScores
from bridge.replicas.pool import ReplicaPool
from bridge.vllm.serving.api import environment as vllm_environment
from megasync.launch.ray_cluster import free_port, start_ray
from megasync.served.endpoint import Endpoint, EndpointSettings
from megasync.served.pool import ServedPool
from megasync.served.protocol import RETRIES, RefusedError
from tests.runs.train_cases import TORCHRUN, endless_run, launch, left_running, metrics, processes_with, write_config
from tests.support.processes import command_of
from tests.support.tiny_models import write_tiny_model

pytestmark = [pytest.mark.long, pytest.mark.vllm_on_cpu]
TOP_K, VOCABULARY = 7, 128
LENGTHS = (40, 2, 1, 17, 33)
SEQUENCES = [np.random.default_rng(length).integers(3, VOCABULARY, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", seed=3)


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[ReplicaPool]:
    stop = start_ray("local")
    arguments = {"enable_prefix_caching": False, "max_logprobs": TOP_K}
    sizes = {"max_model_len": 64, "max_num_seqs": 16, "kv_cache_bytes": 2**26}
    config = ReplicaConfig(str(folder), "float32", never_syncs=True, engine_arguments=arguments, **sizes)  # type: ignore[arg-type]
    try:
        started = ReplicaPool.start(config, 1)
        yield started
        started.close()
    finally:
        if stop is not None:
            stop()


def assert_scores_are_the_models(folder: Path, found: Sequence[TokenScores]) -> None:
    """Within 1e-4 of transformers' in float32; the top tokens are its own."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for ids, scores in zip(SEQUENCES, found, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        own = expected[torch.arange(len(ids) - 1), torch.tensor(ids[1:], dtype=torch.int64)]
        assert scores.log_probs.shape == (len(ids) - 1,) and scores.top_ids.shape == (len(ids) - 1, TOP_K)
        np.testing.assert_allclose(scores.log_probs, own.numpy(), atol=1e-4)
        np.testing.assert_allclose(scores.top_log_probs, expected.topk(TOP_K).values.numpy(), atol=1e-4)
        at_ids = expected.gather(1, torch.from_numpy(scores.top_ids.astype(np.int64)))
        np.testing.assert_allclose(scores.top_log_probs, at_ids.numpy(), atol=1e-4)


def test_a_pool_scores_as_transformers_and_survives_its_replica(pool: ReplicaPool, folder: Path) -> None:
    notes: list[str] = []

    async def use() -> list[TokenScores]:
        served = ServedPool(pool, "teacher.path", notes.append)
        before = await served.prompt_log_probs(SEQUENCES, TOP_K)
        assert_scores_are_the_models(folder, before)
        processes = psutil.Process(pool._actors[0].pid).children(recursive=True)
        (engine,) = [each for each in processes if "EngineCore" in command_of(each)]
        os.kill(engine.pid, signal.SIGKILL)
        after = await served.prompt_log_probs(SEQUENCES, TOP_K)
        assert served.counts[RETRIES] >= 1
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one.log_probs, other.log_probs)
        with pytest.raises(RefusedError, match=r"teacher\.path = "):
            await served.prompt_log_probs([[5] * 65], 0)
        return after

    asyncio.run(use())
    assert any("is lost and is restarted" in note for note in notes)


@contextmanager
def api_server(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """vLLM's own."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    options = ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "64", "--enforce-eager", "--max-logprobs"]
    own = {**os.environ, **vllm_environment(cuda=False), "VLLM_CPU_KVCACHE_SPACE": "1"}
    process = subprocess.Popen([*command, *options, str(TOP_K)], env=own, start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            except OSError:
                time.sleep(0.5)
        yield process
    finally:
        with_children = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        for pid in with_children:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait(30)


def test_an_endpoint_scores_as_transformers_and_may_be_started_again(folder: Path) -> None:
    port = free_port()
    settings = EndpointSettings("teacher.endpoint", (f"http://127.0.0.1:{port}/v1",), patience_seconds=300.0)

    async def use() -> None:
        endpoint = Endpoint(settings)
        try:
            with api_server(folder, port):
                assert_scores_are_the_models(folder, await endpoint.prompt_log_probs(SEQUENCES, TOP_K))
                assert await endpoint.tokens(["12+30="]) == [endpoint_ids(folder, "12+30=")]
                with pytest.raises(RefusedError, match=r"teacher\.endpoint = "):
                    await endpoint.prompt_log_probs(SEQUENCES[:1], TOP_K + 1)
            waiting = asyncio.create_task(endpoint.prompt_log_probs(SEQUENCES, TOP_K))
            await asyncio.sleep(2.0)
            assert not waiting.done()
            with api_server(folder, port):
                assert_scores_are_the_models(folder, await waiting)
            assert endpoint.counts[RETRIES] >= 1
        finally:
            await endpoint.close()

    asyncio.run(use())


def endpoint_ids(folder: Path, text: str) -> list[int]:
    from bridge import detokenizer

    tokenizer, _ = detokenizer.load(folder)
    return list(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_learns_from_a_teacher_that_is_killed(tmp_path: Path, staleness: int) -> None:
    """With an adapter and episodes at staleness 1; then its trainer is killed, and it goes on. Each prompt once."""
    episodes = {"episode": "tests.support.fuzzed:short", "record": "all"} if staleness else {"record": "all"}
    lora = {"lora": {"rank": 4}} if staleness else {}
    objective = {"objective": "top_k", "top_k": 8} if staleness else {"objective": "sampled"}
    config = write_config(
        tmp_path,
        engine={"wrap": "ddp", **lora},
        rollout={"max_staleness": staleness, "max_model_len": 48, **episodes},
        teacher={"path": str(tmp_path / "assets" / "model"), "reward_weight": 0.0, **objective},
        checkpoint={"every_steps": 1},
    )
    with endless_run(TORCHRUN, config, "--nproc", "1") as run:
        run.wait_for(2)
        actors = [each for each in processes_with(run.marker) if "EngineCore" in command_of(each)]
        assert len(actors) == 2
        for each in actors:  # the policy's and the teacher's
            each.kill()
        run.wait_for(len(metrics(run.folder)) + 3)
        said = run.said.read_text()
        assert "teacher.path = " in said and "replica 0 is lost and is restarted" in said
        run.ranks()[0].kill()
        assert run.process.wait(300) != 0
        assert left_running(run.marker) == []
    done = len(metrics(run.folder))
    again = launch(config, f"run.steps={done + 2}", ranks=1)
    assert again.returncode == 0, again.stdout + again.stderr
    lines = metrics(run.folder)
    assert [line["step"] for line in lines] == list(range(1, done + 3))
    assert all(np.isfinite(line["teacher/kl_mean"]) for line in lines)
    assert abs(lines[0]["teacher/kl_mean"]) < 1e-4  # the teacher is the start model
