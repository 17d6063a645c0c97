"""Sampling keys in a real vLLM: which tokens are drawn, with which log-probs, and what ends a response.

python -m pytest tests/test_sampling_vllm.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bridge.config import ReplicaConfig, SyncConfig
from bridge.generation import Completion, GenerationRequest
from bridge.send.publish import Publisher
from megasync.assets import VOCABULARY, Assets, write_assets
from megasync.launch.ray_cluster import start_ray
from tests.replicas import OpenPool
from tests.sources import DictSource

pytestmark = pytest.mark.timeout(300)
PROMPT = (20, 21, 22, 23)


ARGUMENTS = {"max_num_batched_tokens": 80, "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    return write_assets(tmp_path_factory.mktemp("assets"), seed=0, dtype="float32")


@pytest.fixture(scope="module")
def pool(assets: Assets):
    stop_ray = start_ray("local")
    config = ReplicaConfig(
        str(assets.model), dtype="float32", max_model_len=64, max_num_seqs=16, kv_cache_bytes=2**26,
        detokenizes=True, engine_arguments=ARGUMENTS,
    )  # fmt: skip
    pool = OpenPool.start(config, 1)
    yield pool
    pool.close()
    stop_ray()


def generate(pool: OpenPool, **fields: Any) -> list[Completion]:
    given = {"num_samples": 1, "max_new_tokens": 24, "temperature": 1.0} | fields
    return pool.generate([GenerationRequest(PROMPT, **given)]).result()[0]


def text(completion: Completion) -> str:
    return "".join(VOCABULARY[token] for token in completion.token_ids)


def test_arguments_of_the_config_reach_vllm(pool) -> None:
    assert pool.settings() == ARGUMENTS


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"min_p": 0.9999}])
def test_one_token_left_is_the_greedy_one_for_sure(pool, cut: dict[str, float]) -> None:
    (greedy,) = generate(pool, temperature=0.0)
    for completion in generate(pool, num_samples=2, **cut):
        assert completion.token_ids.tolist() == greedy.token_ids.tolist()
        assert max(map(abs, completion.log_probs)) < 1e-6


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"min_p": 0.7}, {"top_k": 8, "min_p": 0.5}])
def test_log_probs_are_those_of_the_tokens_that_are_left(pool, assets: Assets, cut: dict[str, float]) -> None:
    """And so above those of all tokens, which the trainer computes, by the same for every token at one place."""
    model = AutoModelForCausalLM.from_pretrained(assets.model, dtype=torch.float32)
    temperature = 0.5
    for completion in generate(pool, num_samples=3, temperature=temperature, **cut):
        ids = torch.tensor([[*PROMPT, *completion.token_ids.tolist()]])
        plain = (model(ids).logits[0, len(PROMPT) - 1 : -1] / temperature).log_softmax(-1)
        left = plain >= plain.topk(int(cut.get("top_k", plain.shape[-1]))).values[:, -1:]
        left &= plain >= plain.max(-1, keepdim=True).values + torch.tensor(cut.get("min_p", 1e-30)).log()
        kept = plain.masked_fill(~left, -torch.inf).log_softmax(-1)
        drawn = torch.tensor(completion.token_ids, dtype=torch.int64)[:, None]
        torch.testing.assert_close(torch.tensor(completion.log_probs), kept.gather(-1, drawn)[:, 0], atol=1e-4, rtol=0)
        assert (kept.gather(-1, drawn) > plain.gather(-1, drawn)).all()


def test_a_stop_text_ends_a_response_that_keeps_it(pool) -> None:
    """Within a token or over several; its tokens have log-probs and versions as the others."""
    whole = generate(pool, num_samples=4, seed=5)
    stop = text(whole[0])[6:9]
    for before, after in zip(whole, generate(pool, num_samples=4, seed=5, stop=(stop, "never")), strict=True):
        at = text(before).find(stop)
        if at < 0:
            assert (after.token_ids.tolist(), after.finish_reason) == (before.token_ids.tolist(), "length")
        else:
            assert text(after) == text(before)[: at + len(stop)] and after.finish_reason == "stop"
        assert len(after.log_probs) == len(after.weight_versions) == len(after.token_ids)
    assert whole[0].finish_reason == "length"


def test_a_replica_without_a_prefix_cache_takes_new_weights(pool, assets: Assets) -> None:
    tensors = load_file(assets.model / "model.safetensors")
    publisher = Publisher(DictSource({name: tensors[name] for name in sorted(tensors)}), pool, SyncConfig(bucket_bytes=2**20))
    assert publisher.publish(3).verified
    (completion,) = generate(pool)
    assert set(completion.weight_versions) == {3}
    publisher.close()
