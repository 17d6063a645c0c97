"""vLLM's scheduler with our way for tokens that end nothing beside its own: real schedulers, tokens made up, no engine.

python -m pytest tests/bridge/vllm/test_vllm_plain_tokens.py
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from bridge.generation import GenerationRequest
from bridge.vllm.serving import api
from bridge.vllm.serving.requests import sampling_parameters
from tests.support.tiny_models import write_tiny_model

VOCABULARY, BLOCK, MAX_MODEL_LEN, MAX_NUM_SEQS, NUM_DRAFTS = 40, 4, 40, 6, 3


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """VllmConfig by kind of scheduler. A function, since hypothesis prints arguments, and a VllmConfig cannot be printed."""
    from vllm.engine.arg_utils import EngineArgs

    folder: Path = write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")
    sizes = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS, "block_size": BLOCK, "skip_tokenizer_init": True}
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_max": 2}}
    kinds: dict[str, Any] = {"async": {}, "plain": {}, "drafts": drafts}
    configs = {kind: EngineArgs(model=str(folder), **sizes, **more).create_engine_config() for kind, more in kinds.items()}
    for kind, each in configs.items():
        each.scheduler_config.async_scheduling = kind == "async"  # CPUs have the plain one else
    return lambda kind: configs[kind]


class Core:
    """As much of vLLM's engine core as a scheduler needs, its model a function of request and position.

    Args:
        config: VllmConfig.
        is_ours: Whether its scheduler is the product's.
        num_blocks: Of its KV cache; with few of them, requests are preempted.
    """

    def __init__(self, config: Any, is_ours: bool, num_blocks: int) -> None:
        import torch
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        cache = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)])
        config.cache_config.num_gpu_blocks = num_blocks
        is_async, self.drafts = config.scheduler_config.async_scheduling, config.speculative_config is not None
        config.scheduler_config.scheduler_cls = api.SCHEDULERS[is_async] if is_ours else None
        kind: Any = config.scheduler_config.get_scheduler_cls()
        self.scheduler = kind(config, cache, StructuredOutputManager(config), block_size=BLOCK)
        self.depth = 2 if is_async else 1
        self.steps: deque[tuple[Any, list[str]]] = deque()
        self.seen: dict[str, list[Any]] = defaultdict(list)

    def add(self, name: str, prompt: list[int], **fields: Any) -> None:
        from vllm.v1.request import Request

        wanted = sampling_parameters(GenerationRequest(tuple(prompt), **fields), 0)
        self.scheduler.add_request(Request(name, prompt, wanted, None, arrival_time=0.0, block_hasher=self.hasher))

    def change(self, index: int, requests: list[dict[str, Any]]) -> None:
        """Add the requests that are due, abort those that are."""
        from vllm.v1.request import RequestStatus

        for number, fields in enumerate(requests):
            if fields["at"] == index:
                self.add(str(number), **{name: value for name, value in fields.items() if name not in ("at", "aborted_at")})
            if fields["aborted_at"] == index:
                self.scheduler.finish_requests(str(number), RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        from vllm.v1.outputs import DraftTokenIds, LogprobsLists, ModelRunnerOutput

        scheduled = self.scheduler.schedule()
        requests = self.scheduler.requests
        ended = [name for name in scheduled.num_scheduled_tokens if not requests[name].is_prefill_chunk]
        self.steps.append((scheduled, ended))
        if len(self.steps) < self.depth:
            return
        scheduled, ended = self.steps.popleft()
        names, drafted = list(scheduled.num_scheduled_tokens), scheduled.scheduled_spec_decode_tokens
        tokens = [self._tokens(name, drafted.get(name, [])) if name in ended else [] for name in names]
        column = np.array([token for each in tokens for token in each or [0]], np.int32).reshape(-1, 1)
        begins = [0, *np.cumsum([max(1, len(each)) for each in tokens]).tolist()] if drafted else None
        log_probs = np.float32(column) / 7 - np.arange(3, dtype=np.float32)
        seen = LogprobsLists(np.repeat(column, 3, 1), log_probs, column[:, 0] + 1, begins)
        ran = ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, tokens, logprobs=seen)
        for each in self.scheduler.update_from_output(scheduled, ran).values():
            for output in each.outputs:
                self.seen[output.request_id].append(output)

        if self.drafts:
            running = [each.request_id for each in self.scheduler.running]
            self.scheduler.update_draft_token_ids(DraftTokenIds(running, [self._draft(name) for name in running]))

    def _random(self, name: str) -> random.Random:
        return random.Random(f"{name} {self.scheduler.requests[name].num_tokens}")

    def _draft(self, name: str) -> list[int]:
        chance = self._random(name)
        return [chance.randrange(VOCABULARY) for _ in range(chance.randint(0, NUM_DRAFTS))]

    def _tokens(self, name: str, drafts: list[int]) -> list[int]:
        """Those of the drafts that are accepted, and one more."""
        if name not in self.scheduler.requests:
            return []
        chance = self._random(name)
        return [*drafts[: chance.randint(0, len(drafts))], chance.randrange(VOCABULARY)]

    def state(self) -> dict[str, tuple[Any, ...]]:
        """Of all requests, what a scheduler knows."""
        blocks = self.scheduler.kv_cache_manager.get_block_ids
        return {
            name: (
                *(each.status, each.num_computed_tokens, each.num_in_flight_tokens, each.num_output_placeholders),
                *(list(each.all_token_ids), list(each.block_hashes), blocks(name) if each.status.name == "RUNNING" else None),
            )
            for name, each in self.scheduler.requests.items()
        }


REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9),
            "max_new_tokens": st.integers(1, 50),
            "stop_token_ids": st.lists(st.integers(0, VOCABULARY - 1), max_size=2).map(tuple),
            "stop": st.sampled_from([(), (), ("end",)]),
            "at": st.integers(0, 20),
            "aborted_at": st.sampled_from([None, None, None, 8, 15]),
        }
    ),
    min_size=1,
    max_size=9,
)


@pytest.mark.parametrize("kind", ["async", "plain", "drafts"])
@settings(deadline=None, max_examples=100)
@given(requests=REQUESTS, num_blocks=st.integers(12, 60), reset_at=st.sampled_from([None, 6, 13]))
def test_a_scheduler_goes_through_the_same_states_and_reports_the_same(
    config: Callable[[str], Any], kind: str, requests: list[dict[str, Any]], num_blocks: int, reset_at: int | None
) -> None:
    """Also where few blocks, or a cache that is dropped under way, let requests start again."""
    theirs, ours = Core(config(kind), False, num_blocks), Core(config(kind), True, num_blocks)
    for index in range(400):
        for core in (theirs, ours):
            core.change(index, requests)
            if index == reset_at:
                core.scheduler.reset_prefix_cache(reset_running_requests=True)
            core.step()
        assert ours.state() == theirs.state()
        assert ours.scheduler() == {name: each.num_output_tokens for name, each in theirs.scheduler.requests.items()}
        if index > 20 and not theirs.scheduler.requests:
            break
    else:
        raise AssertionError("not done in 400 steps")
    for number, fields in enumerate(requests):
        parts, whole = theirs.seen[str(number)], ours.seen[str(number)]
        if fields["stop"]:  # the front end looks at each token
            assert [each.new_token_ids for each in whole] == [each.new_token_ids for each in parts]
        elif not parts or parts[-1].finish_reason is None:
            assert whole == [], "aborted"
        else:
            same_in_one(whole, parts)


def same_in_one(whole: list[Any], parts: list[Any]) -> None:
    """One output tells what several did; of the log-probs those that the request asked for."""
    (only,) = whole
    assert only.new_token_ids == [token for each in parts for token in each.new_token_ids]
    assert (only.finish_reason, only.stop_reason) == (parts[-1].finish_reason, parts[-1].stop_reason)
    for name in ("logprob_token_ids", "logprobs", "sampled_token_ranks"):
        expected = np.concatenate([getattr(each.new_logprobs, name) for each in parts])
        got = getattr(only.new_logprobs, name)
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got.reshape(len(got), -1)[:, 0], expected.reshape(len(expected), -1)[:, 0])


def test_most_tokens_go_the_plain_way(config: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge.vllm.serving import outputs

    by_upstream: list[int] = []
    plain = outputs.take_plain_tokens

    def counting(*arguments: Any) -> Any:
        left = plain(*arguments)
        by_upstream.append(len(left.num_scheduled_tokens))
        return left

    monkeypatch.setattr(outputs, "take_plain_tokens", counting)
    core = Core(config("async"), True, 60)
    for name in ("0", "1"):
        core.add(name, [1, 2], max_new_tokens=30)
    while core.scheduler.requests:
        core.step()
    assert [len(core.seen[name][0].new_token_ids) for name in ("0", "1")] == [30, 30]
    assert sum(by_upstream) == 4  # the first and the last of each


def test_the_installed_vllm_was_compared() -> None:
    """Where this fails, read what changed in `source_digest`'s functions; the tests above must pass before it is added."""
    from bridge.vllm.serving import outputs

    assert outputs.source_digest() in outputs.VERIFIED_SOURCES
