"""Pools of real replicas in a Ray of the module's own, and what their tensors, tokens and log-probs are compared with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bridge.config import ReplicaConfig
from bridge.generation import GenerationRequest
from bridge.transport import segment
from megasync.launch.ray_cluster import start_ray
from tests.support.processes import name_of
from tests.support.replicas import OpenPool, numbers
from tests.support.tiny_models import write_tiny_model

STORE_TIMEOUT = timedelta(seconds=120)  # no signal reaches a rank that waits for another there
GREEDY = [
    GenerationRequest((5, 6, 7, 8, 9), max_new_tokens=12, temperature=0.0),
    GenerationRequest((40,), max_new_tokens=12, temperature=0.0),
]
SAMPLED = [GenerationRequest((5 + i, 6, 7), num_samples=3, max_new_tokens=9, seed=i) for i in range(5)]


def in_layer_order(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    def rank(name: str) -> tuple[int, str]:
        parts = name.split(".")
        return (0 if "embed" in name else 1 + int(parts[2]) if parts[1] == "layers" else 100, name)

    return {name: tensors[name] for name in sorted(tensors, key=rank)}


def write_seeds(folder: Path, family: str, *, tied: bool, **config) -> list[Path]:
    return [write_tiny_model(folder / f"{family}-{seed}", family, tied, seed, **config) for seed in range(3)]


def load(folder: Path) -> dict[str, torch.Tensor]:
    return in_layer_order(load_file(folder / "model.safetensors"))


def start(folder: Path, replicas: int = 1, kind: type[OpenPool] = OpenPool, **config) -> OpenPool:
    fields = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 32, "kv_cache_bytes": 2**26} | config
    return kind.start(ReplicaConfig(str(folder), **fields), replicas)


def differing(held: dict[str, torch.Tensor], sent: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in sent if not torch.equal(held[name], sent[name])]


def tokens(pool: OpenPool, requests=GREEDY) -> list[tuple[int, ...]]:
    return [numbers(c)[0] for completions in pool.generate(requests).result() for c in completions]


def reference_scores(folder: Path, ids: tuple[int, ...]) -> torch.Tensor:
    logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    log_probs = logits.log_softmax(-1)[:-1]
    return log_probs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].detach()


@contextmanager
def own_ray() -> Iterator[None]:
    """Nothing that it or vLLM has started is left in the end."""
    stop_ray = start_ray("local")
    assert stop_ray is not None
    yield
    names = [name_of(process) for process in psutil.Process().children(recursive=True)]
    assert "ray::IDLE" not in names, "Ray started workers of its own in spite of megasync.launch.ray_cluster.WORKER_ENVIRONMENT"
    stop_ray()
    left = [name_of(process) for process in psutil.Process().children(recursive=True)]
    assert [name for name in left if "VLLM" in name or "Replica" in name] == []
    assert not list(segment.FOLDER.glob(f"{segment.PREFIX}{os.getpid()}-*"))
