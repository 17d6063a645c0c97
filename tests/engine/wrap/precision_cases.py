"""What test_precision.py runs on its ranks: gradients by name in any wrap, and losses of a real model's folder."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from engine import checkpoint
from engine.objective import entropy, logits as outputs
from engine.checkpoint.shards import optimizer_shards
from engine.checkpoint.state import host_tensors
from engine.model.build import gpt_model
from engine.sample import Sample
from tests.engine.engine_cases import engine, everywhere, random_samples


def gradients(cases: list[dict[str, Any]], num_samples: int) -> list[dict[str, Any]]:
    """Of each case the first step's gradients, boxes of the whole tensors by key, and the number of micro-batches of this rank.

    Adam with beta1 = 0 keeps the gradient that it was given as its first moment, in float32.
    """
    results, optimizer = [], {"clip_grad_norm": 0.0, "warmup_steps": 0, "beta1": 0.0}
    for case in cases:
        case = {"name": "sft", "optimizer": optimizer, "dtype": "bfloat16", **case}
        with engine(case.pop("path"), **case) as built:
            minibatches = built.prepare(random_samples(num_samples, seed=0))
            built.update(minibatches)
            boxes = {key: box for key, box in host_tensors(optimizer_shards(built)).items() if key.startswith("exp_avg ")}
            kept = {str(tensor.dtype) for tensor in built.wrapped.gradients()}
            results.append({"boxes": boxes, "num_microbatches": len(minibatches[0].microbatches), "dtypes": kept})
    return results


def relative_error(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> float:
    """|found - expected| / |expected| over all tensors; each from all ranks, whose boxes are put together."""
    whole, reference = (_flat(ranks) for ranks in (found, expected))
    assert whole.keys() == reference.keys()
    difference = sum(float((whole[name] - reference[name]).double().square().sum()) for name in reference)
    return float((difference / sum(float(tensor.double().square().sum()) for tensor in reference.values())) ** 0.5)


def _flat(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """By name a tensor as large as the boxes need, with the boxes in their places."""
    boxes: dict[str, list[tuple[tuple[int, ...], torch.Tensor]]] = {}
    for key, box in (pair for rank in ranks for pair in rank["boxes"].items()):
        _, name, offsets = key.split(" ")
        boxes.setdefault(name, []).append((tuple(map(int, offsets.split(","))), box))
    whole = {}
    for name, parts in boxes.items():
        shape = [max(start[dim] + box.shape[dim] for start, box in parts) for dim in range(parts[0][1].dim())]
        whole[name] = torch.zeros(shape)
        for start, box in parts:
            whole[name][tuple(slice(first, first + size) for first, size in zip(start, box.shape, strict=True))] = box
    return whole


def rotary_tables(cases: list[dict[str, Any]], lengths: list[int]) -> list[dict[str, Any]]:
    """Of each case, after scoring a sample of each length: the rows of the tables of angles that it has left."""
    results = []
    for case in cases:
        case, before = dict(case), _tables()
        with engine(case.pop("path"), name="sft", **case) as built:
            for length in lengths:
                built.score([Sample(tuple(range(3, 3 + length // 2)), tuple(range(3, 3 + length - length // 2)), ())])
            rows = [rows for address, rows in _tables().items() if address not in before]
            embedding = gpt_model(built.chunks[0]).rotary_pos_emb
            whole = embedding.get_emb(max(lengths))
            same = all(torch.equal(embedding(length, packed_seq=True), whole[:length]) for length in lengths)
        results.append({"rows": rows, "same": same})
    return results


def _tables() -> dict[int, int]:
    """The rows of each table of angles, float32 [rows, 1, 1, dim], that is alive; by the address of its storage."""
    gc.collect()
    alive = [each for each in gc.get_objects() if torch.is_tensor(each) and each.dim() == 4 and each.shape[1:3] == (1, 1)]
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() // (4 * each.shape[3]) for each in alive}


def rows_of_entropy(cases: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Of each case in one step: the tokens whose entropy was computed, and the tokens of all micro-batches."""
    results = []
    for case in cases:
        case, rows = dict(case), []

        def counted(logits: torch.Tensor, *args: Any, rows: list[int] = rows) -> torch.Tensor:
            rows.append(logits.shape[1])
            return entropy.token_entropy(logits, *args)

        with engine(case.pop("path"), name="grpo", **case) as built, mock.patch.object(outputs, "token_entropy", counted):
            minibatches = built.prepare(random_samples(8, seed=0))
            built.update(minibatches)
            results.append((sum(rows), sum(micro.num_tokens for mini in minibatches for micro in mini.microbatches)))
    return results


def trained_folders(path: str, root: str, wrap: str, dtype: str) -> float:
    """Save a checkpoint after small steps; the share of values in which the model in `root` differs from the start's."""
    from transformers import AutoModelForCausalLM

    optimizer = {"learning_rate": 1e-6, "warmup_steps": 0}
    with engine(path, wrap=wrap, name="sft", dtype=dtype, optimizer=optimizer) as built:
        for step in range(4):
            built.update(built.prepare(random_samples(8, seed=step)))
        checkpoint.save(Path(root), 4, built, everywhere(built), Path(path), keep=1).wait()
    models = [AutoModelForCausalLM.from_pretrained(each) for each in (path, checkpoint.newest(Path(root)) / "hf")]
    pairs = list(zip(*(model.parameters() for model in models), strict=True))
    changed = sum(int((before.float() != after.float()).sum()) for before, after in pairs)
    return changed / sum(before.numel() for before, _ in pairs)


def losses_of_folder(path: str, wraps: list[str], num_steps: int, num_samples: int, dtype: str) -> dict[str, list[float]]:
    """By wrap the losses of supervised steps, all of them clipped, on random tokens of a model in any Hugging Face folder.

    Short samples, since products in bf16 are slow on CPUs; a rank's are one micro-batch.
    """
    results = {}
    vocabulary = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    for wrap in wraps:
        optimizer = {"learning_rate": 1e-5, "warmup_steps": 0, "clip_grad_norm": 0.01}
        with engine(path, wrap=wrap, name="sft", dtype=dtype, optimizer=optimizer) as built:
            losses = []
            for step in range(num_steps):
                generator = torch.Generator().manual_seed(step)
                ids = torch.randint(3, vocabulary, (num_samples, 6), generator=generator).tolist()
                samples = [Sample(tuple(each[:2]), tuple(each[2:]), ()) for each in ids]
                losses.append(built.update(built.prepare(samples))["loss/sft"])
        results[wrap] = losses
    return results
