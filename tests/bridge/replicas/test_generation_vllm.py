"""A real vLLM's tokens: which are drawn, with which log-probs and experts, and what ends a response.

python -m pytest tests/bridge/replicas/test_generation_vllm.py
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bridge.config import ReplicaConfig, SyncConfig
from bridge.generation import Completion, GenerationRequest, GroupRequest
from bridge.send.publish import Publisher
from engine.sample import Sample
from megasync.launch.ray_cluster import start_ray
from tests.support.replicas import OpenPool
from tests.engine.moe.router_cases import hf_routed
from tests.support.sources import DictSource
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.vllm_on_cpu
PROMPT = (20, 21, 22, 23)
PROMPTS = ((20, 21, 22, 23, 24, 25), (30, 31))
NUM_SAMPLES = 3
SPECIALS = ("<pad>", "<eos>", "<bos>")
ARGUMENTS = {"max_num_batched_tokens": 300}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    sizes = {"num_experts": 8, "num_experts_per_tok": 3, "vocab_size": 32}
    return [write_tiny_model(root / str(seed), "qwen3_moe", seed=seed, **sizes) for seed in range(2)]


@pytest.fixture(scope="module")
def pool(folders: list[Path]):
    stop_ray = start_ray("local")
    config = ReplicaConfig(
        str(folders[0]), "float32", max_model_len=256, max_num_seqs=16, kv_cache_bytes=2**26, on_update="continue",
        returns_experts=True, returns_support=True, detokenizes=True, engine_arguments=ARGUMENTS,
    )  # fmt: skip
    pool = OpenPool.start(config, 1)
    yield pool
    pool.close()
    stop_ray()


def generate(pool: OpenPool, **fields: Any) -> list[Completion]:
    given = {"num_samples": 1, "max_new_tokens": 24, "temperature": 1.0} | fields
    return pool.generate([GenerationRequest(PROMPT, **given)]).result()[0]


def text(completion: Completion) -> str:
    """As the tokenizer of tests/support/tiny_models.py has it, with its special tokens."""
    return "".join(SPECIALS[token] if token < 3 else chr(token + ord(" ") - 3) for token in completion.token_ids)


def test_arguments_of_the_config_reach_vllm(pool) -> None:
    assert pool.settings() | ARGUMENTS == pool.settings()


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"min_p": 0.9999}])
def test_one_token_left_is_the_greedy_one_for_sure(pool, cut: dict[str, float]) -> None:
    (greedy,) = generate(pool, temperature=0.0)
    for completion in generate(pool, num_samples=2, **cut):
        assert completion.token_ids.tolist() == greedy.token_ids.tolist()
        assert max(map(abs, completion.log_probs)) < 1e-6


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"min_p": 0.7}, {"top_k": 8, "min_p": 0.5}])
def test_log_probs_are_those_of_the_tokens_that_are_left(pool, folders: list[Path], cut: dict[str, float]) -> None:
    """And so above those of all tokens, which the trainer computes, by the same for every token at one place."""
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
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


@pytest.mark.parametrize("cut", [{"top_k": 8, "top_p": 0.8}, {"top_k": 3}, {"top_k": 16, "min_p": 0.3}, {"top_k": 40}])
def test_kept_tokens_are_those_that_the_filters_leave(pool, folders: list[Path], cut: dict[str, float]) -> None:
    """Their probabilities add up to 1 over them alone, so that the sampled one's log-prob is vLLM's."""
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    for completion in generate(pool, num_samples=3, temperature=0.5, stop=("never",) if "min_p" in cut else (), **cut):
        number = len(completion.token_ids)
        ids = torch.tensor([[*PROMPT, *completion.token_ids.tolist()]])
        plain = (model(ids).logits[0, len(PROMPT) - 1 : -1] / 0.5).log_softmax(-1)
        ends = np.cumsum([number, *completion.support[:number]])
        assert ends[-1] == len(completion.support) and completion.support[:number].max() <= cut["top_k"]
        for place, row in enumerate(plain):
            kept = torch.tensor(completion.support[ends[place] : ends[place + 1]], dtype=torch.int64)
            assert set(kept.tolist()) == set(row.topk(len(kept)).indices.tolist()), "the most likely ones"
            token = int(completion.token_ids[place])
            assert abs(float(row[token] - row[kept].logsumexp(0)) - completion.log_probs[place]) < 1e-4
    assert not generate(pool)[0].support.size, "without top_k nothing is known"


def test_what_vllm_refuses_of_a_request_is_a_value_error(pool) -> None:
    """Its own class is none from 0.32 on; by any other error a replica counts as lost."""
    for prompt_ids, pattern in (((10**6,), "out of vocabulary"), ((20,) * 300, "maximum")):
        with pytest.raises(ValueError, match=pattern):
            ray.get(pool.hand_in(0, [GroupRequest(1, GenerationRequest(prompt_ids, num_samples=1, max_new_tokens=4), (0,))]))
    assert len(generate(pool)[0].token_ids)


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


def test_a_special_token_s_text_ends_a_response(pool) -> None:
    """As rewards see it; vLLM's own detokenizer would leave it out."""
    whole = generate(pool, num_samples=4, seed=5)
    assert any(SPECIALS[2] in text(each) for each in whole)
    for before, after in zip(whole, generate(pool, num_samples=4, seed=5, stop=(SPECIALS[2],)), strict=True):
        head, found, _ = text(before).partition(SPECIALS[2])
        assert text(after) == head + found and after.finish_reason == ("stop" if found else "length")


def ending(pool: OpenPool, max_new_tokens: int) -> list[tuple[tuple[int, ...], Completion]]:
    ends = tuple(range(25, 32))  # some samples end before others, whose rows in vLLM's batch then move
    requests = [
        GenerationRequest(prompt, num_samples=NUM_SAMPLES, max_new_tokens=max_new_tokens, seed=3, stop_token_ids=ends)
        for prompt in PROMPTS
    ]
    answers = pool.generate(requests).result()
    return [(request.prompt_ids, each) for request, of_prompt in zip(requests, answers, strict=True) for each in of_prompt]


def test_every_token_s_experts_are_those_of_transformers_over_an_update_too(pool: OpenPool, folders: list[Path]) -> None:
    """Samples share their prompt's cache or not; what an update holds goes on, and each token keeps its own."""
    done = ending(pool, 20)
    samples = [Sample(np.array(prompt), each.token_ids, each.log_probs) for prompt, each in done]
    _, _, chosen = hf_routed(str(folders[0]), samples, None)
    assert len({len(completion.token_ids) for _, completion in done}) > 1
    for (prompt, completion), rows in zip(done, chosen, strict=True):
        experts = completion.routed_experts
        assert experts.dtype == np.uint8 and experts.shape == (len(prompt) + len(completion.token_ids) - 1, 2, 3)
        assert np.array_equal(np.sort(experts, -1), np.sort(rows[:-1], -1))
    tensors = {name: tensor.to(torch.float32) for name, tensor in load_file(folders[1] / "model.safetensors").items()}
    publisher = Publisher(DictSource(tensors), pool, SyncConfig(bucket_bytes=2**20, timeout_seconds=60))
    timer = threading.Timer(0.3, lambda: publisher.publish(0))
    timer.start()
    done = ending(pool, 200)
    timer.join()
    publisher.close()
    for prompt, completion in done:
        ordered = np.sort(completion.routed_experts, -1)
        assert ordered.shape == (len(prompt) + len(completion.token_ids) - 1, 2, 3)
        assert (ordered[..., 1:] != ordered[..., :-1]).all()
    assert {int(version) for _, completion in done for version in completion.weight_versions} <= {-1, 0}


def test_a_pause_waits_for_no_call_that_failed_before_it_generated(pool: OpenPool, tmp_path: Path) -> None:
    """A trace knows no modules of experts."""
    with pytest.raises(RuntimeError, match="gate_up_proj"):
        pool.trace(0, [*PROMPT, 5, 6], len(PROMPT), 1.0, tmp_path / "trace.safetensors")
    pausing = threading.Thread(target=pool.pause, daemon=True)
    pausing.start()
    pausing.join(120)
    assert not pausing.is_alive()
    assert pool.abort() == ([], []) and generate(pool)


def test_replicas_that_have_only_begun_to_start_end_with_their_pool(pool, folders: list[Path]) -> None:
    beginning = OpenPool.begin_start(ReplicaConfig(str(folders[1]), "float32", max_model_len=64, kv_cache_bytes=2**26), 1)
    actor = beginning._replicas[0].actor
    assert beginning.members == [] and actor.started is not None
    beginning.close()
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.started, timeout=30)
    assert pool.members == [0] and generate(pool)
