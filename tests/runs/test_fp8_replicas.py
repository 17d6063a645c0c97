"""Syncs of quantised weights into a real replica: the bytes that it holds, and what it computes with them, sync after sync.

    python -m pytest tests/runs/test_fp8_replicas.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bridge.config import SyncConfig
from bridge.export.fp8 import QuantisedSource, quantise
from bridge.export.source import whole_tensors
from bridge.generation import GenerationRequest
from bridge.layout.digest import digest_value
from bridge.send.publish import Publisher
from tests.runs.sync_pools import load, own_ray, start, tokens, write_seeds
from tests.support.replicas import OpenPool
from tests.support.sources import DictSource

pytestmark = pytest.mark.vllm_on_cpu
SEQUENCES = [(5, 6, 7, 8, 9, 100, 3), (9, 8), tuple(range(20, 36))]  # few: a product in FP8 takes a CPU 0.1 s
REQUESTS = [GenerationRequest((5, 6, 7, 8, 9), max_new_tokens=4, temperature=0.0)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with own_ray():
        yield


def rounded(numbers: torch.Tensor) -> torch.Tensor:
    """To float8_e4m3fn and back, a scale for each row of the last dim."""
    flat = numbers.reshape(-1, numbers.shape[-1])
    values, scales = torch.empty(flat.shape, dtype=torch.float8_e4m3fn), torch.empty(len(flat), 1)
    quantise(flat, values, scales)
    return (values.float() * scales).view(numbers.shape)


@torch.no_grad()
def expected_scores(folder: Path, workers: int) -> list[torch.Tensor]:
    """Log-probs of transformers' model, whose linears in layers multiply rounded inputs with rounded weights.

    Each worker rounds its own part of the inputs of row-parallel linears.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, layer in model.named_modules():
        if name.endswith("_proj"):
            layer.weight.data = rounded(layer.weight.data)
            parts = workers if name.endswith(("o_proj", "down_proj")) else 1
            hook = partial(lambda parts, _, inputs: torch.cat([rounded(part) for part in inputs[0].chunk(parts, -1)], -1), parts)
            layer.register_forward_pre_hook(hook)
    found = []
    for ids in SEQUENCES:
        log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)[:-1]
        found.append(log_probs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0])
    return found


def gap(pool: OpenPool, expected: list[torch.Tensor]) -> float:
    scores = pool.score_all(SEQUENCES)
    return float(torch.cat([torch.tensor(own) - other for own, other in zip(scores, expected, strict=True)]).abs().mean())


@pytest.mark.parametrize("tensor_parallel", [1, pytest.param(2, marks=pytest.mark.long)])
def test_each_sync_brings_the_quantised_bytes_and_their_log_probs(tmp_path: Path, tensor_parallel: int) -> None:
    """Of a model in float32, so that the inputs of its linears are rounded to FP8 as the reference rounds them."""
    folders = write_seeds(tmp_path, "qwen3", tied=False, num_hidden_layers=2)
    sizes = {"max_num_seqs": 4, "engine_arguments": {"max_num_batched_tokens": 64}}  # its products on a CPU are slow
    pool = start(folders[0], is_fp8=True, tensor_parallel=tensor_parallel, **sizes)
    source = DictSource(load(folders[0]))
    publisher = Publisher(QuantisedSource(source), pool, SyncConfig(bucket_bytes=10_000, verify="readback"))
    try:
        with pytest.raises(RuntimeError, match="publish"):  # its weights are random
            pool.generate([GenerationRequest((5,), max_new_tokens=2)]).result()
        said = set[tuple[tuple[int, ...], ...]]()
        expected = [expected_scores(folder, tensor_parallel) for folder in folders]
        for version, number in enumerate((0, 1, 2, 1)):
            source.tensors = load(folders[number])
            report = publisher.publish(version)
            assert report.verified
            assert set(report.loader_fallback) <= {"lm_head"}  # which CPUs pack
            sent = {name: digest_value(tensor) for name, tensor in whole_tensors(QuantisedSource(source))}
            assert pool.read_digests(60.0)[0] == sent
            own, others = gap(pool, expected[number]), [gap(pool, each) for each in expected]
            assert own < 0.05 and sorted(others)[1] > 0.5, others
            said.add(tuple(tokens(pool, REQUESTS)))
        assert len(said) == len(folders)
        weights = sum(math.prod(tensor.shape) for name, tensor in source.tensors.items() if name.endswith("_proj.weight"))
        assert report.num_bytes < sum(tensor.nbytes for tensor in source.tensors.values()) - 0.9 * weights
    finally:
        publisher.close()
        pool.close()
