"""Ranks of tests/runs/test_real_model.py: engines and vLLM on a real model, on texts that transformers has answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bridge.config import SyncConfig
from bridge.export.source import whole_tensors
from bridge.generation import GenerationRequest
from bridge.send.publish import Publisher
from engine import checkpoint
from engine.engine import Engine
from engine.sample import Sample
from megasync.run.weights import build_adapter_source
from tests.engine.engine_cases import engine, everywhere, exporter, hf_log_probs
from tests.engine.model.lora_cases import save_adapter, worst_difference
from tests.runs.lora_vllm_cases import held_adapter, score_gap
from tests.support.replicas import OpenPool
from tests.runs.sync_cases import close_replicas, is_rank_zero, replica

STARTS_PROCESSES = True  # see ranks.py
STEP = {"name": "sft", "tokens": 400, "num_steps": 3, "optimizer": {"learning_rate": 1e-4}}
SYNC = SyncConfig(bucket_bytes=2**26, verify="readback")


def step(built: Engine, samples: list[Sample]) -> tuple[float, float]:
    metrics = built.update(built.prepare(samples))
    return metrics["loss/sft"], metrics["grad_norm"]


def greedy(pool: OpenPool, samples: list[Sample]) -> list[list[int]]:
    """vLLM's answers, as long as those of the samples."""
    requests = [
        GenerationRequest(tuple(s.prompt_ids.tolist()), max_new_tokens=len(s.response_ids), temperature=0.0) for s in samples
    ]
    return [completions[0].token_ids.tolist() for completions in pool.generate(requests).result()]


def matches_greedy(built: Engine, samples: list[Sample], answers: list[list[int]]) -> list[bool]:
    """Whether the engine would answer so, too."""
    answered = [Sample(sample.prompt_ids, answer) for sample, answer in zip(samples, answers, strict=True)]
    return [each.is_match for each in built.held_out(answered)]


def trained(path: str, samples: list[Sample], expected: list[torch.Tensor], wrap: str, root: str = "") -> dict[str, Any]:
    """Log-probs and greedy answers before training, then two steps; with a `root` a checkpoint between them, see `resumed`."""
    with engine(path, wrap=wrap, **STEP) as built:
        result: dict[str, Any] = {"gap": worst_difference(built.score(samples), expected)}
        result["greedy"] = [each.is_match for each in built.held_out(samples)]
        result["losses"] = [step(built, samples)]
        if root:
            saved = checkpoint.save(Path(root), 1, built, everywhere(built), Path(path), 1).wait()
            scores = built.score(samples)
        result["losses"].append(step(built, samples))
    del built  # two engines at a time take more memory than this is worth
    return result | (resumed(path, samples, wrap, saved, scores) if root else {})


def resumed(path: str, samples: list[Sample], wrap: str, saved: Path, scores: list[torch.Tensor]) -> dict[str, Any]:
    """How far an engine and transformers are from the `scores` of the engine that was saved, and the step that it did next."""
    with engine(path, wrap=wrap, **checkpoint.engine_arguments(saved), **STEP) as built:
        checkpoint.restore(saved, built)
        result = {"restored": worst_difference(built.score(samples), scores), "again": step(built, samples)}
    return {**result, "exported": worst_difference(hf_log_probs(str(saved / "hf"), samples), scores)}


def served(path: str, samples: list[Sample], cases: list[dict[str, Any]]) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """vLLM's greedy answers by the folder's weights; of each case, which trains a step and publishes, how both sides agree."""
    pool = replica(path) if is_rank_zero() else None
    answers = greedy(pool, samples) if pool is not None else []
    return answers, [follow(path, samples, pool, version, case) for version, case in enumerate(cases)]


def follow(path: str, samples: list[Sample], pool: OpenPool | None, version: int, case: dict[str, Any]) -> dict[str, Any]:
    with engine(path, **STEP, **case) as built:
        step(built, samples)
        publisher = Publisher(exporter(built), pool, SYNC)
        publisher.publish(version)
        result = agreement(built, pool, samples)
        result["differing"], result["num_tensors"] = [], 0
        for name, tensor in whole_tensors(exporter(built)):
            if pool is not None:
                names = [name, *(["lm_head.weight"] if name == "model.embed_tokens.weight" else [])]  # tied: a head of vLLM's own
                held = pool.read_back(names)
                result["num_tensors"] += len(held)
                result["differing"] += [each for each in names if not torch.equal(held[each], tensor)]
        publisher.close()
    return result


def agreement(built: Engine, pool: OpenPool | None, samples: list[Sample]) -> dict[str, Any]:
    """Collective: the largest difference of log-probs, and whether the engine takes vLLM's greedy tokens for such."""
    mine = built.score(samples)
    reported = [greedy(pool, samples) if pool is not None else None]
    torch.distributed.broadcast_object_list(reported, src=0)
    assert reported[0] is not None
    gap = score_gap(pool, samples, mine) if pool is not None else 0.0
    return {"gap": gap, "greedy": matches_greedy(built, samples, reported[0])}


def served_adapter(path: str, folder: str, samples: list[Sample]) -> dict[str, Any]:
    """The adapter alone goes to a replica that has the folder's weights; the replicas end."""
    close_replicas()
    pool = replica(path, adapter_rank=4) if is_rank_zero() else None
    with engine(path, wrap="megatron_fsdp", lora={"rank": 4, "alpha": 8.0}, **STEP) as built:
        step(built, samples)
        save_adapter(built, Path(folder), path)
        source = build_adapter_source(built)
        publisher = Publisher(source, pool, source.sync_config(SYNC), adapter=source.spec)
        publisher.publish(1)
        result = agreement(built, pool, samples)
        if pool is not None:
            result["held"] = held_adapter(pool, folder)
        publisher.close()
    close_replicas()
    return result
