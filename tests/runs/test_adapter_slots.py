"""Several adapters in one replica at a time: each slot is brought, read back and sampled by itself. A real vLLM, no Megatron.

python -m pytest tests/runs/test_adapter_slots.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from bridge.config import ReplicaConfig, SyncConfig
from bridge.export.adapter import AdapterSource, AdapterSpec
from bridge.generation import NO_ADAPTER, Completion, GenerationRequest
from bridge.messages import FOLDER_VERSION, BeginSync
from bridge.send.publish import Publisher
from tests.runs.sync_pools import own_ray
from tests.support.replicas import OpenPool
from tests.support.tiny_models import write_tiny_model

pytestmark = [pytest.mark.long, pytest.mark.vllm_on_cpu, pytest.mark.timeout(300)]
RANK, NUM_SLOTS = 4, 3
PROMPTS = ((5, 6, 7, 8, 9), (20, 21), (30, 31, 32))


@dataclasses.dataclass
class Factors:
    name: str
    a: torch.Tensor
    b: torch.Tensor
    shares_a: bool


class Adapters(AdapterSource):
    """Random ones, by seed."""

    def __init__(self, folder: Path) -> None:
        self.hf_config = AutoConfig.from_pretrained(folder)
        super().__init__(self._walk, AdapterSpec(RANK, 2.0), stage=0, num_stages=1, is_sender=True)
        self.seed = 0

    def _walk(self) -> Iterator[Factors]:
        config, generator = self.hf_config, torch.Generator().manual_seed(self.seed)
        heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        sizes = {"q_proj": heads[0], "k_proj": heads[1], "v_proj": heads[1]}
        for layer in range(config.num_hidden_layers):
            a = torch.randn(RANK, config.hidden_size, generator=generator)
            for name, size in sizes.items():
                path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                yield Factors(path, a, 0.2 * torch.randn(size, RANK, generator=generator), name != "q_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("slots") / "model", "qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with own_ray():
        yield


class Served:
    """A pool with its publisher."""

    def __init__(self, folder: Path, num_slots: int) -> None:
        config = ReplicaConfig(
            str(folder), "float32", max_model_len=256, kv_cache_bytes=2**26, adapter_rank=RANK, adapter_slots=num_slots
        )
        self.pool, self.source, self.num_syncs = OpenPool.start(config, 1), Adapters(folder), 0
        sync = SyncConfig(bucket_bytes=8192, verify="readback")
        self.publisher = Publisher(self.source, self.pool, sync, adapter=self.source.spec)

    def bring(self, seed: int, slot: int) -> None:
        """Read back, too."""
        self.source.seed = seed
        self.num_syncs += 1
        self.publisher.publish(self.num_syncs, slot=slot)

    def sample(self, slots: list[int], max_new_tokens: int = 12, num_samples: int = 1) -> list[list[Completion]]:
        return self.pool.generate(requests(slots, max_new_tokens, num_samples)).result()


def requests(slots: list[int], max_new_tokens: int = 12, num_samples: int = 1) -> list[GenerationRequest]:
    """All prompts in each of the slots."""
    given = {"max_new_tokens": max_new_tokens, "temperature": 0.0, "num_samples": num_samples}
    return [GenerationRequest(prompt_ids=prompt, slot=slot, **given) for slot in slots for prompt in PROMPTS]


@pytest.fixture(scope="module")
def alone(folder: Path, cluster: None) -> list[list[Completion]]:
    """Of the base model and each of four adapters, the one adapter that is there."""
    served = Served(folder, 1)
    found = [each[0] for each in served.sample([NO_ADAPTER])]
    results = [found]
    for seed in range(4):
        served.bring(seed, 0)
        results.append([each[0] for each in served.sample([0])])
    served.pool.close()
    return results


def test_adapters_in_slots_are_as_alone(folder: Path, alone: list[list[Completion]]) -> None:
    served = Served(folder, NUM_SLOTS)
    for seed in range(NUM_SLOTS):
        served.bring(seed, seed)
    slots = [NO_ADAPTER, 0, 1, 2]
    together = iter(each[0] for each in served.sample(slots))
    for own in alone[:4]:
        for one, many in zip(own, together, strict=False):
            assert one.token_ids.tolist() == many.token_ids.tolist()
            np.testing.assert_allclose(many.log_probs, one.log_probs, atol=1e-5)
    assert len({str(each.token_ids) for own in alone for each in own}) > 2 * len(PROMPTS), "adapters change the tokens"
    long = served.pool.generate(requests([0, NO_ADAPTER], 200))
    served.bring(3, 1)  # the others go on, and so do new ones
    assert [each[0].token_ids.tolist() for each in served.sample([1])] == [each.token_ids.tolist() for each in alone[4]]
    found = [each[0] for each in long.result()]
    assert [each.token_ids[:12].tolist() for each in found] == [each.token_ids.tolist() for each in [*alone[1], *alone[0]]]
    assert {*np.concatenate([each.weight_versions for each in found])} == {1, FOLDER_VERSION}
    assert served.publisher.diff_with_replica(0) == ([], "")
    served.pool.close()


def test_a_broken_sync_mixes_no_adapters(folder: Path, alone: list[list[Completion]]) -> None:
    """Of the samples that it holds those end with an error whose slot is next to change, and the others as alone."""
    served = Served(folder, NUM_SLOTS)
    served.bring(0, 0)
    served.bring(2, 2)
    lost, held = served.pool.generate(requests([0], 200)), served.pool.generate(requests([2], 200))
    served.pool.pause(1)
    with pytest.raises(RuntimeError):  # of a stream that was not offered
        served.pool.gather(served.pool.receive(BeginSync(9, "", None, (1,), 1, ((),), 0, 0, 1, 0, True, 1.0, adapter={}, slot=1)))
    assert served.pool.abort() == ([], [0])
    served.bring(3, 0)
    with pytest.raises(RuntimeError, match="a sync that broke off"):
        lost.result()
    found = [each[0].token_ids[:12].tolist() for each in held.result()]
    assert found == [each.token_ids.tolist() for each in alone[3]]
    assert [each[0].token_ids.tolist() for each in served.sample([0])] == [each.token_ids.tolist() for each in alone[4]]
    served.pool.close()
