"""The work of each rank of a case: steps, log-probs before and after, the export before against the folder and after read back.

Groups are built for the case and left after it, so that one start of ranks runs many cases. Leaves out the bounds (judge.py).
"""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from bench.equivalence.models import scored_samples, step_samples
from bridge.export.source import WeightSource, whole_tensors
from engine.engine import Engine
from engine.runtime import parallel
from engine.runtime.megatron import parallel_state as mpu
from engine.sample import RolloutSampling
from megasync.config.schema import Config
from megasync.run.weights import Weights, build_exporter

HISTORY = {"loss/sft": "loss", "loss/total": "loss", "grad_norm": "grad_norm", "loss/load_balancing": "balance"}
FSDP_CLASSES = (
    *("MegatronFSDP", "ParamAndGradBuffer", "DataParallelBuffer", "FSDPDistributedIndex"),
    *("AllGatherPipeline", "GradReducePipeline"),
)
Measured = dict[str, Any]


def measure(config: dict[str, Any], folder: str, micro_batches: int, timeout_seconds: float = 1800.0) -> Measured:
    """One case by a run's config, as a dict. Collective; the same on every rank. The trained model is left in `folder`.

    Raises:
        Exception: whatever the engine raises; the groups are left as they are then, and this process is to end.
    """
    parsed = Config.model_validate(config)
    parallel.initialize(parsed.engine.parallel, parsed.run.seed, timeout_seconds)
    built = build_engine(parsed)
    measured = _measure(parsed, built, Path(folder), micro_batches)
    del built
    leave_groups()
    forget_wrappers()
    return measured


def build_engine(parsed: Config) -> Engine:
    """The engine of a run with this config; the process groups exist already."""
    length, seed = parsed.rollout.max_new_tokens, parsed.run.seed
    sampling = RolloutSampling(max_new_tokens=length)
    return Engine(parsed.model, parsed.engine, parsed.algorithm, num_steps=parsed.run.steps, sampling=sampling, seed=seed)


def _measure(parsed: Config, built: Engine, folder: Path, micro_batches: int) -> Measured:
    source, seed = build_exporter(built), parsed.run.seed
    before = _against_folder(source, Path(parsed.model.path))
    values = [_flat(built.score(scored_samples(seed)))]
    history, counts = [], []
    for step in range(parsed.run.steps):
        minibatches = built.prepare(step_samples(seed, step, micro_batches))
        counts += [len(minibatch.microbatches) for minibatch in minibatches]
        metrics = built.update(minibatches)
        history.append({name: metrics[key] for key, name in HISTORY.items() if key in metrics})
    values.append(_flat(built.score(scored_samples(seed))))
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
    Weights(parsed, built).export(folder)
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
    """Names of tensors that differ between export and folder; the same on every rank."""
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


def leave_groups() -> None:
    """Give megatron-core's groups up and stay in the world, for an `initialize` with another layout.

    megatron-core 0.16.1 forgets its groups without ending them (core/parallel_state.py:2085), and each has threads.
    """
    if mpu.is_initialized():
        dist.barrier()
        groups, mpu._global_process_group_list = mpu._global_process_group_list or [], None
        for group in groups:
            if group is not None:  # None stands for the world
                dist.destroy_process_group(group)
        mpu.destroy_model_parallel()


def forget_wrappers() -> None:
    """Take Megatron-FSDP's objects apart: gradient hooks, which Python's collector does not see, keep them for ever.

    With them their process groups would stay, whose threads wake up a hundred times a second.
    """
    for thing in gc.get_objects():
        if type(thing).__name__ in FSDP_CLASSES and str(type(thing).__module__).startswith("megatron_fsdp."):
            vars(thing).clear()
    gc.collect()
