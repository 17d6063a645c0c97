"""The experts that a real vLLM tells of its tokens, against those that transformers chooses for the same tokens.

python -m pytest tests/test_routing_vllm.py
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bridge.config import ReplicaConfig, SyncConfig
from bridge.generation import Completion, GenerationRequest
from bridge.send.publish import Publisher
from engine.sample import Sample
from megasync.launch.ray_cluster import start_ray
from tests.replicas import OpenPool
from tests.router_cases import hf_routed
from tests.sources import DictSource
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.timeout(300)
PROMPTS = ((20, 21, 22, 23, 24, 25), (30, 31))
NUM_SAMPLES = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root, sizes = tmp_path_factory.mktemp("models"), {"num_experts": 8, "num_experts_per_tok": 3}
    return [write_tiny_model(root / str(seed), "qwen3_moe", seed=seed, **sizes) for seed in range(2)]


@pytest.fixture(scope="module")
def pool(folders: list[Path]):
    stop_ray = start_ray("local")
    config = ReplicaConfig(
        str(folders[0]), "float32", max_model_len=256, max_num_seqs=16, kv_cache_bytes=2**26, on_update="continue",
        returns_experts=True,
    )  # fmt: skip
    pool = OpenPool.start(config, 1)
    yield pool
    pool.close()
    stop_ray()


def generate(pool: OpenPool, max_new_tokens: int) -> list[tuple[tuple[int, ...], Completion]]:
    ends = tuple(range(100, 128))  # some samples end before others, whose rows in vLLM's batch then move
    requests = [GenerationRequest(prompt, NUM_SAMPLES, max_new_tokens, seed=3, stop_token_ids=ends) for prompt in PROMPTS]
    answers = pool.generate(requests).result()
    return [(request.prompt_ids, each) for request, of_prompt in zip(requests, answers, strict=True) for each in of_prompt]


def test_every_token_s_experts_are_those_of_transformers_over_an_update_too(pool: OpenPool, folders: list[Path]) -> None:
    """Samples share their prompt's cache or not; what an update holds goes on, and each token keeps its own."""
    done = generate(pool, 20)
    samples = [Sample(np.array(prompt), each.token_ids, each.log_probs) for prompt, each in done]
    _, _, chosen = hf_routed(str(folders[0]), samples, None)
    assert len({len(completion.token_ids) for _, completion in done}) > 1
    for (prompt, completion), rows in zip(done, chosen, strict=True):
        told = completion.routed_experts
        assert told.dtype == np.uint8 and told.shape == (len(prompt) + len(completion.token_ids) - 1, 2, 3)
        assert np.array_equal(np.sort(told, -1), np.sort(rows[:-1], -1))
    tensors = {name: tensor.to(torch.float32) for name, tensor in load_file(folders[1] / "model.safetensors").items()}
    publisher = Publisher(DictSource(tensors), pool, SyncConfig(bucket_bytes=2**20, timeout_seconds=60))
    timer = threading.Timer(0.3, lambda: publisher.publish(0))
    timer.start()
    done = generate(pool, 200)
    timer.join()
    publisher.close()
    for prompt, completion in done:
        ordered = np.sort(completion.routed_experts, -1)
        assert ordered.shape == (len(prompt) + len(completion.token_ids) - 1, 2, 3)
        assert (ordered[..., 1:] != ordered[..., :-1]).all()
    assert {int(version) for _, completion in done for version in completion.weight_versions} <= {-1, 0}
