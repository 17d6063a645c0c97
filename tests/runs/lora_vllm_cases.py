"""What the LoRA test of tests/runs/test_sync_trainer.py runs on two trainer ranks: adapters on their two ways into vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bridge.config import SyncConfig
from bridge.generation import GenerationRequest
from bridge.messages import SyncError
from bridge.send.publish import Publisher
from model_folder.layout import LANGUAGE
from engine.model import lora
from engine.sample import Sample
from megasync.run.canary import Canary, probe_sequences
from megasync.run.weights import build_adapter_source
from tests.engine.engine_cases import engine, exporter, log_probs, random_samples
from tests.support.replicas import OpenPool
from tests.engine.model.lora_cases import save_adapter, worst_difference
from tests.runs.sync_cases import is_rank_zero, replica
from tests.support.tiny_models import load_model

STARTS_PROCESSES = True  # see ranks.py


def publish_both_ways(path: str, folder: str, case: dict[str, Any], num_steps: int, dtype: str = "float32") -> dict[str, Any]:
    """Train; after each step bring the weights merged to one replica and the adapter alone to another, and compare.

    The adapter's replica splits over two workers; each sync ends with a comparison of what vLLM holds with what was sent.
    """
    pools: dict[str, OpenPool] = {}
    if is_rank_zero():
        pools["merged"] = replica(path, dtype=dtype)
        pools["adapter"] = replica(path, adapter_rank=case["lora"]["rank"], tensor_parallel=2, dtype=dtype)
    result: dict[str, Any] = {"tokens": [], "gaps": [], "effects": [], "seconds": {"merged": [], "adapter": []}, "bytes": {}}
    with engine(path, dtype=dtype, **case) as built:
        adapter = build_adapter_source(built)
        sources = {"merged": exporter(built), "adapter": adapter}
        sync = SyncConfig(bucket_bytes=150_000, verify="readback")
        publishers = {
            "merged": Publisher(sources["merged"], pools.get("merged"), sync),
            "adapter": Publisher(sources["adapter"], pools.get("adapter"), sync, adapter=adapter.spec),
        }
        for step in range(num_steps):
            built.update(built.prepare(random_samples(16, seed=step)))
            save_adapter(built, Path(folder), path)
            for way, publisher in publishers.items():
                report = publisher.publish(step)
                result["seconds"][way].append(report.seconds)
                result["bytes"][way] = report.num_bytes
            samples = random_samples(6, seed=1000 + step)
            mine = log_probs(built, samples)
            with lora.reference(built.chunks):
                result["effects"].append(worst_difference(mine, log_probs(built, samples)))
            if is_rank_zero():
                result["tokens"].append({way: greedy(pool, samples) for way, pool in pools.items()})
                result["tokens"][-1]["peft"] = peft_greedy(path, folder, samples)
                result["gaps"].append({way: score_gap(pool, samples, mine) for way, pool in pools.items()})
        if is_rank_zero():
            result["held"] = held_adapter(pools["adapter"], folder)
        tolerance = 1e-3 if dtype == "float32" else 0.1
        canary = Canary(probe_sequences([range(5, 40)], 2, 12), [(5, 6, 7), (20, 21)], tolerance, 60.0, print)
        canary.score_by_trainer(built)
        result["canary"] = canary.compare(num_steps, pools.get("adapter"), publishers["adapter"])["sync/canary_gap"]
        result["differing"] = publishers["adapter"].diff_with_replica(0)
        result["refused"] = [
            refused(Publisher(sources["adapter"], pools.get("merged"), sync, adapter=adapter.spec)),
            refused(Publisher(sources["merged"], pools.get("adapter"), sync)),
        ]
        if is_rank_zero():
            after = {way: greedy(pool, samples) for way, pool in pools.items()}
            result["serves_on"] = all(after[way] == result["tokens"][-1][way] for way in pools)
    return result


def held_adapter(pool: OpenPool, folder: str) -> dict[str, bool]:
    """Whether what vLLM holds of the adapter is what PEFT's folder has, by own name; B with the scale in it."""
    written = load_file(Path(folder) / "adapter_model.safetensors")
    files = {name.replace(LANGUAGE, "model."): each for name, each in written.items()}
    scale = 2.0  # alpha / rank of the tests
    held = pool.read_back()
    return {name: torch.equal(held[name], files[name] * (scale if "lora_B" in name else 1.0)) for name in held}


def refused(publisher: Publisher) -> str:
    try:
        publisher.publish(999)
    except SyncError as error:
        return f"{error.refused} {error}"
    finally:
        publisher.close()
    return ""


def greedy(pool: OpenPool, samples: list[Sample]) -> list[tuple[int, ...]]:
    requests = [
        GenerationRequest(tuple(s.prompt_ids.tolist()), max_new_tokens=8, temperature=0.0, stop_token_ids=()) for s in samples
    ]
    return [tuple(completions[0].token_ids.tolist()) for completions in pool.generate(requests).result()]


def peft_greedy(path: str, folder: str, samples: list[Sample]) -> list[tuple[int, ...]]:
    from peft import PeftModel

    model = PeftModel.from_pretrained(load_model(path), folder).merge_and_unload().eval()
    results = []
    for sample in samples:
        ids = sample.prompt_ids.tolist()
        for _ in range(8):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        results.append(tuple(ids[len(sample.prompt_ids) :]))
    return results


def score_gap(pool: OpenPool, samples: list[Sample], mine: list[torch.Tensor]) -> float:
    scores = pool.score_all([[*s.prompt_ids, *s.response_ids] for s in samples])
    theirs = [torch.tensor(score[len(s.prompt_ids) - 1 :]) for s, score in zip(samples, scores, strict=True)]
    return worst_difference(theirs, mine)
