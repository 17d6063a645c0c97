"""What the tests of pipelines run on their ranks: everything that an engine does, once for each case."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bridge.export.source import whole_tensors
from engine import checkpoint
from engine.engine import Engine
from engine.model.build import gpt_model
from tests.engine.engine_cases import engine, everywhere, exporter, log_probs, random_samples

UNCLIPPED = {"clip_grad_norm": 0.0, "learning_rate": 1e-2}


def stages(cases: list[dict[str, Any]], root: str, num_steps: int = 3) -> list[dict[str, Any]]:
    """Of each case: the export before training against the folder, log-probs, and steps, the last again after resuming."""
    results = []
    for number, case in enumerate(cases):
        case = {"name": "sft", "optimizer": UNCLIPPED, "tokens": 100, **case}
        path, resumes = case.pop("path"), case.pop("resumes", False)
        folder = Path(root) / f"{os.environ.get('WORLD_SIZE', '1')}_{number}"
        with engine(path, **case) as built:
            layers = [[layer.layer_number - 1 for layer in gpt_model(chunk).decoder.layers] for chunk in built.chunks]
            source = exporter(built)
            disk = load_file(Path(path) / "model.safetensors")
            sent = {name: tensor.clone() for name, tensor in whole_tensors(source)}
            values = log_probs(built, random_samples(6, seed=99))
            history, counts = _train(built, range(num_steps - 1))
            history += _train(built, range(1), num_samples=1)[0]  # chunks get an empty micro-batch with it
            if resumes:
                checkpoint.save(folder, num_steps - 1, built, everywhere(built), Path(path), keep=1).wait()
            last, _ = _train(built, range(num_steps - 1, num_steps))
        result: dict[str, Any] = {
            "layers": layers,
            "names": sorted(sent),
            "disk": sorted(disk),
            "differing": [name for name, tensor in sent.items() if not torch.equal(tensor, disk[name])],
            "log_probs": torch.cat(values).tolist(),
            "history": history + last,
            "num_microbatches": counts,
            "resumed": last,
        }
        if resumes and (saved := checkpoint.newest(folder)):
            with engine(path, **checkpoint.engine_arguments(saved), **case) as built:
                checkpoint.restore(saved, built)
                result["resumed"], _ = _train(built, range(num_steps - 1, num_steps))
        results.append(result)
    return results


def _train(built: Engine, seeds: range, num_samples: int = 16) -> tuple[list[float], list[int]]:
    """Loss and gradient norm of each step, and its number of micro-batches."""
    history: list[float] = []
    counts = []
    for seed in seeds:
        minibatches = built.prepare(random_samples(num_samples, seed=seed))
        counts += [len(minibatch.microbatches) for minibatch in minibatches]
        metrics = built.update(minibatches)
        history += [metrics["loss/sft"], metrics["grad_norm"]]
    return history, counts
