"""Speculative decoding in a real vLLM: whatever is drafted, tokens and log-probs are the model's; a draft model's weights stay.

python -m pytest tests/bridge/replicas/test_speculation.py
"""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from bridge.config import ReplicaConfig, SpeculationConfig, SyncConfig
from bridge.generation import Completion, GenerationRequest, Speculation
from bridge.send.publish import Publisher
from megasync.launch.ray_cluster import start_ray
from tests.support.replicas import OpenPool
from tests.support.rewards import until
from tests.support.sources import DictSource
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.vllm_on_cpu
VOCABULARY = 16
PROMPT = (8, 9, 10, 11, 8, 9, 10, 11, 8, 9)
SPECIALS = ("<pad>", "<eos>", "<bos>")
NUM_DRAWS, MIN_EXPECTED = 1000, 15.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [write_tiny_model(root / str(seed), "qwen3", seed=seed, vocab_size=VOCABULARY) for seed in range(2)]


@pytest.fixture(scope="module")
def models(folders: list[Path]) -> list[PreTrainedModel]:
    return [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders]


@pytest.fixture(scope="module", params=["ngram", pytest.param("draft_model", marks=pytest.mark.long)])
def speculation(request: pytest.FixtureRequest, folders: list[Path]) -> SpeculationConfig:
    """The draft model is what the model is at first."""
    if request.param == "ngram":
        return SpeculationConfig(method="ngram", num_tokens=3, prompt_lookup_min=1)
    return SpeculationConfig(method="draft_model", num_tokens=3, path=str(folders[0]))


@pytest.fixture(scope="module")
def pool(folders: list[Path], speculation: SpeculationConfig):
    stop_ray = start_ray("local")
    config = ReplicaConfig(
        str(folders[0]), "float32", max_model_len=256, max_num_seqs=64, kv_cache_bytes=2**26, on_update="continue",
        recomputes_cache=False, returns_support=True, detokenizes=True, speculation=speculation,
    )  # fmt: skip
    pool = OpenPool.start(config, 1)
    yield pool
    pool.close()
    stop_ray()


def generate(pool: OpenPool, num_samples: int = 4, **fields: object) -> list[Completion]:
    given = {"max_new_tokens": 48, "temperature": 1.0, "seed": 1} | fields
    return pool.generate([GenerationRequest(PROMPT, num_samples=num_samples, **given)]).result()[0]


def text(completion: Completion) -> str:
    """As the tokenizer of tests/support/tiny_models.py has it, with its special tokens."""
    return "".join(SPECIALS[token] if token < 3 else chr(token + ord(" ") - 3) for token in completion.token_ids)


def logits(model: PreTrainedModel, completion: Completion) -> torch.Tensor:
    """[tokens, vocabulary]"""
    with torch.no_grad():
        return model(torch.tensor([[*PROMPT, *completion.token_ids.tolist()]])).logits[0, len(PROMPT) - 1 : -1]


def test_greedy_tokens_and_all_log_probs_are_those_of_the_model(pool, models: list[PreTrainedModel]) -> None:
    """Greedy ones beside others, which vLLM verifies in the same pass."""
    pool.take_speculation()
    requests = [GenerationRequest(PROMPT, num_samples=2, max_new_tokens=48, temperature=each, seed=1) for each in (0.0, 0.7)]
    greedy, sampled = pool.generate(requests).result()
    for completion, temperature in [*((each, 1.0) for each in greedy), *((each, 0.7) for each in sampled)]:
        rows = logits(models[0], completion)
        if temperature == 1.0:
            assert completion.token_ids.tolist() == rows.argmax(-1).tolist()
        own = (rows / temperature).log_softmax(-1)[range(len(rows)), completion.token_ids.tolist()]
        torch.testing.assert_close(torch.tensor(completion.log_probs), own, atol=1e-4, rtol=0)
        assert len(completion.token_ids) == 48 and completion.finish_reason == "length"
    counts = pool.take_speculation()
    assert 0 < counts.num_accepted <= counts.num_drafted <= 3 * counts.num_passes
    assert pool.take_speculation() == Speculation(), "they are counted once"
    assert pool.num_threads() == [1], "others would wait for each kernel's end, spinning on the trainer's cores"


def test_what_filters_leave_is_that_of_the_model(pool, models: list[PreTrainedModel]) -> None:
    for completion in generate(pool, top_k=5, top_p=0.9):
        rows, number = logits(models[0], completion), len(completion.token_ids)
        counts, ids = completion.support[:number], completion.support[number:]
        for row, kept, token, log_prob in zip(
            rows, torch.tensor(ids).split(counts.tolist()), completion.token_ids, completion.log_probs, strict=True
        ):
            assert set(kept.tolist()) == set(row.topk(len(kept)).indices.tolist())
            assert abs(float(row[int(token)] - row[kept.long()].logsumexp(0)) - log_prob) < 1e-4


@pytest.mark.long
def test_samples_are_distributed_as_those_of_the_model(pool, models: list[PreTrainedModel]) -> None:
    """The first two tokens; with speculation the second one comes from a verified draft or its correction."""
    pool.take_speculation()
    draws = [tuple(each.token_ids.tolist()) for each in generate(pool, NUM_DRAWS, max_new_tokens=3, temperature=2.0)]
    assert pool.take_speculation().num_accepted > NUM_DRAWS / 100
    tokens = range(VOCABULARY)
    with torch.no_grad():
        first = (models[0](torch.tensor([PROMPT])).logits[0, -1] / 2).softmax(-1)
        second = (models[0](torch.tensor([[*PROMPT, token] for token in tokens])).logits[:, -1] / 2).softmax(-1)
    counts = Counter((draw[0], draw[1]) for draw in draws)
    expected = {(a, b): NUM_DRAWS * float(first[a] * second[a, b]) for a in tokens for b in tokens}
    common = {pair: number for pair, number in expected.items() if number >= MIN_EXPECTED}
    rest = NUM_DRAWS - sum(common.values()), NUM_DRAWS - sum(counts[pair] for pair in common)
    square = sum((counts[pair] - number) ** 2 / number for pair, number in common.items()) + (rest[1] - rest[0]) ** 2 / rest[0]
    assert len(common) > 3 and square < len(common) + 5 * (2 * len(common)) ** 0.5, square


def test_a_response_ends_right_at_its_stop_text(pool) -> None:
    """Also where a pass gives tokens behind it."""
    whole = generate(pool, 8, temperature=0.5)
    stops = tuple({text(each)[at : at + 2] for each, at in zip(whole, range(8, 40, 4), strict=True)})
    for completion in generate(pool, 8, temperature=0.5, stop=stops, top_k=8):
        before = text(Completion(completion.token_ids[:-1], [], []))
        assert completion.finish_reason == "stop" and not [stop for stop in stops if stop in before]
        assert [stop for stop in stops if stop in text(completion)]
        number = len(completion.token_ids)
        assert len(completion.log_probs) == len(completion.weight_versions) == number
        assert len(completion.support) == number + completion.support[:number].sum()


def test_running_samples_continue_under_the_weights_of_a_sync(
    pool, folders: list[Path], models: list[PreTrainedModel], speculation: SpeculationConfig
) -> None:
    """Their tokens from then on have the new weights' log-probs; the cache is kept. A draft model keeps its weights."""

    def accepted() -> float:
        pool.take_speculation()
        generate(pool, 2, temperature=0.0)
        counts = pool.take_speculation()
        return counts.num_accepted / counts.num_drafted

    before = accepted()
    publishers = [Publisher(DictSource(load_file(folder / "model.safetensors")), pool, SyncConfig(bucket_bytes=2**20))
                  for folder in folders]  # fmt: skip

    def publish() -> None:
        until(lambda: pool.take_speculation().num_passes > 0)
        publishers[1].publish(1)

    thread = threading.Thread(target=publish)
    thread.start()
    done = generate(pool, max_new_tokens=200)
    thread.join()
    publishers[1].close()
    versions = {int(version) for completion in done for version in completion.weight_versions}
    assert versions == {-1, 1}, versions
    for completion in done:
        assert completion.weight_versions.tolist() == sorted(completion.weight_versions.tolist())
        old = int((completion.weight_versions == -1).sum())
        own = logits(models[0], completion).log_softmax(-1)[range(old), completion.token_ids[:old].tolist()]
        torch.testing.assert_close(torch.tensor(completion.log_probs[:old]), own, atol=1e-4, rtol=0)
    (new, *_), between = generate(pool, 1), accepted()
    own = logits(models[1], new).log_softmax(-1)[range(48), new.token_ids.tolist()]
    torch.testing.assert_close(torch.tensor(new.log_probs), own, atol=1e-4, rtol=0)
    publishers[0].publish(2)
    publishers[0].close()
    if speculation.path:
        assert before == accepted() == 1 and between < 0.9
