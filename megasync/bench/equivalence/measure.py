"""What each rank of a case does: steps, log-probs before and after, the export before against the folder and after read back.

Groups are built for the case and left after it, so that one start of ranks runs many cases. Leaves out what is right (judge.py).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from bridge.export.source import WeightSource, whole_tensors
from engine import parallel
from engine.engine import Engine
from megasync.bench.equivalence.groups import forget_wrappers, leave_groups
from megasync.bench.equivalence.models import scored_samples, step_samples
from megasync.config.schema import Config
from megasync.reporting.log import RunLog
from megasync.weights import Weights, build_exporter

HISTORY = {"loss/sft": "loss", "loss/policy": "loss", "grad_norm": "grad_norm", "loss/load_balancing": "balance"}
Measured = dict[str, Any]


def measure(config: dict[str, Any], folder: str, micro_batches: int, timeout_seconds: float = 1800.0) -> Measured:
    """One case by a run's config, as a dict. Collective; the same on every rank. The trained model is left in `folder`.

    Raises:
        Exception: whatever the engine raises; the groups are left as they are then, and this process is to end.
    """
    told = Config.model_validate(config)
    parallel.initialize(told.engine.parallel, told.run.seed, timeout_seconds)
    built = build_engine(told)
    measured = _measure(told, built, Path(folder), micro_batches)
    del built
    leave_groups()
    forget_wrappers()
    return measured


def build_engine(told: Config) -> Engine:
    """As a run builds it; the groups are there."""
    length, seed = told.rollout.max_new_tokens, told.run.seed
    return Engine(told.model, told.engine, told.algorithm, num_steps=told.run.steps, max_new_tokens=length, seed=seed)


def _measure(told: Config, built: Engine, folder: Path, micro_batches: int) -> Measured:
    source, seed = build_exporter(built), told.run.seed
    before = _against_folder(source, Path(told.model.path))
    values = [_flat(built.score(scored_samples(seed)))]
    history, counts = [], []
    for step in range(told.run.steps):
        minibatches = built.prepare(step_samples(seed, step, micro_batches))
        counts += [len(minibatch.microbatches) for minibatch in minibatches]
        metrics = built.update(minibatches)
        history.append({name: metrics[key] for key, name in HISTORY.items() if key in metrics})
    values.append(_flat(built.score(scored_samples(seed))))
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
    Weights(told, built, RunLog(told, first_step=0, write=False)).export(folder)
    return {
        "history": history,
        "log_probs": values,
        "micro_batches": [min(counts), max(counts)],
        "export_before": before,
        "export_after": _against_folder(source, folder),
    }


def _flat(values: list[torch.Tensor]) -> list[float]:
    return [number for each in values for number in each.tolist()]


def _against_folder(source: WeightSource, folder: Path) -> Measured:
    """Names of tensors that the export has otherwise than the folder; the same on every rank."""
    disk = {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}
    differing, names = [], []
    for name, tensor in whole_tensors(source):
        names.append(name)
        if name not in disk or not torch.equal(tensor.cpu(), disk[name]):
            differing.append(name)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (names, differing))
    sent = [name for part, _ in parts for name in part]
    return {
        "tensors": len(sent),
        "differing": sorted(name for _, part in parts for name in part),
        "missing": sorted(disk.keys() - set(sent)),
        "twice": sorted({name for name in sent if sent.count(name) > 1}),
    }
